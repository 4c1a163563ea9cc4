"""How long the prefix tree takes: look-ups from 1k to 131k tokens, its worst cases, publishing and evicting.

    python -m treadle.bench tree

A table first, one JSON line last. Times in microseconds. CPU only, no model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from treadle.cache.node import MatchKind, Root, Segment
from treadle.cache.tree import Tree
from treadle.types import Ids

VOCABULARY = 150_000
LENGTHS = (1_024, 8_192, 32_768, 131_072)
ENTRIES = (10, 1_000, 10_000)
ENTRY_TOKENS = 256
CHUNK = 512
CACHE_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """A segment without rows."""

    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def split(self, at: int) -> tuple[Segment, Segment]:
        return Rows(self.start, self.start + at), Rows(self.start + at, self.end)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    case: str
    tokens: int  # of the query, or worked on
    entries: int
    edges: int  # on the path of the match
    median_us: float
    p95_us: float


def main(argv: list[str]) -> None:
    argparse.ArgumentParser(prog="treadle.bench tree", description=__doc__).parse_args(argv)
    rng = np.random.default_rng(0)
    results = [*plain(rng), *adversarial(rng), publishing(rng), evicting(rng)]
    show(results)
    print(json.dumps({"bench": "tree", "unit": "us", "results": [asdict(result) for result in results]}))


def plain(rng: np.random.Generator) -> Iterable[Result]:
    """The whole prompt is one edge, beside many others."""
    for entries in ENTRIES:
        for tokens in LENGTHS:
            tree, root = forest(rng, entries - 1)
            ids = draw(rng, tokens)
            tree.insert(root, ids, Rows)
            yield lookup("one edge", tree, root, np.append(ids, 0))
    yield lookup("one edge, cold caches", tree, root, np.append(ids, 0), flush=True)
    yield lookup("miss", tree, root, np.append(VOCABULARY, ids))


def adversarial(rng: np.random.Generator) -> Iterable[Result]:
    """Trees made to be slow: many edges on one path, many children, long paths that differ at the end."""
    ids = draw(rng, 131_072)
    for case, step in (("10k edges of 1 token", 1), ("10k edges of 13 tokens", 13)):
        tree, root = forest(rng, 0)
        leaf = tree.insert(root, ids, Rows)
        for at in range(9_999 * step, 0, -step):  # from below, so that building is quick
            tree.insert(root, np.append(ids[:at], VOCABULARY), Rows)
        yield lookup(case, tree, root, ids)
        touch = partial(tree.touch, leaf)
        yield Result(f"{case}: touch", len(ids), tree.totals.entries, 10_000, *timed(touch, repeats=50))

    tree, root = forest(rng, 0)
    for at in range(CHUNK, len(ids) + 1, CHUNK):
        tree.insert(root, ids[:at], Rows)
    yield lookup("chain of 256 chunks", tree, root, ids)

    tree, root = forest(rng, 0)
    for last in range(10_000):
        tree.insert(root, np.append(ids[:1], last), Rows)
    yield lookup("10k children", tree, root, np.append(ids[:1], 9_999))

    tree, root = forest(rng, 0)
    for last in range(10_000):
        tree.insert(root, np.append(ids[:-1], last), Rows)
    yield lookup("10k paths differ at the last", tree, root, np.append(ids[:-1], 9_999))


def publishing(rng: np.random.Generator) -> Result:
    """A long prompt published chunk by chunk while it is prefilled; time of the whole."""
    ids = draw(rng, 131_072)

    def publish() -> None:
        tree, root = forest(rng, 0)
        leaf = tree.insert(root, ids[:CHUNK], Rows)
        for at in range(CHUNK, len(ids), CHUNK):
            leaf = tree.extend(leaf, ids[: at + CHUNK], at, Rows)

    return Result("publish in 256 chunks (all)", len(ids), 1, 1, *timed(publish, repeats=20))


def evicting(rng: np.random.Generator) -> Result:
    """1,000 of 10,000 entries, of which 100 are pinned; time of the whole."""
    times: list[float] = []
    for _ in range(5):
        tree, _root = forest(rng, 10_000)
        for node, _ in zip(tree.nodes(), range(100), strict=False):
            tree.pin(node)
        begin = time.perf_counter()
        for node, _ in zip(tree.evict_order(), range(1_000), strict=False):
            tree.remove(node)
        times.append((time.perf_counter() - begin) * 1e6)
    return Result("evict 1k of 10k (all)", 1_000 * ENTRY_TOKENS, 10_000, 1, float(np.median(times)), max(times))


def forest(rng: np.random.Generator, entries: int) -> tuple[Tree, Root]:
    """A tree with `entries` paths of random ids."""
    tree = Tree()
    root = tree.root("bench")
    for _ in range(entries):
        tree.insert(root, draw(rng, ENTRY_TOKENS), Rows)
    return tree, root


def draw(rng: np.random.Generator, tokens: int) -> Ids:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.int64)


def lookup(case: str, tree: Tree, root: Root, ids: Ids, *, flush: bool = False) -> Result:
    found = tree.match(root, ids)
    expected = 0 if found.kind is MatchKind.MISS else len(ids) - 1
    if found.length < expected:
        raise AssertionError(f"{case}: matched {found.length} of {len(ids)} tokens")
    median, worst = timed(lambda: tree.match(root, ids), repeats=200, flush=flush)
    return Result(case, len(ids), tree.totals.entries, len(found.nodes), median, worst)


def timed(action: Callable[[], object], *, repeats: int, flush: bool = False) -> tuple[float, float]:
    """Median and 95th percentile in microseconds, after one run to warm up."""
    junk = np.zeros(CACHE_FLUSH_BYTES, np.uint8)
    times = []
    action()
    for _ in range(repeats):
        if flush:
            junk += 1
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) * 1e6)
    return summary(times)


def summary(times: list[float]) -> tuple[float, float]:
    return float(np.median(times)), float(np.percentile(times, 95))


def show(results: list[Result]) -> None:
    table = Table(
        Column("case", no_wrap=True), "tokens", "entries", "edges", "median us", "p95 us", title="Prefix tree"
    )
    for r in results:
        numbers = (
            f"{r.tokens:,}",
            f"{r.entries:,}",
            f"{r.edges:,}",
            f"{r.median_us:,.1f}",
            f"{r.p95_us:,.1f}",
        )
        table.add_row(r.case, *numbers)
    Console().print(table)
