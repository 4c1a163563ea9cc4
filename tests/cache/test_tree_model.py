"""Random histories of the tree against plain dictionaries of prefixes; every invariant after every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.cache.budget import Budget, plan_eviction
from treadle.cache.node import MatchKind, Node, deepest_checkpoint
from treadle.cache.tree import Tree

Key = tuple[str, tuple[int, ...]]  # a root and a path below it
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


@dataclass(frozen=True)
class State:
    nbytes: int


def array(ids):
    return np.array(ids, np.int64)


def rows_of(ids):
    return lambda start, end: Rows(tuple(ids[start:end]), start)


def store(tree, ids, root="r"):
    return tree.insert(tree.root(root), array(ids), rows_of(ids))


def path_ids(node: Node) -> tuple[int, ...]:
    return tuple(int(i) for n in node.path() for i in n.edge)


def root_of(node: Node) -> str:
    return node.path()[0].parent.key


class Model:
    """Everything as dictionaries over (root, prefix): one entry per stored token."""

    def __init__(self) -> None:
        self.each: dict[Key, int] = {}  # bytes of the token's rows; its keys are what is stored
        self.used: dict[Key, int] = {}
        self.states: dict[Key, State] = {}

    def put(self, root: str, ids: tuple[int, ...], now: int, start: int | None = None) -> None:
        """`start`: where rows are written anew; None: only where there are none."""
        for end in range(1, len(ids) + 1):
            key = (root, ids[:end])
            if start is not None and end > start:
                self.each[key] = TOKEN_BYTES
            self.each.setdefault(key, TOKEN_BYTES)
            self.used[key] = now

    def forget(self, root: str, ids: tuple[int, ...], start: int) -> None:
        for end in range(start + 1, len(ids) + 1):
            for table in (self.each, self.used, self.states):
                table.pop((root, ids[:end]), None)

    def paths(self, root: str | None = None) -> set[Key]:
        """Stored sequences that are no prefix of another."""
        inner = {(r, ids[:-1]) for r, ids in self.each}
        return {key for key in self.each if key not in inner and root in (None, key[0])}

    def match(self, root: str, query: tuple[int, ...]) -> tuple[int, MatchKind]:
        length = max((n for n in range(len(query) + 1) if (root, query[:n]) in self.each), default=0)
        ends = (root, query[:length]) in self.paths(root)
        if length == 0:
            return 0, MatchKind.MISS
        if length == len(query):
            return length, MatchKind.EXACT if ends else MatchKind.SUPERSEQUENCE
        return length, MatchKind.PREFIX if ends else MatchKind.BRANCH


@dataclass
class Growing:
    """A prompt that is being prefilled: its end is pinned."""

    root: str
    ids: tuple[int, ...]
    node: Node


ROOTS = st.sampled_from(["a", "b"])
IDS = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
PICK = st.integers(0, 1 << 16)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.tree = Tree(clock=lambda: self.now)
        self.model = Model()
        self.growing: list[Growing] = []
        self.pinned: list[tuple[Node, Key]] = []
        self.kinds = dict.fromkeys(MatchKind, 0)

    def pick(self, index: int) -> Node:
        nodes = list(self.tree.nodes())
        return nodes[index % len(nodes)]

    def any_nodes(self) -> bool:
        return self.tree.totals.nodes > 0

    @rule(root=ROOTS, ids=IDS)
    def insert(self, root, ids):
        self.now += 1
        node = store(self.tree, ids, root)
        assert path_ids(node)[: len(ids)] == ids
        assert node.start < len(ids) <= node.end
        self.model.put(root, path_ids(node), self.now)

    @precondition(any_nodes)
    @rule(index=PICK, cut=PICK)
    def start_growing(self, index, cut):
        """A prompt that goes on from any point of any path."""
        node = self.pick(index)
        known = node.start + 1 + cut % node.length
        self.tree.pin(node)
        self.growing.append(Growing(root_of(node), path_ids(node)[:known], node))

    @precondition(lambda self: self.growing)
    @rule(index=PICK, more=st.lists(st.integers(0, 2), max_size=5).map(tuple))
    def grow(self, index, more):
        self.now += 1
        g = self.growing[index % len(self.growing)]
        known, g.ids = len(g.ids), g.ids + more
        leaf_ends_at, _ = self.model.match(g.root, g.ids)
        grows = (g.root, g.ids[:leaf_ends_at]) in self.model.paths() and leaf_ends_at < len(g.ids)
        node = self.tree.extend(g.node, array(g.ids), known, rows_of(g.ids))
        assert path_ids(node)[: len(g.ids)] == g.ids
        assert node.start < len(g.ids) <= node.end
        if grows:
            assert node.end == len(g.ids)
            assert node.start < leaf_ends_at, "the leaf grows in place"
        self.model.put(g.root, path_ids(node), self.now, node.start if grows else None)
        self.tree.unpin(g.node)
        self.tree.pin(node)
        g.node = node

    @precondition(lambda self: self.growing)
    @rule(index=PICK)
    def finish_growing(self, index):
        self.tree.unpin(self.growing.pop(index % len(self.growing)).node)

    @rule(
        root=ROOTS,
        ids=IDS,
        index=PICK,
        take=st.integers(0, 12),
        use=st.booleans(),
        at_most=st.integers(0, 12),
    )
    def match(self, root, ids, index, take, use, at_most):
        """Queries near what is stored: a path's beginning and then anything, or nothing."""
        self.now += 1
        paths = sorted(self.model.paths(root))
        near = paths[index % len(paths)][1][:take] if paths else ()
        query = near + ids[: take % 4]
        found = self.tree.match(self.tree.root(root), array(query))
        assert (found.length, found.kind) == self.model.match(root, query)
        self.kinds[found.kind] += 1
        got = [int(i) for node, used in found.pieces() for i in node.edge[:used]]
        assert tuple(got) == query[: found.length]
        self.compare_checkpoints(root, query, found, at_most)
        if use and found.nodes:
            hits = found.nodes[-1].hits
            self.tree.touch(found.nodes[-1])
            assert found.nodes[-1].hits == hits + 1
            self.model.put(root, path_ids(found.nodes[-1]), self.now)

    def compare_checkpoints(self, root, query, found, at_most):
        reach = min(at_most, found.length)
        expected = [n for n in range(1, reach + 1) if (root, query[:n]) in self.model.states]
        checkpoint = deepest_checkpoint(found, at_most)
        if not expected:
            assert checkpoint is None
        else:
            assert checkpoint.position == expected[-1]
            assert checkpoint.value is self.model.states[root, query[: expected[-1]]]

    @precondition(any_nodes)
    @rule(index=PICK, cut=PICK)
    def split(self, index, cut):
        node = self.pick(index)
        if node.length == 1:
            with pytest.raises(ValueError, match="cannot be split"):
                self.tree.split(node, 1)
            return
        whole, at = path_ids(node), 1 + cut % (node.length - 1)
        end = node.start + at
        upper = self.tree.split(node, at)
        assert (path_ids(upper), path_ids(node)) == (whole[:end], whole)

    @precondition(any_nodes)
    @rule(index=PICK, each=st.integers(0, 5))
    def replace_payload(self, index, each):
        node = self.pick(index)
        ids, root = path_ids(node), root_of(node)
        self.tree.replace_payload(node, Rows(ids[node.start :], node.start, each))
        for end in range(node.start + 1, node.end + 1):
            self.model.each[root, ids[:end]] = each

    @precondition(any_nodes)
    @rule(index=PICK, cut=PICK, nbytes=st.integers(0, 9))
    def add_checkpoint(self, index, cut, nbytes):
        node, value = self.pick(index), State(nbytes)
        position = 1 + cut % node.end
        holder = self.tree.add_checkpoint(node, position, value)
        assert holder.start < position <= holder.end
        self.model.states[root_of(node), path_ids(node)[:position]] = value

    @precondition(lambda self: self.model.states)
    @rule(index=PICK)
    def drop_checkpoint(self, index):
        node = next(node for node in self.tree.nodes() if node.checkpoints)
        checkpoint = node.checkpoints[index % len(node.checkpoints)]
        self.tree.drop_checkpoint(node, checkpoint)
        del self.model.states[root_of(node), path_ids(node)[: checkpoint.position]]

    @precondition(any_nodes)
    @rule(index=PICK)
    def pin(self, index):
        node = self.pick(index)
        self.tree.pin(node)
        self.pinned.append((node, (root_of(node), path_ids(node))))

    @precondition(lambda self: self.pinned)
    @rule(index=PICK)
    def unpin(self, index):
        node, _ = self.pinned.pop(index % len(self.pinned))
        self.tree.unpin(node)

    @precondition(any_nodes)
    @rule(index=PICK)
    def refuse_to_remove_what_is_needed(self, index):
        node = self.pick(index)
        if node.pins or node.children:
            with pytest.raises(ValueError, match="Only unpinned leaves"):
                self.tree.remove(node)

    @rule(most=st.integers(0, 4))
    def evict(self, most):
        for _, node in zip(range(most), self.tree.evict_order(), strict=False):
            root, ids = root_of(node), path_ids(node)
            self.tree.remove(node)
            self.model.forget(root, ids, node.start)

    @rule(nbytes=st.integers(0, 200))
    def evict_to_budget(self, nbytes):
        used = self.tree.totals.nbytes
        plan = plan_eviction(self.tree.evict_order(), Budget(nbytes), used=used, now=self.now, active_memory=0, limit=1)
        for victim in plan:
            root, ids = root_of(victim.node), path_ids(victim.node)
            self.tree.remove(victim.node)
            self.model.forget(root, ids, victim.node.start)
        assert self.tree.totals.nbytes <= nbytes or not list(self.tree.evict_order())

    @invariant()
    def every_invariant_of_the_tree_holds(self):
        self.tree.check()

    @invariant()
    def segments_hold_exactly_their_edge(self):
        for node in self.tree.nodes():
            assert node.payload.ids == tuple(node.edge.tolist())
            assert node.payload.start == node.start
            assert node.last_used == self.model.used[root_of(node), path_ids(node)]

    @invariant()
    def totals_are_those_of_the_model(self):
        totals = self.tree.totals
        assert totals.tokens == len(self.model.each)
        assert totals.entries == len(self.model.paths())
        assert totals.rows_bytes == sum(self.model.each.values())
        assert totals.state_bytes == sum(state.nbytes for state in self.model.states.values())
        assert self.tree.kinds == self.kinds

    @invariant()
    def pinned_paths_stay(self):
        for node, (root, ids) in self.pinned:
            assert node.linked
            assert (root, ids) in self.model.each
        for g in self.growing:
            assert (g.root, g.ids) in self.model.each

    @invariant()
    def eviction_would_take_all_but_the_pinned_paths(self):
        kept = {id(n) for node in self.tree.nodes() if node.pins for n in node.path()}
        order = list(self.tree.evict_order())
        assert {id(node) for node in order} == {id(node) for node in self.tree.nodes()} - kept
        assert [node.last_used for node in order] == sorted(node.last_used for node in order)


TestAgainstTheModel = TreeMachine.TestCase
TestAgainstTheModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
