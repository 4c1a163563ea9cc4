"""The kernels are compiled once for what they depend on; without a compiler everything computes as before."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import run
from treadle.native import build

needed = pytest.mark.skipif(build.kernels() is None, reason=f"no CPU kernels: {build.why_not()}")
ASK = (
    "import json, sys\n"
    "from treadle import runtime\n"
    "runtime.prepare()\n"
    "from treadle.native import build\n"
    "print(json.dumps([build.why_not(), build.kernels() is not None]))\n"
)


def library() -> Path:
    """The one that this process uses."""
    return Path(build.kernels().__file__)


def copied(folder: Path) -> Path:
    """The library of this process and its seal in another folder."""
    folder.mkdir()
    shutil.copy(library(), folder)
    shutil.copy(library().with_suffix(".sha256"), folder)
    return folder / library().name


@needed
def test_a_library_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    before = copied(tmp_path / "kernels").stat()
    assert run(ASK, TREADLE_CPU_KERNELS=str(tmp_path / "kernels")) == [None, True]
    assert (tmp_path / "kernels" / library().name).stat().st_mtime_ns == before.st_mtime_ns


@needed
@pytest.mark.parametrize("damage", ["cut", "other", "unsealed"])
def test_a_damaged_library_is_made_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copied(tmp_path / "kernels")
    whole, ours = made.read_bytes(), library()
    if damage == "unsealed":
        made.with_suffix(".sha256").unlink()
    else:
        made.write_bytes(whole[:100_000] if damage == "cut" else whole[:-1] + b"!")
    asked: list[Path] = []
    used: list[Path] = []
    module = build.kernels()

    def compile_again(_compiler: str, place: Path) -> None:
        asked.append(place)
        shutil.copy(ours, place)

    monkeypatch.setenv(build.SETTING, str(tmp_path / "kernels"))
    monkeypatch.setattr(build, "_compile", compile_again)
    monkeypatch.setattr(build, "loaded", lambda found: used.append(found) or module)
    monkeypatch.setattr(build, "_found", None)
    assert build.kernels() is module and asked == used == [made]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernels are for Linux")
def test_without_a_compiler_a_sentence_says_so(tmp_path: Path) -> None:
    why, there = run(ASK, PATH=str(tmp_path), TREADLE_CPU_KERNELS=str(tmp_path / "kernels"))
    assert not there and why == "there is no C++ compiler (install g++)"


@needed
def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "g++"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "x: error: no more room" >&2; exit 1; }\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    why, there = run(ASK, PATH=path, TREADLE_CPU_KERNELS=str(tmp_path / "kernels"))
    assert not there and "no more room" in why
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_they_can_be_switched_off() -> None:
    assert run(ASK, TREADLE_CPU_KERNELS="off") == ["TREADLE_CPU_KERNELS is off", False]


@needed
def test_the_name_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = build._digest(build._ingredients("g++"))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build._digest(build._ingredients("g++")) != here


@needed
def test_a_library_that_computes_nonsense_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.native import trial

    class Doubling:
        def __getattr__(self, name: str) -> Any:
            kernel = getattr(build.kernels(), name)
            return kernel if name == "set_num_threads" else lambda *given: kernel(*given) * 2

    monkeypatch.setattr(build, "loaded", lambda _library: Doubling())
    monkeypatch.setattr(sys, "argv", ["trial", "x"])
    with pytest.raises(SystemExit, match="is off by"):
        trial.main()
