"""What was found about a model is found once; what was found for anything else is never taken for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from tests.models.gguf_files import make, matrices, write_gguf
from treadle import compiler, runtime
from treadle.config import Config
from treadle.engine import build
from treadle.engine.compiled import Forward
from treadle.engine.kv import formatted
from treadle.models import calibration as module
from treadle.models import capabilities, kv
from treadle.models.calibration import CalibrationFile, StepCosts, calibration, key_of, read
from treadle.models.load import load_model
from treadle.models.sources import ResolvedSource
from treadle.types import Batching, Caps, Embedding, Footprint, KvFormat, LayerKind, Pooling, Vision

COUNTS = st.integers(0, 2**62)
WORDS = st.text(max_size=20)
SECONDS = st.dictionaries(st.integers(1, 4096), st.floats(1e-9, 1e4), max_size=4)
FOOTPRINTS = st.builds(Footprint, COUNTS, st.tuples(st.tuples(COUNTS, COUNTS)) | st.just(()), COUNTS, COUNTS)
EMBEDDINGS = st.builds(
    Embedding, st.none() | st.sampled_from(Pooling), WORDS, COUNTS, st.none() | COUNTS, st.tuples(COUNTS), COUNTS, WORDS
)
CAPS = st.builds(
    Caps,
    vocab_size=COUNTS,
    context_length=COUNTS,
    layers=st.lists(st.sampled_from(LayerKind), max_size=4).map(tuple),
    window=st.none() | COUNTS,
    batching=st.sampled_from(Batching),
    additive_masks=st.booleans(),
    footprint=FOOTPRINTS,
    why=WORDS,
    kv=st.builds(KvFormat, st.sampled_from((4, 8, 16)), st.sampled_from((4, 8, 16))),
    kv_layers=st.dictionaries(WORDS, WORDS, max_size=2),
    kv_fault=st.none() | WORDS,
    kv_footprints=st.dictionaries(WORDS, FOOTPRINTS, max_size=2),
    kv_losses=st.dictionaries(WORDS, st.floats(-100, 100), max_size=2),
    vision=st.none() | st.builds(Vision, WORDS, st.booleans(), WORDS),
    embedding=st.none() | EMBEDDINGS,
)
COSTS = st.builds(StepCosts, st.floats(0, 1e3), SECONDS, SECONDS)
FAULTS = st.none() | WORDS
KEY = {"model": "r1", "device": "this one"}


class Kernels:
    __file__ = "kernels-of-now.so"


def refuse() -> Any:
    pytest.fail("it was found again")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(module, "_opened", {})
    return tmp_path / "kept"


@given(CAPS, COSTS, FAULTS, st.integers(1, 2**31))
def test_the_next_process_knows_everything_as_it_was_found(
    tmp_path_factory: pytest.TempPathFactory, caps: Caps, costs: StepCosts, fault: str | None, length: int
) -> None:
    path = tmp_path_factory.mktemp("kept") / "deep" / "file.json"
    first = CalibrationFile(path, KEY, "model")
    assert first.caps(length, lambda: caps) == caps
    assert first.packing_fault(lambda: fault) == fault
    assert first.steps("8/4", lambda: costs) == costs
    later = CalibrationFile(path, KEY, "model")
    assert later.findings == first.findings
    assert later.caps(length, refuse) == caps
    assert later.packing_fault(refuse) == fault
    assert later.steps("8/4", refuse) == costs
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@given(st.data())
def test_a_damaged_file_is_ignored_and_made_anew(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("kept") / "file.json"
    costs = StepCosts(0.5, {1: 0.25, 2: 0.5})
    CalibrationFile(path, KEY, "model").steps("16", lambda: costs)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 2), label="cut")
    path.write_bytes(whole[:cut] + data.draw(st.binary(max_size=4).filter(lambda b: b"}" not in b), label="rubbish"))
    assert read(path) is None
    assert CalibrationFile(path, KEY, "model").steps("16", lambda: costs) == costs
    assert CalibrationFile(path, KEY, "model").steps("16", refuse) == costs


@pytest.mark.parametrize("costs", [{"noise": -1.0}, {"verify": {"0": 1.0}}, {"verify": {"1": 0.0}}, {"plain": None}])
def test_costs_that_cannot_be_are_not_taken(tmp_path: Path, costs: dict[str, Any]) -> None:
    path = tmp_path / "file.json"
    CalibrationFile(path, KEY, "model").steps("16", lambda: StepCosts(1.0, {1: 1.0}))
    text = json.loads(path.read_text())
    text["steps"]["16"] |= costs
    path.write_text(json.dumps(text))
    assert read(path) is None


@pytest.mark.parametrize("part", [("format", 0), ("key", {**KEY, "device": "another"}), ("key", {**KEY, "mlx": "9"})])
def test_what_was_found_for_anything_else_is_not_taken(tmp_path: Path, part: tuple[str, Any]) -> None:
    path = tmp_path / "file.json"
    CalibrationFile(path, KEY, "model").steps("16", lambda: StepCosts(1.0, {1: 1.0}))
    path.write_text(json.dumps(json.loads(path.read_text()) | dict([part])))
    other = StepCosts(2.0, {1: 2.0})
    assert CalibrationFile(path, KEY, "model").steps("16", lambda: other) == other
    assert CalibrationFile(path, KEY, "model").steps("16", refuse) == other


def test_the_key_changes_with_all_that_computes(tmp_path: Path) -> None:
    facts = runtime.device_facts()
    key = key_of("r1", {"layers": 2}, facts)
    assert key == key_of("r1", {"layers": 2}, facts)
    others = [
        key_of("r2", {"layers": 2}, facts),
        key_of("r1", {"layers": 3}, facts),
        key_of("r1", {"layers": 2}, replace(facts, name="another device")),
        key_of("r1", {"layers": 2}, replace(facts, versions={**facts.versions, "mlx": "9.9"})),
    ]
    assert all(other != key for other in others)
    assert {"treadle", "mlx", "mlx-lm", "cores", "blas", "kernels", "fused kernels", "code"} <= key.keys()


def test_a_trial_of_another_way_does_not_cost_what_is_known_of_the_usual_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = [StepCosts(0.5, {1: float(n)}) for n in (1, 2, 3, 4)]
    facts = replace(runtime.device_facts(), backend="cpu")
    monkeypatch.setattr(module.runtime, "device_facts", lambda: facts)
    monkeypatch.setattr(module.build, "kernels", lambda: Kernels)
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    ways: list[Callable[[], None]] = [
        lambda: monkeypatch.delenv(module.build.SETTING, raising=False),
        lambda: monkeypatch.setenv(module.build.SETTING, module.build.OFF),
        lambda: monkeypatch.setenv(compiler.SWITCH, "1"),
    ]
    calibration("r1", {}, "model", "on").steps("16", lambda: costs[3])
    for way, own in zip(ways, costs[:3], strict=True):
        way()
        calibration("r1", {}, "model").steps("16", lambda own=own: own)  # type: ignore[misc]
    monkeypatch.setattr(module, "_opened", {})
    monkeypatch.delenv(compiler.SWITCH)
    assert calibration("r1", {}, "model").steps("16", refuse) == costs[1]
    monkeypatch.delenv(module.build.SETTING)
    assert calibration("r1", {}, "model").steps("16", refuse) == costs[0]
    assert calibration("r1", {}, "model", "on").steps("16", refuse) == costs[3]
    names = sorted(path.stem.partition("r1-")[2] for path in place.iterdir())
    device = names[0]
    assert [name.removeprefix(device) for name in names] == [
        "",
        "-compile-on",
        "-kernels-off",
        "-kernels-off-fused-kernels-off",
    ]


def test_the_key_follows_the_program_s_own_files(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "step.py"
    file.write_text("a = 1\n")
    module._code.cache_clear()
    before = module._code(tmp_path)
    file.write_text("a = 12\n")
    module._code.cache_clear()
    assert module._code(tmp_path) != before


def test_what_cannot_be_written_is_known_until_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = CalibrationFile(tmp_path / "file" / "c.json", KEY, "model")
    assert kept.packing_fault(lambda: "no") == "no"
    assert kept.packing_fault(refuse) == "no"
    assert "is not kept" in caplog.text


def test_a_model_or_all_of_them_can_be_forgotten(place: Path) -> None:
    for name in ("one", "two", "three"):
        CalibrationFile(place / f"{name}.json", KEY, name).packing_fault(lambda: None)
    (place / "damaged.json").write_text("{")
    assert module.forget("two") == 1
    assert sorted(found.name for found in module.stored().values()) == ["one", "three"]
    assert module.forget() == 2
    assert module.stored() == {}


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, calls: list[str]) -> None:
    original: Callable[..., Any] = getattr(place, name)

    def count(*args: Any, **rest: Any) -> Any:
        calls.append(name)
        return original(*args, **rest)

    monkeypatch.setattr(place, name, count)


def test_a_second_load_tries_and_measures_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process does it: nothing is in memory, and what the first one has learnt is in the file."""
    calls: list[str] = []
    counted(monkeypatch, capabilities, "describe", calls)
    counted(monkeypatch, kv, "_fault", calls)
    counted(monkeypatch, build, "calibrate", calls)
    source = ResolvedSource("tiny", "gguf", write_gguf(tmp_path / "t.gguf", make("llama"), matrices(Kind.Q4_1)), "r1")
    config = Config()
    found = []
    for _ in range(2):
        monkeypatch.setattr(module, "_opened", {})
        loaded = formatted(load_model(source, None), config)
        speculation = build._speculation(loaded, config, None, None, Forward(loaded.model))
        assert speculation is not None
        found.append((loaded.caps, speculation.noise, speculation.cost.observed()))
    assert calls == ["describe", "_fault", "calibrate"]
    assert found[0] == found[1]
    assert load_model(source, 100).caps.context_length == 100
    assert load_model(source, None).caps.context_length == 256
    assert calls == ["describe", "_fault", "calibrate", "describe"]  # another length is described for itself


def test_what_steps_were_seen_to_cost_is_known_at_the_next_load(place: Path, tmp_path: Path) -> None:
    source = ResolvedSource("tiny", "gguf", write_gguf(tmp_path / "t.gguf", make("llama"), matrices(Kind.Q4_1)), "r1")
    loaded = load_model(source, None)
    kept = loaded.calibration
    assert kept is not None
    speculation = build._speculation(loaded, Config(), None, None, Forward(loaded.model))
    assert speculation is not None
    speculation.cost.observe_plain(3, 0.25)
    costs = StepCosts(speculation.noise, *speculation.cost.observed())
    kept.learnt("16", costs)
    stored = read(kept.path)
    assert stored is not None and stored.steps["16"].plain == {3: 0.25}
    later = replace(loaded, calibration=CalibrationFile(kept.path, stored.key, "tiny"))
    again = build._speculation(later, Config(), None, None, Forward(later.model))
    assert again is not None and again.cost.plain(3) == 0.25


def test_one_process_asks_one_file(place: Path) -> None:
    assert calibration("r1", {}, "a") is calibration("r1", {}, "a")
    assert calibration("r1", {}, "a") is not calibration("r1", {"other": 1}, "a")
    assert calibration("r1", {}, "a") is not calibration("r2", {}, "a")
