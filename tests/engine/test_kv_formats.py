"""Requests of several formats at once: each says what it says alone, and prefixes are shared within a format only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import Run
from tests.tiny import tiny
from treadle.cache.budget import Budget
from treadle.cache.formats import least, parse
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.admission import make_fit
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.errors import MemoryRefused
from treadle.models.capabilities import new_layers
from treadle.models.kv import with_kv
from treadle.types import EXACT, Caps, KvFormat, Request, Sampling

FORMATS = (None, EXACT, parse("8"), parse("8/4"), parse("4"))


def packing(kv: KvFormat = EXACT) -> tuple[object, Caps]:
    model, caps = tiny("wide heads")
    return model, with_kv(model, caps, kv, "")


def run_of(kv: KvFormat = EXACT) -> Run:
    model, caps = packing(kv)
    store = Store(Settings(Budget(10**9), 10**12), active_memory=lambda: 0)
    reuse = Reuse(store, caps, 32)
    return Run(Loop(model, caps, Config(prefill_chunk=48), partial(new_layers, model, caps), None, reuse))


def asked(id: str, kv: KvFormat | None, seed: int = 0) -> Request:
    ids = np.random.default_rng(seed).integers(1, 97, 150).astype(np.int64)
    return Request(id, ids, Sampling(temperature=0.0), 12, kv=kv)


def text_alone(request: Request, kv: KvFormat = EXACT) -> list[int]:
    run = run_of(kv)
    run.loop.submit(request)
    run.until_idle()
    return run.text(request.id)


@pytest.mark.parametrize("default", [EXACT, parse("8")], ids=str)
def test_together_they_say_what_they_say_alone(default: KvFormat) -> None:
    run = run_of(default)
    requests = [asked(f"{kv} {seed}", kv, seed) for kv in FORMATS for seed in range(2)]
    for request in requests:
        run.loop.submit(request)
    run.until_idle()
    assert not run.loop.reuse.failures
    for request in requests:
        assert run.text(request.id) == text_alone(request, default)


def test_a_prefix_is_found_again_in_its_own_format_alone() -> None:
    run = run_of()
    cached: dict[str, int] = {}
    for turn in range(2):
        for kv in FORMATS[1:]:
            request = asked(f"{kv} {turn}", kv)
            run.loop.submit(request)
            run.until_idle()
            [usage] = [output.usage for output in run.outputs[request.id] if output.usage]
            cached[request.id] = usage.cached_tokens
    assert all(cached[f"{kv} 0"] == 0 and cached[f"{kv} 1"] >= 140 for kv in FORMATS[1:])


def test_a_sequence_that_fits_only_at_four_bits_begins_with_them_unless_it_asks_otherwise() -> None:
    model, caps = packing()
    tokens, room = 150, 340
    ledger = Ledger(caps.footprint, 0, 0, formats=caps.kv_footprints)
    four, exact = ledger.need(tokens, room, parse("4")), ledger.need(tokens, room)
    assert four < exact
    ledger.limit = (four + exact) // 2
    loop = Loop(model, caps, Config(), partial(new_layers, model, caps), ledger)
    loop.submit(replace(asked("a", None), max_tokens=room))
    loop.step()
    [sequence] = loop.sequences()
    assert sequence.kv == parse("4")
    ledger.check(tokens, room, least(None, caps, "auto"))
    with pytest.raises(MemoryRefused):
        ledger.check(tokens, room, EXACT)


def test_one_that_waits_again_is_counted_with_what_is_left_of_its_reply() -> None:
    _, caps = packing()
    ledger = Ledger(caps.footprint, 0, 0, formats=caps.kv_footprints)
    ledger.limit = ledger.need(350, 140)
    sequence = Sequence(asked("a", None), 340, 0.0)
    for _ in range(200):
        sequence.commit([5])
    sequence.restart()
    assert make_fit(sequence, ledger, parse("4")) == ledger.limit and sequence.kv is None


@pytest.mark.parametrize(
    ("asked", "setting", "kv"),
    [(None, "auto", "4"), (None, 8, "4"), (None, 16, None), (None, "16/16", None), (EXACT, "auto", None)],
)
def test_what_may_be_packed_when_memory_is_short(asked: KvFormat | None, setting: str | int, kv: str | None) -> None:
    _, caps = packing()
    found = least(asked, caps, setting)
    assert (None if found is None else str(found)) == kv
    assert (
        least(None, replace(caps, kv_fault="no"), "auto") is None
        and least(None, replace(caps, kv=parse("4")), "4") is None
    )
