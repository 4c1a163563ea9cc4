"""The order of use of all nodes of a tree: an intrusive linked list, least recently used first.

Invariant: a node comes after all its descendants, because using a node uses its ancestors. So the list is at
the same time an order in which nodes can be removed one after the other, each being a leaf when its turn
comes; no heap is needed, and every operation is O(1) per node.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.cache.node import Link, Node, Parent, upwards


class Recency:
    """A ring of nodes around a sentinel."""

    def __init__(self) -> None:
        self._ends = Link()
        self._ends.older = self._ends.newer = self._ends

    def add_newest(self, node: Node) -> None:
        self._insert(node, after=self._ends.older)

    def add_after(self, node: Node, older: Node) -> None:
        """Put `node` right behind `older`: it counts as used just after it."""
        self._insert(node, after=older)

    def remove(self, node: Node) -> None:
        """Unlink. The links are deleted, not pointed at the node itself: a cycle would keep rows alive."""
        node.older.newer, node.newer.older = node.newer, node.older
        del node.older, node.newer

    def refresh(self, place: Parent, now: float) -> None:
        """Make `place` and its ancestors the newest, an ancestor newer than what is below it: O(depth)."""
        for node in upwards(place):
            self.remove(node)
            self.add_newest(node)
            node.last_used = now

    def __iter__(self) -> Iterator[Node]:
        """Oldest first. The node just yielded may be removed meanwhile; nothing else may change."""
        link = self._ends.newer
        while isinstance(link, Node):
            following = link.newer
            yield link
            link = following

    def _insert(self, node: Node, after: Link) -> None:
        node.older, node.newer = after, after.newer
        after.newer.older = node
        after.newer = node
