"""Where the loop meets the prefix cache: which sequence may use, publish and leave what. Engine thread only.

With `store` None (switched off, or a model whose layers cannot be cut) every method does nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from pathlib import Path

import numpy as np

from treadle.cache.budget import Budget, default_bytes
from treadle.cache.disk import DiskTier
from treadle.cache.formats import ASKED, form_of
from treadle.cache.layers import Layers
from treadle.cache.node import agreement
from treadle.cache.segments import Holder
from treadle.cache.spill import Spill
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.sequence import Sequence
from treadle.runtime import device_facts
from treadle.types import Caps, LayerKind
from treadle.vision.spans import outside

log = logging.getLogger("treadle.cache")

MOST_TURNS = 4  # of the turn boundaries of a prompt, the last ones that get a checkpoint
FREE_FLOOR = 2 * 10**9  # bytes that the disk tier leaves free
SPARSE = "sparse"  # in the key of rows of prompts with gaps
WORTH_WAITING = 32  # tokens that another sequence is about to compute


class Reuse:
    """The loop's use of one model's prefix cache. `revision` names the rows that may be shared.

    `packs`: whether idle exact rows go to fewer bits when memory runs short. Those of requests that ask for exact rows
    are kept apart then.
    """

    def __init__(
        self, store: Store | None, caps: Caps, checkpoint_every: int, revision: str = "", packs: bool = True
    ) -> None:
        foreign = LayerKind.FOREIGN in caps.layers
        self.store = None if foreign else store
        self.failures: Counter[str] = Counter()
        self.note = "This model keeps a cache of its own that cannot be cut, so no prefix is reused." if foreign else ""
        self.revision = revision
        self.packs = packs
        self.kv = caps.kv
        self._partial = any(kind is not LayerKind.ROWS for kind in caps.layers)
        self.checkpoint_every = checkpoint_every
        self._common: dict[tuple[str, str], int] = {}

    def acquire(self, sequence: Sequence, new_layers: Callable[[], Layers]) -> None:
        """Give a sequence its layers: with the longest stored prefix, or empty ones."""
        alone = self.store is None or sequence.request.computes_all
        if alone or not self._tried("look-up", lambda: self._lease(sequence, new_layers())):
            sequence.layers, sequence.computed = new_layers(), 0
            sequence.layers.reserve(sequence.pending)

    def _tried(self, what: str, run: Callable[[], object]) -> bool:
        """A failure in the cache is a miss: it is logged once for its kind and counted, and nobody's request ends."""
        try:
            run()
        except Exception as error:
            if not self.failures[what]:
                log.exception("The prefix cache failed at its %s; going on without.", what)
            self.failures[what] += 1
            self.note = f"The cache failed {self.failures[what]} times at its {what}; the last error: {error}"
            return False
        return True

    def _key(self, sequence: Sequence) -> tuple[str, ...]:
        kv = sequence.kv or self.kv
        form = form_of(kv) if not kv.exact else ASKED if self.packs and sequence.request.kv is not None else None
        return (self.revision, sequence.request.cache_salt, *(() if form is None else (form,)))

    def reach(self, sequence: Sequence, new_layers: Callable[[], Layers]) -> int:
        """How many tokens of a sequence without layers need not be computed."""
        found = 0

        def look() -> None:
            nonlocal found
            if self.store is not None and not sequence.request.computes_all:
                found = self.store.reach(self._key(sequence), sequence.keys, new_layers(), self._positions(sequence))

        self._tried("look-up", look)
        return found

    def _lease(self, sequence: Sequence, fresh: Layers) -> None:
        assert self.store is not None
        fresh.reserve(sequence.pending)
        key, other, keys = self._key(sequence), None, sequence.keys
        if sequence.places is not None:  # rows behind a gap are kept apart; those before it may be anybody's
            behind = int(np.argmax(sequence.places != np.arange(len(sequence.places))))
            key, other = (*key, SPARSE), (key, keys[:behind])
        lease = self.store.acquire(key, keys, fresh, self._positions(sequence), other)
        sequence.holder, sequence.layers, sequence.computed = lease.holder, lease.layers, lease.length
        layers = lease.layers
        lease.holder.locate = lambda: (layers, 0)
        if not (sequence.retried or sequence.preempted):
            sequence.cached = min(lease.length, sequence.num_prompt)
            sequence.reckon()

    def coming(self, sequence: Sequence, prefilling: Several[Sequence]) -> bool:
        """Whether a running prefill is about to compute a good part of what this one, not yet begun, needs."""
        if self.store is None or sequence.request.computes_all:
            return False
        begun = [s for s in prefilling if s.holder is not None]
        begun = [s for s in begun if s.places is None]  # rows behind gaps serve hardly anybody
        same = [s for s in begun if (s.request.cache_salt, s.kv) == (sequence.request.cache_salt, sequence.kv)]
        return any(self._shared(sequence, s) - s.computed >= WORTH_WAITING for s in same)

    def _shared(self, a: Sequence, b: Sequence) -> int:
        key = (a.id, b.id)
        if key not in self._common:
            if len(self._common) > 4096:
                self._common.clear()
            self._common[key] = agreement(a.keys, b.keys)
        return self._common[key]

    def up_to_checkpoint(self, sequence: Sequence, n: int) -> int:
        """Shorten a chunk so that it ends where a checkpoint is due."""
        due = self._next_checkpoint(sequence)
        return n if due is None else min(n, due - sequence.computed)

    def _next_checkpoint(self, sequence: Sequence) -> int | None:
        if self.store is None or not self._needs_snapshots(sequence):
            return None
        positions = self._positions(sequence)
        i = bisect_right(positions, sequence.computed)
        return positions[i] if i < len(positions) else None

    def _needs_snapshots(self, sequence: Sequence) -> bool:
        return self._partial or not (sequence.kv or self.kv).exact

    def _positions(self, sequence: Sequence) -> list[int]:
        """Where checkpoints are due in a prompt: its last turns, every so many tokens, and before its last token."""
        last = sequence.num_prompt - 1
        regular = range(self.checkpoint_every, last, self.checkpoint_every)
        turns = [b for b in sequence.request.boundaries[-MOST_TURNS:] if 0 < b < last]
        due = {outside(sequence.request.spans, position) for position in (*regular, *turns)}
        return sorted({*due, last} - {0})

    def publish(self, sequence: Sequence) -> None:
        """After a chunk: let others use it, and take the checkpoint that is due."""
        if self.store is not None and sequence.holder is not None:
            holder, store = sequence.holder, self.store
            if not self._tried("publishing", lambda: self._publish(store, holder, sequence)):
                self.forget(sequence)

    def _publish(self, store: Store, holder: Holder, sequence: Sequence) -> None:
        store.publish(holder, sequence.keys[: sequence.computed])
        if self._needs_snapshots(sequence) and sequence.computed in self._positions(sequence):
            store.checkpoint(holder)
        store.keep()

    def release(self, sequence: Sequence, stop_id: int | None) -> None:
        """The sequence ends: what it computed stays for others. An end id that was fed already counts."""
        if self.store is None or sequence.holder is None:
            return
        holder, store = sequence.holder, self.store
        ids = sequence.keys if stop_id is None else sequence.keys_with(stop_id)
        if self._tried("release", lambda: store.release(holder, ids[: sequence.computed])):
            sequence.holder = None  # its pin is gone
            self._tried("eviction", store.keep)
        else:
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Its layers may be damaged: nobody reads them any more."""
        if self.store is not None and sequence.holder is not None:
            self.store.forget(sequence.holder)
            sequence.holder = None

    def make_room(self, nbytes: int) -> None:
        """Let the cache hold at most `nbytes`."""
        if self.store is not None:
            store = self.store
            self._tried("eviction", lambda: store.make_room(nbytes))

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may be kept without anything else having to go."""
        return self.store is not None and self.store.tree.totals.nbytes + nbytes <= self.store.settings.budget.nbytes

    def tidy(self) -> bool:
        """One small piece of work for idle moments; whether there may be more."""
        more = False

        def work() -> None:
            nonlocal more
            more = self.store is not None and self.store.tidy()

        return self._tried("upkeep", work) and more

    def leave(self, revision: str) -> None:
        """A model is unloaded: nobody continues its prefixes in memory. The disk keeps them."""
        if self.store is not None:
            store = self.store
            self._tried("unloading", lambda: store.drop(revision))


def store_of(config: Config, limit: int) -> Store | None:
    """The prefix cache that `config` asks for; None when it is off. Raises ConfigError for a bad cache folder."""
    if config.cache_gb == 0:
        return None
    facts = device_facts()
    nbytes = default_bytes(facts.working_set_bytes) if config.cache_gb is None else int(config.cache_gb * 1e9)
    bits = 0 if config.cache_quantization == "off" else int(config.cache_quantization)
    store = Store(
        Settings(Budget(nbytes, config.cache_idle_s), limit, bits, config.cache_group_size, config.cache_min_tokens)
    )
    if config.cache_dir is not None:
        folder = Path(config.cache_dir).expanduser()
        tier = DiskTier(folder, int(config.cache_disk_gb * 1e9), free_floor_bytes=FREE_FLOOR)
        tier.start()
        store.spill = Spill(tier, config.cache_min_tokens)
    return store
