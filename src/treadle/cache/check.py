"""The invariants of the prefix tree, verified after every step of its tests and when the engine is idle."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from treadle.cache.node import Node, Root

if TYPE_CHECKING:
    from treadle.cache.tree import Totals


def check_tree(nodes: Sequence[Node], roots: Mapping[Hashable, Root], totals: Totals) -> None:
    """Raise AssertionError unless `nodes`, in the order of use, form the trees of `roots` and add up."""
    place = {id(node): i for i, node in enumerate(nodes)}
    _require(len(place) == len(nodes), "a node is in the order of use twice")
    for older, newer in pairwise(nodes):
        _require(older.last_used <= newer.last_used, "the order of use is not by time")
        _require(older.newer is newer and newer.older is older, "the order of use is not linked both ways")
    for node in nodes:
        _check_links(node, place, roots)
        _check_edge(node)
    for key, root in roots.items():
        _require(root.key == key, "a root is known under another key")
        _require(all(id(child) in place for child in root.children.values()), "a child is not in the order of use")
    _check_totals(nodes, totals)


def _check_links(node: Node, place: Mapping[int, int], roots: Mapping[Hashable, Root]) -> None:
    _require(node.linked, "a parent does not know its child")
    if isinstance(node.parent, Root):
        _require(roots.get(node.parent.key) is node.parent, "a node hangs on a forgotten root")
    else:
        _require(id(node.parent) in place, "a parent is not in the order of use")
        _require(place[id(node)] < place[id(node.parent)], "a node counts as newer than its parent")
    _require(node.start == node.parent.end, "an edge does not start where its parent ends")
    for first, child in node.children.items():
        _require(id(child) in place, "a child is not in the order of use")
        _require(child.parent is node and child.first == first, "a child is filed under a wrong id or parent")


def _check_edge(node: Node) -> None:
    _require(0 < node.length <= len(node.buffer), "an edge is empty or longer than its buffer")
    _require(node.pins >= 0, "pins are negative")
    positions = [checkpoint.position for checkpoint in node.checkpoints]
    _require(positions == sorted(set(positions)), "checkpoints are not in ascending order")
    _require(all(node.start < p <= node.end for p in positions), "a checkpoint lies outside its edge")
    _require(node.rows_bytes == node.payload.nbytes, "a segment changed its size unnoticed")
    state_bytes = sum(checkpoint.value.nbytes for checkpoint in node.checkpoints)
    _require(node.state_bytes == state_bytes, "checkpoints changed their size unnoticed")


def _check_totals(nodes: Sequence[Node], totals: Totals) -> None:
    _require(totals.nodes == len(nodes), "the number of nodes is wrong")
    _require(totals.tokens == sum(node.length for node in nodes), "the number of tokens is wrong")
    _require(totals.entries == sum(not node.children for node in nodes), "the number of entries is wrong")
    _require(totals.rows_bytes == sum(node.rows_bytes for node in nodes), "the bytes of rows are wrong")
    _require(totals.state_bytes == sum(node.state_bytes for node in nodes), "the bytes of state are wrong")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(f"prefix tree: {otherwise}")
