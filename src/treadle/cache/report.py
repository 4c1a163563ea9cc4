"""What is told about the prefix cache. Engine thread; the result may go anywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from treadle.cache.segments import Live
from treadle.cache.store import Store
from treadle.types import CacheEntry, CacheReport
from treadle.vision.spans import has_picture

MOST_ENTRIES = 1000  # the most recently used stored prefixes that are listed one by one


def cache_report(store: Store, note: str = "") -> CacheReport:
    """Counts and sizes now; one entry per stored path (root to leaf)."""
    now = store.now()
    by_tier: Counter[str] = Counter()
    leaves = []
    for node in store.tree.nodes():
        by_tier[_tier(node.payload)] += node.rows_bytes
        by_tier["memory"] += node.state_bytes
        if not node.children:
            leaves.append(node)
    seen = {id(node): has_picture(node.edge) for node in store.tree.nodes()}
    entries = [
        CacheEntry(
            tokens=leaf.end,
            bytes=sum(n.nbytes for n in leaf.path()),
            hits=leaf.hits,
            age_s=round(now - leaf.last_used, 3),
            tier=_tier(leaf.payload),
            has_images=any(seen[id(n)] for n in leaf.path()),
        )
        for leaf in leaves[: -MOST_ENTRIES - 1 : -1]
    ]
    return CacheReport(
        enabled=True,
        budget_bytes=store.settings.budget.nbytes,
        used_bytes=store.tree.totals.nbytes,
        entries=tuple(entries),
        hits={str(kind): n for kind, n in store.tree.kinds.items()},
        reused_tokens=store.reuse.reused,
        computed_tokens=store.reuse.computed,
        evictions={str(reason): n for reason, n in store.evictions.counts.items()},
        freed_bytes={str(reason): n for reason, n in store.evictions.freed.items()},
        bytes_by_tier=dict(by_tier),
        disk=None if store.spill is None else asdict(store.spill.tier.snapshot()),
        note=note,
    )


def _tier(payload: object) -> str:
    if isinstance(payload, Live):
        return "parked" if payload.holder.parked else "live"
    return str(getattr(payload, "tier", ""))
