"""Pictures in the count of memory: encoding one is foreseen, encoded ones are counted, and they give way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.test_loop import Clock, Run
from tests.vision.families import photo
from tests.vision.folders import write_folder
from tests.vision.seeing import SeeingHashModel, ask, picture, slow_seeing
from treadle.cache import geometry
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.governor import Act
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.pressure import Pressure
from treadle.engine.reuse import Reuse
from treadle.errors import MemoryRefused
from treadle.models.capabilities import new_layers
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.models.vlm_check import Peaks
from treadle.types import Finish, Footprint, Picture
from treadle.vision.encoder import Encoder
from treadle.vision.sight import Sight

CAT, DOG, LAKE = picture("cat", 2, 3), picture("dog", 1, 9), picture("lake", 4, 4)
SEEING = Footprint(row_bytes=10, look_bytes=1000, look_score_bytes=10)


def run_of(model: SeeingHashModel, ledger: Ledger, encoded_bytes: int = 10**6, **config: Any) -> Run:
    reuse = Reuse(Store(Settings(Budget(10**9), 10**12), active_memory=lambda: 0), model.caps, 16)
    sight = Sight(model, encoded_bytes, ledger)
    layers = partial(new_layers, model, model.caps)
    return Run(Loop(model, model.caps, Config(**config), layers, ledger, reuse, Clock(), sight=sight))


def encode(shown: Picture) -> tuple[Any, ...]:
    return (mx.zeros((shown.num_rows, 8), mx.float32),)


def test_a_request_is_counted_for_its_largest_picture_or_its_chunk_whatever_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geometry, "STEP", 1)  # buffers that grow token by token
    ledger = Ledger(SEEING, 0, 10**9)
    assert ledger.need(100, 0, None, 16) == 1000 + 16 * 1000 + 256 * 10
    assert ledger.need(100, 0) == 1000
    chunky = Ledger(Footprint(row_bytes=10, step_bytes=10**6, look_bytes=1000), 0, 10**9)
    assert chunky.need(100, 0, None, 16) == chunky.need(100, 0)


def test_a_picture_that_could_not_be_encoded_even_alone_is_refused_with_the_reason() -> None:
    ledger = Ledger(SEEING, 0, 30_000_000)
    ledger.check(5000, 0)
    with pytest.raises(MemoryRefused, match=r"0\.26 GB of it for its largest image \(a smaller one needs less\)"):
        ledger.check(5000, 0, None, 5000)


def test_a_picture_with_rows_is_not_counted_once_more() -> None:
    model = SeeingHashModel()
    run = run_of(model, Ledger(SEEING, 0, 10**9))
    run.loop.submit(ask("a", [1, CAT, 2, LAKE, 3]))
    (sequence,) = run.loop.waiting
    assert sequence.picture == 16
    sequence.computed = 7
    assert sequence.picture == 16
    sequence.computed = 24
    assert sequence.picture == 0


def test_what_encoding_took_corrects_the_estimate() -> None:
    ledger = Ledger(SEEING, 0, 10**9)
    before = ledger.need(100, 0, None, 16)
    ledger.looked(16, 5 * SEEING.look(16))
    assert ledger.need(100, 0, None, 16) > 4 * before
    for _ in range(100):
        ledger.looked(16, 0)
    assert ledger.need(100, 0, None, 16) == before


def test_encoded_pictures_are_counted_as_long_as_they_are_kept() -> None:
    ledger = Ledger(Footprint(), 0, 10_000)
    encoder = Encoder(encode, 10**6, ledger)
    assert (ledger.kept, ledger.free) == (0, 10_000)
    for shown in (CAT, DOG, LAKE):
        encoder.rows(shown)
    assert ledger.kept == (6 + 9 + 16) * 32 and ledger.free == 10_000 - ledger.kept
    encoder.rows(CAT)
    assert ledger.spare == (9 + 16) * 32, "all but the one used last"
    ledger.forget(1)
    assert encoder.knows(CAT) and encoder.knows(LAKE) and not encoder.knows(DOG)
    ledger.forget(10**9)
    assert ledger.kept == 6 * 32 and ledger.spare == 0


def test_pictures_of_all_models_give_way_to_who_fits_then_and_to_nobody_else() -> None:
    peers: list[Ledger] = []
    mine, other = Ledger(Footprint(), 0, 2000, peers), Ledger(Footprint(), 0, 2000, peers)
    encoder = Encoder(encode, 10**6, other)
    for shown in (CAT, DOG, LAKE):
        encoder.rows(shown)
    mine.promise("running", 900)
    assert not mine.fits(1500) and other.kept == 31 * 32, "it would not fit without them either"
    assert mine.fits(500) and other.kept < 31 * 32
    assert mine.free >= 500


def test_a_prompt_whose_pictures_were_forgotten_on_the_way_is_read_right() -> None:
    model = SeeingHashModel()
    run = run_of(model, Ledger(Footprint(), 0, 10**9), prefill_chunk=4)
    request = ask("a", [1, LAKE, 2, DOG, 3])
    run.loop.submit(request)
    while run.loop.busy:
        run.turn()
        run.loop.ledger.forget(10**9)
    assert run.text("a") == slow_seeing(model, request)


def test_the_governor_lets_pictures_go_before_prefixes() -> None:
    model = SeeingHashModel()
    ledger = Ledger(Footprint(), 0, 10**9)
    run = run_of(model, ledger)
    for id, shown in (("a", CAT), ("b", DOG), ("c", LAKE)):
        run.loop.submit(ask(id, [1, shown, 2]))
        run.until_idle()
    spare, store = ledger.spare, run.loop.reuse.store
    assert spare > 0 and store is not None
    held, others = store.tree.totals.nbytes, 2560 - ledger.kept
    pressure = Pressure(3000, store, lambda: [run.loop], active=lambda: others + ledger.kept)
    pressure.relieve()
    assert pressure.governor.counts.done[Act.EVICT] == 1
    assert ledger.spare < spare and store.tree.totals.nbytes == held
    others += 1000
    pressure.relieve()
    assert ledger.spare == 0 and store.tree.totals.nbytes < held


def test_peaks_give_bytes_for_each_embedding_and_each_pair() -> None:
    peaks = Peaks()
    for n in (4, 60):
        peaks.looked(n, 1000 * n + 10 * n * n)
    assert peaks.footprint() == (1000, 10)
    peaks.looked(60, 0)
    assert peaks.footprint()[0] >= 0
    fixed = Peaks()
    fixed.looked(64, 6400)
    assert fixed.footprint() == (100, 0), "one size for all pictures"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "idefics3", "pixtral", "gemma3"])
def test_what_a_larger_picture_takes_is_foreseen_from_two_small_ones(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path / "m", family)
    path = folder / "preprocessor_config.json"
    path.write_text(path.read_text().replace('"longest_edge": 1024', '"longest_edge": 1000000'))
    model = load_model(resolve(str(folder)), None)
    footprint = model.footprint
    assert footprint.look_bytes > 0 and model.reader is not None
    shown = model.reader.show(photo(1, 400, 300)).picture
    peaks = Peaks()
    Encoder(model.model.encode, 0, peaks).rows(shown)
    ((rows, peak),) = peaks.found
    assert rows == shown.num_rows
    assert 0.5 * peak < footprint.look(rows) < 3 * peak


def test_requests_whose_pictures_do_not_fit_together_run_one_after_the_other() -> None:
    model = SeeingHashModel()
    need = Ledger(SEEING, 0, 10**9).need(30, 12, None, 16)
    run = run_of(model, Ledger(SEEING, 0, int(1.5 * need)))
    asked = [ask(f"r{i}", [i + 1, LAKE, *range(1, 14)]) for i in range(3)]
    for request in asked:
        run.loop.submit(request)
    most = 0
    while run.loop.busy:
        run.turn()
        most = max(most, run.loop.num_running)
    assert most == 1
    assert all(run.finish(r.id) is not Finish.ERROR and run.text(r.id) == slow_seeing(model, r) for r in asked)
