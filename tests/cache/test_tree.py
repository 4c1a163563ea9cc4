"""The tree stores what is shared once, refuses misuse, and keeps alive nothing that was removed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from treadle.cache.node import MatchKind, Node
from treadle.cache.tree import Tree

TOKEN_BYTES = 10


@dataclass(frozen=True)
class Rows:
    """The rows of `ids` at `start`, `each` bytes a token."""

    ids: tuple[int, ...]
    start: int
    each: int = TOKEN_BYTES

    @property
    def nbytes(self) -> int:
        return self.each * len(self.ids)

    def split(self, at: int) -> tuple[Rows, Rows]:
        assert 0 < at < len(self.ids)
        return Rows(self.ids[:at], self.start, self.each), Rows(self.ids[at:], self.start + at, self.each)


def array(ids):
    return np.array(ids, np.int64)


def rows_of(ids):
    return lambda start, end: Rows(tuple(ids[start:end]), start)


def store(tree, ids, root="r"):
    return tree.insert(tree.root(root), array(ids), rows_of(ids))


def path_ids(node: Node) -> tuple[int, ...]:
    return tuple(int(i) for n in node.path() for i in n.edge)


@pytest.fixture
def tree():
    return Tree()


def test_roots_never_mix(tree):
    store(tree, [1, 2, 3], root="a")
    assert tree.match(tree.root("b"), array([1, 2, 3])).kind is MatchKind.MISS


def test_a_root_is_forgotten_with_its_last_node_and_so_are_its_rows(tree):
    node = store(tree, [1, 2, 3])
    root, payload = weakref.ref(tree.root("r")), weakref.ref(node.payload)
    assert tree.root("r") is root()
    tree.remove(node)
    del node
    assert root() is None
    assert payload() is None


def test_the_callers_array_may_change_after_it_was_stored(tree):
    ids = array([1, 2, 3])
    tree.insert(tree.root("r"), ids, rows_of([1, 2, 3]))
    ids[:] = 7
    assert tree.match(tree.root("r"), array([1, 2, 3])).kind is MatchKind.EXACT


def test_a_shared_prefix_is_stored_once(tree):
    shared = list(range(1000))
    for branch in range(3):
        store(tree, [*shared, 5000 + branch])
    assert tree.totals.tokens == 1003
    assert tree.totals.rows_bytes == 1003 * TOKEN_BYTES
    assert tree.totals.entries == 3


def test_a_prompt_published_in_chunks_is_one_edge(tree):
    ids = list(range(64))
    leaf = store(tree, ids[:8])
    for known in range(8, 64, 8):
        leaf = tree.extend(leaf, array(ids[: known + 8]), known, rows_of(ids))
    assert len(leaf.path()) == 1
    assert leaf.payload == Rows(tuple(ids), 0)


def test_a_prompt_that_lost_its_leaf_to_anothers_progress_branches_off(tree):
    leaf = store(tree, [1, 2])
    tree.extend(leaf, array([1, 2, 3, 4]), 2, rows_of([1, 2, 3, 4]))
    other = tree.extend(leaf, array([1, 2, 3, 9]), 2, rows_of([1, 2, 3, 9]))
    assert path_ids(other) == (1, 2, 3, 9)
    assert path_ids(leaf) == (1, 2, 3, 4)
    tree.check()


def test_a_payload_that_cannot_be_made_leaves_the_tree_as_it_was(tree):
    store(tree, [1, 2, 3])

    def fail(start, end):
        raise MemoryError

    with pytest.raises(MemoryError):
        tree.insert(tree.root("r"), array([1, 2, 4]), fail)
    with pytest.raises(MemoryError):
        tree.extend(next(tree.nodes()), array([1, 2, 3, 4]), 3, fail)
    tree.check()
    assert (tree.totals.nodes, tree.totals.tokens) == (1, 3)


@pytest.mark.parametrize("ids", [np.zeros(3, np.int32), np.zeros((1, 3), np.int64), np.zeros(6, np.int64)[::2]])
def test_ids_that_would_have_to_be_copied_are_refused(tree, ids):
    with pytest.raises(ValueError, match="contiguous int64"):
        tree.match(tree.root("r"), ids)


def test_an_empty_sequence_is_a_miss_and_cannot_be_stored(tree):
    assert tree.match(tree.root("r"), array([])).kind is MatchKind.MISS
    with pytest.raises(ValueError, match="empty"):
        store(tree, [])


def test_a_node_that_was_removed_is_refused_everywhere(tree):
    node = store(tree, [1, 2, 3])
    tree.remove(node)
    for use in (tree.remove, tree.pin, tree.touch, lambda n: tree.split(n, 1)):
        with pytest.raises(ValueError, match="not in the tree"):
            use(node)


def test_pins_add_up_and_cannot_become_negative(tree):
    node = store(tree, [1])
    tree.pin(node)
    tree.pin(node)
    tree.unpin(node)
    assert list(tree.evict_order()) == []
    tree.unpin(node)
    assert list(tree.evict_order()) == [node]
    with pytest.raises(ValueError, match="not pinned"):
        tree.unpin(node)


def test_more_cannot_be_known_than_is_stored(tree):
    node = store(tree, [1, 2])
    with pytest.raises(ValueError, match="cannot be known"):
        tree.extend(node, array([1, 2, 3]), 3, rows_of([1, 2, 3]))


def test_the_check_finds_a_segment_that_changed_its_size(tree):
    node = store(tree, [1, 2])
    node.payload = Rows((1, 2), 0, each=1)
    with pytest.raises(AssertionError, match="size unnoticed"):
        tree.check()


def test_a_half_of_a_split_does_not_keep_the_whole_array_alive(tree):
    node = store(tree, list(range(1000)))
    upper = tree.split(node, 2)
    assert upper.buffer.base is None
    assert node.buffer.base is None
