"""What the prefix tree is made of: roots, nodes, checkpoints, matches. Pure; engine thread only.

A node owns the ids of its edge, the segment with their rows, and the checkpoints inside its range:

    root --[ system prompt ]-- node --[ chat A ]-- leaf
         0               start'     end' = start        end        (positions: tokens from the root)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Protocol, TypeAlias

import numpy as np

from treadle.types import Ids

_position = attrgetter("position")


class Held(Protocol):
    """Anything the tree accounts for: it occupies `nbytes` bytes, constant while the tree holds it."""

    @property
    def nbytes(self) -> int: ...


class Segment(Held, Protocol):
    """The rows of one edge's tokens; opaque to the tree."""

    def split(self, at: int) -> tuple[Segment, Segment]:
        """The rows of the first `at` tokens and those of the rest; `self` is not used afterwards."""
        ...


@dataclass(frozen=True, slots=True, eq=False)  # by identity: values may be arrays
class Checkpoint:
    """The state layers after `position` tokens, counted from the root."""

    position: int
    value: Held


class MatchKind(StrEnum):
    """How a query and the stored paths (root to leaf) relate."""

    EXACT = "exact"  # a stored path equals the query
    PREFIX = "prefix"  # a stored path ends inside the query
    SUPERSEQUENCE = "supersequence"  # the query ends inside a longer stored path
    BRANCH = "branch"  # they share a beginning and then differ
    MISS = "miss"  # nothing in common


@dataclass(slots=True, weakref_slot=True, eq=False)
class Root:
    """The empty path of one kind of rows; paths of different roots never mix."""

    key: Hashable
    children: dict[int, Node] = field(default_factory=dict)  # by the first id of the child's edge

    @property
    def end(self) -> int:
        return 0


@dataclass(slots=True, eq=False)
class Link:
    """A place in the order of use (see `cache/recency.py`); the slots are unset outside of it."""

    older: Link = field(init=False, repr=False)
    newer: Link = field(init=False, repr=False)


@dataclass(slots=True, eq=False)
class Node(Link):
    """One edge of the tree and what hangs at its end. Changed by `Tree` only; others read.

    `buffer` may be longer than the edge: a leaf that is still being prefilled grows in it.
    """

    parent: Parent = field(repr=False)
    start: int  # tokens before this edge
    buffer: Ids = field(repr=False)
    length: int  # tokens on this edge, at least 1
    payload: Segment
    created: float
    last_used: float
    rows_bytes: int = 0
    state_bytes: int = 0
    children: dict[int, Node] = field(default_factory=dict, repr=False)
    checkpoints: list[Checkpoint] = field(default_factory=list)  # start < position <= end, ascending
    pins: int = 0
    hits: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def first(self) -> int:
        """The id under which the parent knows this node."""
        return int(self.buffer[0])

    @property
    def edge(self) -> Ids:
        """The ids of the edge, [length]: a view, not to be written."""
        return self.buffer[: self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of rows and state that removing this node frees."""
        return self.rows_bytes + self.state_bytes

    @property
    def linked(self) -> bool:
        """Whether the node is in its tree (False after `Tree.remove`)."""
        return self.parent.children.get(self.first) is self

    def path(self) -> list[Node]:
        """The nodes from the root's child down to this one."""
        nodes = list(upwards(self))
        nodes.reverse()
        return nodes

    def append(self, ids: Ids) -> None:
        """Lengthen the edge: amortised O(len(ids)), as the buffer doubles."""
        end = self.length + len(ids)
        if end > len(self.buffer):
            grown = np.empty(max(end, 2 * len(self.buffer)), np.int64)
            grown[: self.length] = self.edge
            self.buffer = grown
        self.buffer[self.length : end] = ids
        self.length = end

    def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Insert in order; a checkpoint at the same position is replaced."""
        i = bisect_left(self.checkpoints, checkpoint.position, key=_position)
        same = i < len(self.checkpoints) and self.checkpoints[i].position == checkpoint.position
        self.checkpoints[i : i + same] = [checkpoint]

    def cut_checkpoints(self, position: int) -> list[Checkpoint]:
        """Take away and return the checkpoints at or below `position`."""
        i = bisect_right(self.checkpoints, position, key=_position)
        taken, self.checkpoints = self.checkpoints[:i], self.checkpoints[i:]
        return taken


Parent: TypeAlias = Root | Node


def upwards(place: Parent) -> Iterator[Node]:
    """`place` and its ancestors, deepest first, without the root."""
    while isinstance(place, Node):
        yield place
        place = place.parent


@dataclass(frozen=True, slots=True)
class Match:
    """The longest common prefix of a query and a tree. Valid until the tree changes.

    Every node of `nodes` is used wholly, but the last: of its edge, the first `used` tokens.
    """

    nodes: tuple[Node, ...]  # from the root's child down
    length: int  # tokens in common
    used: int  # of the last node's edge; 0 on a miss
    kind: MatchKind

    def pieces(self) -> Iterator[tuple[Node, int]]:
        """Each node with how many tokens of its edge are used."""
        for node in self.nodes[:-1]:
            yield node, node.length
        if self.nodes:
            yield self.nodes[-1], self.used


def deepest_checkpoint(match: Match, at_most: int) -> Checkpoint | None:
    """The checkpoint with the greatest position at or below both `at_most` and the match's length."""
    limit = min(at_most, match.length)
    for node in reversed(match.nodes):
        i = bisect_right(node.checkpoints, limit, key=_position)
        if i:
            return node.checkpoints[i - 1]
    return None


def walk(start: Parent, known: int, ids: Ids) -> Match:
    """Follow `ids` [n, contiguous] down from `start`, whose path is known to begin with `ids[:known]`.

    One vector comparison per edge and no copy of the ids: O(tokens in common) work in O(edges) steps.
    `nodes` begins with `start` when that is a node. Requires start.start <= known <= start.end.
    """
    nodes: list[Node] = []
    place, position, used, total = start, known, 0, len(ids)
    whole = True
    if isinstance(start, Node):
        used = known - start.start
        used += agreement(start.buffer[used : start.length], ids[known:])
        position = start.start + used
        whole = used == start.length
        nodes.append(start)
    while whole and position < total:
        child = place.children.get(ids.item(position))
        if child is None:
            break
        length = child.length
        used = agreement(child.buffer[:length], ids[position : position + length]) if length > 1 else 1
        position += used
        whole = used == length
        place = child
        nodes.append(child)
    kind = _kind(position, total, path_ends=whole and not place.children)
    return Match(tuple(nodes), position, used, kind)


def _kind(length: int, total: int, *, path_ends: bool) -> MatchKind:
    if length == 0:
        return MatchKind.MISS
    if length == total:
        return MatchKind.EXACT if path_ends else MatchKind.SUPERSEQUENCE
    return MatchKind.PREFIX if path_ends else MatchKind.BRANCH


def agreement(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    same = a[:n] == b[:n]
    first = int(same.argmin())
    return n if same[first] else first
