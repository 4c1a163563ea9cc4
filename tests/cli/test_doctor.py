"""`treadle doctor` shows what was measured of models, and lets it be measured anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import run
from treadle.models import calibration
from treadle.models.calibration import CalibrationFile, StepCosts
from treadle.types import Batching, Caps, LayerKind

KEY = {"device": "this device", "model": "0123abcd", "mlx": "1.2.3"}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path)
    caps = Caps(10, 20, (LayerKind.ROWS,), batching=Batching.DECODE, why="padding goes wrong")
    for name in ("one", "two"):
        kept = CalibrationFile(tmp_path / f"{name}.json", KEY, name)
        kept.caps(20, lambda: caps)
        kept.packing_fault(lambda: "no group divides its heads")
        kept.steps("8/4", lambda: StepCosts(0.25, {1: 0.012, 8: 0.03}))
    return tmp_path


def test_it_shows_cost_noise_and_what_was_decided(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor") == 0
    shown = capsys.readouterr().out
    assert "one (revision 0123abcd) on this device, " in shown and "two (revision 0123abcd)" in shown
    assert "decode: padding goes wrong" in shown
    assert "no group divides its heads" in shown
    assert "1: 12 ms, 8: 30 ms by tokens; logits wobble by 0.25" in shown
    assert len(list(measured.iterdir())) == 2


def test_it_forgets_when_told_to(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor", "--recalibrate") == 0
    assert "in 2 files" in capsys.readouterr().out
    assert list(measured.iterdir()) == []


def test_of_a_model_that_is_named_that_alone_is_forgotten(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "doctor", "--recalibrate", "--model", "./one.gguf") == 1  # there is no such file to load
    assert [path.name for path in measured.iterdir()] == ["two.json"]
