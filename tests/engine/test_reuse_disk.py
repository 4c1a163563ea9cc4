"""The disk tier and quantisation at rest behind the loop: after eviction and restart the text is still the cold one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import KINDS, request_of
from tests.engine.test_reuse import CONTEXT, GREAT, cached_run, conversations, finish_of
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from treadle.cache import disk_keys, geometry, spill
from treadle.cache.budget import Budget
from treadle.cache.disk import DiskTier
from treadle.cache.report import cache_report
from treadle.cache.spill import Spill
from treadle.cache.store import Settings, Store
from treadle.types import Ids, Request


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)
    monkeypatch.setattr(disk_keys, "BLOCK", 8)
    monkeypatch.setattr(spill, "BLOCK", 8)


def tier_at(folder: Path) -> DiskTier:
    tier = DiskTier(folder, 10**8, free_floor_bytes=0)
    tier.start()
    return tier


def flush(store: Store) -> None:
    """Write everything that is missing, and wait for it."""
    while store.tidy():
        pass
    store.spill.tier.stop()
    store.spill.tier.start()


@pytest.mark.parametrize("kinds", [*KINDS, ("window", "window"), ("state",)], ids="+".join)
@settings(max_examples=12)
@given(plan=conversations(), budget=st.sampled_from([0, 600, 10**9]), restarts=st.sets(st.integers(0, 8)))
def test_warm_text_equals_cold_text_across_evictions_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, kinds: tuple[str, ...], plan: list, budget: int, restarts: set[int]
) -> None:
    model = HashModel(kinds, context=CONTEXT)
    folder = tmp_path_factory.mktemp("cache")
    texts: list[list[int]] = []
    run, store = cached_run(model, Settings(Budget(budget), 10**12), prefill_chunk=16)
    store.spill = Spill(tier_at(folder), 1)
    for turn, (_, base, new, keep, sampling) in enumerate(plan):
        old = texts[base] if base >= 0 else []
        prompt = np.array([*old[: len(old) * keep // 100], *new], np.int64)
        request = Request(f"r{turn}", prompt, sampling, 8, frozenset({STOP}), boundaries=(len(prompt) // 2,))
        text, _ = finish_of(run, request)
        assert text == slow_twin(model, request, CONTEXT)
        texts.append([*prompt.tolist(), *text])
        flush(store)
        store.tree.check()
        if turn in restarts:
            store.spill.tier.stop()
            run, store = cached_run(model, Settings(Budget(budget), 10**12), prefill_chunk=16)
            store.spill = Spill(tier_at(folder), 1)
    store.spill.tier.stop()


@pytest.mark.parametrize("kinds", [*KINDS, ("state",)], ids="+".join)
def test_a_restart_keeps_what_was_written(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    model = HashModel(kinds)
    prompt = [int(x) for x in np.random.default_rng(4).integers(1, VOCAB, 90)]
    run, store = cached_run(model)
    store.spill = Spill(tier_at(tmp_path), 1)
    first, _ = finish_of(run, request_of("a", prompt, 9))
    flush(store)
    store.spill.tier.stop()
    run, store = cached_run(model)
    store.spill = Spill(tier_at(tmp_path), 1)
    again, cached = finish_of(run, request_of("b", prompt, 9))
    assert again == first and cached >= 80
    report = cache_report(store)
    assert report.disk is not None and report.disk["files"] >= 1 and report.reused_tokens == cached
    assert store.clear() > 0
    store.spill.tier.stop()
    assert finish_of(run, request_of("c", prompt, 9)) == (first, 0)


def test_a_damaged_file_is_a_shorter_hit(tmp_path: Path) -> None:
    model = HashModel()
    prompt = list(range(1, 81))
    run, store = cached_run(model)
    store.spill = Spill(tier_at(tmp_path), 1)
    first, _ = finish_of(run, request_of("a", prompt, 9))
    flush(store)
    keys = disk_keys.block_keys(repr(("", "")).encode(), np.array(prompt, np.int64))
    store.spill.tier.stop()
    broken = next(p for p in store.spill.tier.folder.iterdir() if keys[4].hex() in p.name)
    broken.write_bytes(broken.read_bytes()[:-5])
    run, store = cached_run(model, GREAT)
    store.spill = Spill(tier_at(tmp_path), 1)
    assert finish_of(run, request_of("b", prompt, 9)) == (first, 32)
    assert not broken.exists()
    store.spill.tier.stop()


def test_what_is_saved_is_not_looked_through_again_until_the_tier_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(root: bytes, ids: Ids) -> list[bytes]:
        read.append(int(ids[0]))
        return disk_keys.block_keys(root, ids)

    run, store = cached_run(HashModel())
    store.spill = Spill(tier_at(tmp_path), 1)
    for first in (90, 91):
        finish_of(run, request_of(f"r{first}", [first, *range(1, 40)], 4))
        monkeypatch.setattr(spill, "block_keys", counted)
        flush(store)
    assert 90 in read and 91 in read and read[read.index(91) :].count(90) <= 1
    read.clear()
    store.spill.clear()
    flush(store)
    assert 90 in read and 91 in read and store.spill.tier.snapshot().files >= 10
    store.spill.tier.stop()
