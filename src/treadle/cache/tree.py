"""The prefix tree: which key ids have rows, and where. Pure; engine thread only.

A radix tree whose edges are int64 arrays. It never looks into a payload and never decides what to evict: it
answers what a prompt shares with what is stored, and keeps the order of use and the totals.

- A split keeps the old object as the *lower* half, so that whoever holds the end of a path (a pin, a growing
  prompt) still holds its end.
- Only leaves are removed, so a pin on a node protects its whole path.
- A node whose siblings are gone is not merged with its only child: the rows would have to be copied, and what
  it costs is one dictionary look-up and one comparison per former branch point (about a microsecond).
- Key ids that share no root never meet. A root lives as long as it has nodes or somebody holds it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import numpy as np

from treadle.cache.check import check_tree
from treadle.cache.node import Checkpoint, Held, Match, MatchKind, Node, Parent, Root, Segment, upwards, walk
from treadle.cache.recency import Recency
from treadle.types import Ids

MakePayload = Callable[[int, int], Segment]
"""`(start, end)` to the segment with the rows of these positions. Must not change the tree."""


@dataclass(slots=True)
class Totals:
    """What a tree holds."""

    tokens: int = 0
    nodes: int = 0
    entries: int = 0  # leaves, that is stored paths
    rows_bytes: int = 0
    state_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.rows_bytes + self.state_bytes


class Tree:
    """See the module. Misuse (ids of a wrong type, a pinned node removed) raises ValueError."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Weak: nodes keep their root alive, and a root without nodes (a salt never seen again) is forgotten.
        self._roots: WeakValueDictionary[Hashable, Root] = WeakValueDictionary()
        self._recency = Recency()
        self._totals = Totals()
        self._kinds: Counter[MatchKind] = Counter()

    # -- looking up

    def root(self, key: Hashable) -> Root:
        """The root of one kind of rows: model revision, KV format, adapter, salt, exact or sparse."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key)
        return root

    def match(self, root: Root, ids: Ids) -> Match:
        """The longest common prefix of `ids` [n] and what is stored; counts its kind, nothing else."""
        found = self.peek(root, ids)
        self.count(found.kind)
        return found

    def peek(self, root: Root, ids: Ids) -> Match:
        """As `match`, without counting."""
        _require_ids(ids)
        return walk(root, 0, ids)

    def count(self, kind: MatchKind) -> None:
        """A prompt was served in this way."""
        self._kinds[kind] += 1

    # -- storing

    def insert(self, root: Root, ids: Ids, make_payload: MakePayload) -> Node:
        """Store `ids` [n >= 1]: what is new becomes one leaf with `make_payload(start, n)`.

        Returns the node that covers the last id. If nothing is new, that is an existing node, which may be
        longer (`split` it to end it there).
        """
        _require_ids(ids)
        if len(ids) == 0:
            raise ValueError("An empty sequence cannot be stored.")
        return self._attach(root, walk(root, 0, ids), ids, make_payload)

    def extend(self, node: Node, ids: Ids, known: int, make_payload: MakePayload) -> Node:
        """Publish more of a sequence whose first `known` ids are stored on the path of `node`.

        `ids` [n >= known] is the whole sequence so far; only `ids[known:]` is read, so that publishing chunk
        by chunk costs O(n) altogether. A leaf that ends where the new ids begin **grows in place**: a prompt
        published in 256 chunks is still one edge (one comparison) and not 256. Its payload is replaced by
        `make_payload(leaf.start, n)`. Otherwise (others branched off, or went on, meanwhile) as `insert`.
        Use `insert` to keep the leaf's payload and add a node below it.
        Returns the node that covers the last id, for the next `extend`.
        """
        _require_ids(ids)
        self._require_linked(node)
        if not 0 < known <= min(node.end, len(ids)):
            raise ValueError(f"{known} ids cannot be known of {len(ids)} on a path of {node.end}.")
        holder = next(n for n in upwards(node) if n.start < known)
        found = walk(holder, known, ids)
        if found.kind is not MatchKind.PREFIX:
            return self._attach(holder, found, ids, make_payload)
        return self._grow(found.nodes[-1], ids, make_payload)

    def split(self, node: Node, at: int) -> Node:
        """Cut an edge after its first `at` tokens (0 < at < length). Returns the new upper node.

        `node` becomes the lower part and keeps its children and pins. Checkpoints go where their position
        lies. Both halves get their own copy of their ids: a short half never keeps a long array alive.
        """
        self._require_linked(node)
        if not 0 < at < node.length:
            raise ValueError(f"An edge of {node.length} tokens cannot be split at {at}.")
        head, tail = node.payload.split(at)
        upper = Node(node.parent, node.start, node.edge[:at].copy(), at, head, node.created, node.last_used)
        upper.hits = node.hits
        upper.checkpoints = node.cut_checkpoints(upper.end)
        node.parent.children[node.first] = upper
        node.parent, node.start = upper, upper.end
        node.buffer, node.length = node.edge[at:].copy(), node.length - at
        upper.children[node.first] = node
        self._recency.add_after(upper, node)
        self._totals.nodes += 1
        self.replace_payload(node, tail)
        self.replace_payload(upper, head)
        self._account_state(node)
        self._account_state(upper)
        return upper

    def replace_payload(self, node: Node, payload: Segment) -> None:
        """Exchange the rows of an edge for another form of them (owned, quantised, on disk)."""
        node.payload = payload
        self._totals.rows_bytes += payload.nbytes - node.rows_bytes
        node.rows_bytes = payload.nbytes

    def add_checkpoint(self, node: Node, position: int, value: Held) -> Node:
        """Attach the state after `position` tokens (0 < position <= node.end) where `node`'s path has it.

        A checkpoint already there is replaced. Returns the node that holds it.
        """
        self._require_linked(node)
        if not 0 < position <= node.end:
            raise ValueError(f"Position {position} does not lie on a path of {node.end} tokens.")
        holder = next(n for n in upwards(node) if n.start < position)
        holder.put_checkpoint(Checkpoint(position, value))
        self._account_state(holder)
        return holder

    def drop_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Forget one of the node's own checkpoints."""
        node.checkpoints.remove(checkpoint)
        self._account_state(node)

    # -- keeping and evicting

    def touch(self, node: Node) -> None:
        """Note a use of the path that ends in `node`: it becomes the most recently used, and counts a hit."""
        self._require_linked(node)
        for place in upwards(node):
            place.hits += 1
        self._recency.refresh(node, self._clock())

    def pin(self, node: Node) -> None:
        """Keep `node` and all above it until `unpin`; pins add up."""
        self._require_linked(node)
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Take one pin back. Pass the object that was pinned: after a split it is the lower part."""
        if node.pins == 0:
            raise ValueError("The node is not pinned.")
        node.pins -= 1

    def remove(self, node: Node) -> None:
        """Take an unpinned leaf out. Its payload and checkpoints stay on the object until that is let go."""
        self._require_linked(node)
        if node.children or node.pins:
            raise ValueError("Only unpinned leaves can be removed.")
        parent = node.parent
        del parent.children[node.first]
        self._recency.remove(node)
        self._totals.tokens -= node.length
        self._totals.nodes -= 1
        self._totals.rows_bytes -= node.rows_bytes
        self._totals.state_bytes -= node.state_bytes
        if isinstance(parent, Root) or parent.children:  # otherwise the parent is the leaf now
            self._totals.entries -= 1

    def evict_order(self) -> Iterator[Node]:
        """What may be removed, least recently used first, and nodes only after all that is below them.

        Removing the first k in this order is always allowed and costs O(k), plus one step per node passed
        over because it or something below it is pinned. The node just yielded may be removed meanwhile.
        """
        kept: set[int] = set()
        for node in self._recency:
            if node.pins or id(node) in kept:
                kept.add(id(node.parent))
            else:
                yield node

    # -- reporting

    def nodes(self) -> Iterator[Node]:
        """All nodes, least recently used first."""
        return iter(self._recency)

    @property
    def totals(self) -> Totals:
        """A copy of the totals, kept incrementally."""
        return replace(self._totals)

    @property
    def kinds(self) -> dict[MatchKind, int]:
        """How many look-ups found what, every kind included."""
        return {kind: self._kinds[kind] for kind in MatchKind}

    def check(self) -> None:
        """Verify every invariant in O(nodes); AssertionError names the first that does not hold."""
        check_tree(list(self._recency), dict(self._roots), self._totals)

    # -- inside

    def _attach(self, start: Parent, found: Match, ids: Ids, make_payload: MakePayload) -> Node:
        """Add what `found` (a walk from `start`) lacks of `ids`."""
        place: Parent = found.nodes[-1] if found.nodes else start
        if found.length < len(ids):
            place = self._add_leaf(place, found, ids, make_payload)
        assert isinstance(place, Node)  # ids are not empty
        self._recency.refresh(place, self._clock())
        return place

    def _add_leaf(self, place: Parent, found: Match, ids: Ids, make_payload: MakePayload) -> Node:
        payload = make_payload(found.length, len(ids))
        if isinstance(place, Node) and found.used < place.length:
            place = self.split(place, found.used)
        now = self._clock()
        tail = ids[found.length :].copy()
        leaf = Node(place, found.length, tail, len(tail), payload, now, now)
        if isinstance(place, Root) or place.children:
            self._totals.entries += 1
        place.children[leaf.first] = leaf
        self._recency.add_newest(leaf)
        self._totals.nodes += 1
        self._totals.tokens += leaf.length
        self.replace_payload(leaf, payload)
        return leaf

    def _grow(self, leaf: Node, ids: Ids, make_payload: MakePayload) -> Node:
        payload = make_payload(leaf.start, len(ids))
        self._totals.tokens += len(ids) - leaf.end
        leaf.append(ids[leaf.end :])
        self.replace_payload(leaf, payload)
        self._recency.refresh(leaf, self._clock())
        return leaf

    def _account_state(self, node: Node) -> None:
        nbytes = sum(checkpoint.value.nbytes for checkpoint in node.checkpoints)
        self._totals.state_bytes += nbytes - node.state_bytes
        node.state_bytes = nbytes

    def _require_linked(self, node: Node) -> None:
        if not node.linked:
            raise ValueError("The node is not in the tree any more.")


def _require_ids(ids: Ids) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise ValueError(f"Key ids must be one contiguous int64 array, not {ids.ndim}-d {ids.dtype}.")
