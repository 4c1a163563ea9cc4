"""The start of a real server is measured until its first answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle.bench import start
from treadle.models import calibration
from treadle.models.folders import cache_folder


def test_processor_seconds_are_those_of_the_process() -> None:
    before = start._processor_seconds(os.getpid())
    if before is None:
        pytest.skip("needs /proc")
    sum(range(3_000_000))
    after = start._processor_seconds(os.getpid())
    assert after is not None and after > before


def test_the_cache_folder_of_a_run_has_all_but_the_calibrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models", "kernels", calibration.FOLDER):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    with start._own_cache() as place:
        assert sorted(path.name for path in place.iterdir()) == ["kernels", "models"]
        kept = calibration.CalibrationFile(place / calibration.FOLDER / "c.json", {}, "model")
        kept.packing_fault(lambda: None)
        start.forget(place)
        assert not kept.path.exists()
    assert (cache_folder() / calibration.FOLDER).is_dir()


def test_a_server_that_ends_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"The server (answered 503|did not answer)"):
        start.start("./nothing", tmp_path)
