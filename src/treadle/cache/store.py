"""The prefix cache: from token ids to layers that already hold a part of them, and back. Engine thread only.

    acquire   the longest usable prefix -> layers, n        publish   what a running sequence computed so far
    release   park the layers, or cut them into the tree     keep      stay within the budget, quantise what is idle

Reading never consumes: a prefix that others use is copied. A conversation that continues itself gets its own layers
back without a copy. `Store` knows when bytes move; `segments.py` and `transfer.py` know how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from treadle.cache.budget import Budget, Evictions, Reason, plan_eviction
from treadle.cache.layers import Layers
from treadle.cache.node import Match, MatchKind, Node, Root
from treadle.cache.packed_rows import PackedRows
from treadle.cache.segments import Holder, Live, Owned, Packed, is_live, rows_of
from treadle.cache.spill import Spill
from treadle.cache.transfer import Snapshot, fill, full_rows, needs_snapshots, snapshot
from treadle.cache.tree import Tree
from treadle.cache.usable import parked, pieces, reach, readable, usable
from treadle.types import Ids

log = logging.getLogger("treadle.cache")

IDLE_PACK_S = 10.0  # an unused segment is quantised after so long
LAST_SNAPSHOTS = 2  # of a node: before the last token of the prompt, and at the end of the reply


@dataclass(frozen=True, slots=True)
class Settings:
    """The cache's part of the configuration. `bits` 0 leaves idle segments as they are."""

    budget: Budget
    limit: int  # the memory limit in bytes
    bits: int = 0
    group_size: int = 64
    min_tokens: int = 256


@dataclass(slots=True)
class ReuseCounts:
    """Prompt tokens that were served from the cache, and that were computed."""

    reused: int = 0
    computed: int = 0


@dataclass(slots=True)
class Lease:
    """What `acquire` gives a sequence: its place in the tree, layers, and how many tokens they hold."""

    holder: Holder
    layers: Layers
    length: int


@dataclass(slots=True)
class Store:
    """See the module. `now` in seconds; `active_memory` is what the device counts."""

    settings: Settings
    now: Callable[[], float] = time.monotonic
    active_memory: Callable[[], int] = mx.get_active_memory
    tree: Tree = field(init=False)
    evictions: Evictions = field(default_factory=Evictions)
    reuse: ReuseCounts = field(default_factory=ReuseCounts)
    spill: Spill | None = None  # the disk tier

    def __post_init__(self) -> None:
        self.tree = Tree(self.now)

    # Giving

    def acquire(
        self,
        key: Hashable,
        ids: Ids,
        fresh: Layers,
        positions: Sequence[int] = (),
        other: tuple[Hashable, Ids] | None = None,
    ) -> Lease:
        """Layers with the longest usable prefix of `ids`; at least one token is left to compute.

        `fresh` are empty layers with room; they are used unless a parked sequence continues itself. `positions` are
        those at which this prompt gets snapshots, should it need any. `other`: a key and ids under which the beginning
        of the prompt may be stored too; what serves longer there is copied.
        `locate` of the returned holder must be set by the caller before the next call of the store.
        """
        root = self._loaded(key, ids, fresh, positions)
        match = self.tree.peek(root, ids)
        kind = match.kind
        most = min(readable(match), len(ids) - 1)
        beside = 0 if other is None else self.reach(*other, fresh, positions)
        own = parked(match, most)
        if own is not None and (kept := reach(own, most)) >= max(beside, 1):
            lease = self._continue(own, kept, len(ids))
        else:
            length, held = usable(match, most, fresh)
            lease = Lease(Holder(root, lambda: (fresh, 0)), fresh, length)
            if other is not None and beside > length:
                lease.length, kind = self._copied(*other, fresh)
            elif length:
                self._fill(fresh, match, length, held)
                lease.holder.leaf = next(n for n in match.nodes if n.start < length <= n.end)
        self.tree.count(kind)
        self._hold(lease)
        self.reuse.reused += lease.length
        self.reuse.computed += len(ids) - lease.length
        return lease

    def _loaded(self, key: Hashable, ids: Ids, layers: Layers, positions: Sequence[int]) -> Root:
        """The root of a key, with what the disk has of `ids`."""
        root = self.tree.root(key)
        if self.spill is not None:
            wanted = positions if needs_snapshots(layers) else None
            self.spill.load(self.tree, root, ids[:-1], wanted, bool(full_rows(layers)))
        return root

    def reach(self, key: Hashable, ids: Ids, layers: Layers, positions: Sequence[int] = ()) -> int:
        """How many of the first `ids` would be served to a sequence with such layers, by a copy; nothing is counted."""
        match = self.tree.peek(self._loaded(key, ids, layers, positions), ids)
        return usable(match, min(readable(match), len(ids) - 1), layers)[0]

    def _copied(self, key: Hashable, ids: Ids, fresh: Layers) -> tuple[int, MatchKind]:
        """Fill empty layers from what `reach` found; how many tokens that were, and how they were found.

        `ids` are the beginning of a longer prompt, of which nothing more is stored there.
        """
        match = self.tree.peek(self.tree.root(key), ids)
        length, held = usable(match, min(readable(match), len(ids) - 1), fresh)
        self._fill(fresh, match, length, held)
        return length, MatchKind.PREFIX if match.kind in (MatchKind.EXACT, MatchKind.PREFIX) else MatchKind.BRANCH

    def _fill(self, fresh: Layers, match: Match, length: int, held: Snapshot | None) -> None:
        fill(fresh, [rows_of(n).read(used) for n, used in pieces(match, length)], length, held)
        mx.eval(fresh.arrays())

    def _hold(self, lease: Lease) -> None:
        holder = lease.holder
        if holder.leaf is not None:
            holder.known = lease.length
            self.tree.touch(holder.leaf)
            self.tree.pin(holder.leaf)

    def _continue(self, holder: Holder, length: int, num_tokens: int) -> Lease:
        """Give a parked sequence its own layers back, rewound to `length`. What lay beyond is kept as a copy.

        They grow to `num_tokens` at once, not chunk by chunk.
        """
        layers, _ = holder.locate()
        if length < holder.known:
            self._cut(holder, length)
            layers.rewind(0, holder.known - length)
        for node in holder.nodes():
            self.tree.replace_payload(node, Live(holder, node.start, node.end))
        holder.parked = False
        layers.reserve(num_tokens)
        return Lease(holder, layers, length)

    # Taking

    def publish(self, holder: Holder, ids: Ids) -> None:
        """Make the first `len(ids)` computed tokens of a running sequence available to others. Copies nothing."""
        if len(ids) <= holder.known:
            return
        old = holder.leaf
        if old is None or (not old.children and old.end == holder.known and not is_live(old.payload, holder)):
            leaf = self.tree.insert(holder.root, ids, lambda a, b: Live(holder, a, b))
        else:
            leaf = self.tree.extend(old, ids, holder.known, lambda a, b: Live(holder, a, b))
        self.tree.pin(leaf)
        if old is not None:
            self.tree.unpin(old)
        holder.leaf, holder.known = leaf, len(ids)
        self._heal(holder)

    def _heal(self, holder: Holder) -> None:
        """Take over what a fault lost and what is left of parked layers whose end went to this sequence.

        A running sequence has every row from the root to `known`, and none beyond.
        """
        assert holder.leaf is not None
        for node in holder.leaf.path():
            if node.end <= holder.known and isinstance(node.payload, Live) and node.payload.holder.stale:
                self.tree.replace_payload(node, Live(holder, node.start, node.end))

    def checkpoint(self, holder: Holder, back: int = 0) -> None:
        """Keep the recurrent and windowed layers as they are after the last published token."""
        layers, row = holder.locate()
        if holder.leaf is None or not needs_snapshots(layers):
            return
        held = snapshot(layers, row, back)
        mx.eval(held.arrays())
        self.tree.add_checkpoint(holder.leaf, held.position, held)

    def release(self, holder: Holder, ids: Ids) -> None:
        """The sequence ended with the rows of `ids` computed (and perhaps more). Alone it parks; a row is cut out."""
        layers, row = holder.locate()
        self.publish(holder, ids)
        if holder.leaf is None:
            return
        back = layers.lengths[row] - len(ids)
        rewindable = back == 0 or not layers.states
        if rewindable:
            self.checkpoint(holder, back)
        nodes = holder.nodes()
        whole = len(nodes) == len(holder.leaf.path()) and holder.leaf.end == len(ids)
        if layers.num_rows == 1 and whole and rewindable:
            layers.rewind(0, back)
            holder.park(layers)
            nbytes = layers.nbytes - sum(a.nbytes for s in layers.states for a in s.arrays())  # those the snapshot has
            for node in nodes:
                share = nbytes * node.end // len(ids) - nbytes * node.start // len(ids)
                self.tree.replace_payload(node, Live(holder, node.start, node.end, share))
        else:
            self._cut(holder, 0)
            holder.lose()
        self.tree.unpin(holder.leaf)
        if self.spill is not None:
            self.spill.dirty = True

    def forget(self, holder: Holder) -> None:
        """The sequence's layers cannot be trusted (a fault): nothing is read from them any more."""
        holder.lose()
        if holder.leaf is not None:
            self.tree.unpin(holder.leaf)
            holder.leaf = None

    def _cut(self, holder: Holder, start: int) -> None:
        """Turn the holder's rows from token `start` on into owned segments."""
        for node in reversed(holder.nodes()):
            if node.end <= start:
                break
            if node.start < start:
                self.tree.split(node, start - node.start)
            self.tree.replace_payload(node, Owned(rows_of(node).read(node.length)))
        if holder.leaf is not None and start and holder.leaf.end > start:
            holder.leaf = next(n for n in holder.leaf.path() if n.start < start <= n.end)

    # Keeping within bounds

    def keep(self, budget: Budget | None = None) -> None:
        """Evict, least recently used first, until the budget, the idle time and the memory limit are kept."""
        budget = budget or self.settings.budget
        for node in self.tree.evict_order():
            reason = self._reason(node, budget)
            while reason in (Reason.BUDGET, Reason.PRESSURE) and self._thin(node, reason):
                reason = self._reason(node, budget)
            if reason is None:
                return
            self._evict(node, reason)

    def _reason(self, node: Node, budget: Budget) -> Reason | None:
        """Why the least recently used node has to go, if it has to."""
        plan = plan_eviction(
            [node],
            budget,
            used=self.tree.totals.nbytes,
            now=self.now(),
            active_memory=self.active_memory(),
            limit=self.settings.limit,
        )
        return plan[0].reason if plan else None

    def _thin(self, node: Node, reason: Reason) -> bool:
        """Drop every other of a node's snapshots but the last ones; one conversation may have more than fit."""
        before = node.state_bytes
        for checkpoint in node.checkpoints[:-LAST_SNAPSHOTS][::2]:
            self.tree.drop_checkpoint(node, checkpoint)
        self.evictions.freed[reason] += before - node.state_bytes
        return node.state_bytes < before

    def make_room(self, nbytes: int) -> None:
        """Hold at most `nbytes`, for a request that needs the rest."""
        if self.tree.totals.nbytes > nbytes:
            self.keep(Budget(max(nbytes, 0), self.settings.budget.idle_s))

    def clear(self) -> int:
        """Drop everything that is not in use. Returns the bytes freed."""
        before = self.tree.totals.nbytes
        for node in self.tree.evict_order():
            self._evict(node, Reason.BUDGET)
        if self.spill is not None:
            self.spill.clear()
        return before - self.tree.totals.nbytes

    def save(self) -> None:
        """Hand the disk what it lacks, as far as its writer has room."""
        while self.spill is not None and self.spill.save_one(self.tree):
            pass

    def drop(self, revision: Hashable) -> None:
        """Forget what is not in use of a model that is unloaded: everything whose root's key begins with it.

        The disk keeps its files, and gets what it lacks as far as its writer has room.
        """
        self.save()
        for node in self.tree.evict_order():
            if _key_of(node)[0] == revision:
                self._evict(node, Reason.UNLOAD)

    def _evict(self, node: Node, reason: Reason) -> None:
        before = self.tree.totals.nbytes
        holder = node.payload.holder if isinstance(node.payload, Live) and node.payload.holder.parked else None
        self.tree.remove(node)
        if holder is not None:
            # Its layers go as a whole: what is left of its path, and was used more recently, gets rows of its own.
            holder.leaf = node.parent if isinstance(node.parent, Node) else None
            self._cut(holder, 0)
            holder.lose()
        self.evictions.record(reason, before - self.tree.totals.nbytes)

    def tidy(self) -> bool:
        """One small piece of work for idle moments. Returns whether there may be more."""
        self.keep()
        return self.pack() or (self.spill is not None and self.spill.save_one(self.tree))

    def pack(self) -> bool:
        """Quantise one idle segment, if that is wanted. Returns whether there was one."""
        return bool(self.settings.bits) and self.pack_one(self.settings.bits, IDLE_PACK_S, self.settings.limit)

    def pack_one(self, bits: int, idle_s: float, room: int, apart: str | None = None) -> bool:
        """Quantise what was idle for longest, see `packable`."""
        node = self.packable(idle_s, room, apart)
        if node is None:
            return False
        if isinstance(node.payload, Live):
            holder = node.payload.holder
            self._cut(holder, 0)
            holder.lose()
        if isinstance(node.payload, Owned) and node.payload.exact:
            packed = Packed.of(node.payload, node.length, bits, self.settings.group_size)
            self.tree.replace_payload(node, packed)
        return True

    def packable(self, idle_s: float, room: int, apart: str | None = None) -> Node | None:
        """What was idle for longest, at least `idle_s`, and takes at most `room` bytes to copy.

        Roots whose key has `apart` in it are left alone.
        """
        for node in self.tree.nodes():
            if self.now() - node.last_used < idle_s:
                return None
            idle = not node.pins and (apart is None or apart not in _key_of(node))
            if idle and node.length >= self.settings.min_tokens and _exact(node, room):
                return node
        return None

    @property
    def evictable(self) -> int:
        """Bytes that go if everything goes that is not in use."""
        return sum(node.nbytes for node in self.tree.evict_order())


def _key_of(node: Node) -> tuple[Hashable, ...]:
    """The key of its root."""
    root = node.path()[0].parent
    assert isinstance(root, Root) and isinstance(root.key, tuple)
    return root.key


def _exact(node: Node, room: int) -> bool:
    """Whether it has exact rows at rest, which take at most `room` bytes to copy."""
    payload = node.payload
    if isinstance(payload, Live):
        holder = payload.holder
        return holder.parked and sum(n.rows_bytes for n in holder.nodes()) <= room and _plain(holder)
    return isinstance(payload, Owned) and payload.exact and payload.nbytes <= room


def _plain(holder: Holder) -> bool:
    layers, _ = holder.locate()
    return not any(isinstance(r, PackedRows) for r in layers.rows)
