"""Fused kernels are used where they can be compiled, and where they cannot, everything still computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_blas import CPU_BUILD
from treadle import compiler

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs shell scripts as programs")
FUSED = (
    "from treadle import runtime\n"
    "runtime.prepare()\n"
    "import mlx.core as mx\n"
    "print(mx.compile(lambda x: mx.exp(x) * x - 0.7531)(mx.zeros(3)).tolist())\n"
)


def broken(folder: Path) -> str:
    """A search path with a `g++` that says it is there and compiles nothing."""
    program = folder / "g++"
    program.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_working_compiler_is_found_to_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert compiler.why_not() is None
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.why_not() == "there is no C++ compiler (g++)"


@posix
def test_a_broken_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", broken(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert "does not make a library" in (compiler.why_not() or "")


@posix
def test_a_missing_temporary_folder_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert "nothing can be written" in (compiler.why_not() or "")


@posix
def test_kernels_of_another_user_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx" / "1.0" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert compiler.why_not() == f"{tmp_path / 'mlx'} belongs to another user"


@posix
def test_with_a_broken_compiler_the_same_is_computed_and_a_sentence_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": broken(tmp_path), "TMPDIR": str(tmp_path)}
    environment.pop(compiler.SWITCH, None)
    done = subprocess.run([sys.executable, "-c", FUSED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [round(value, 4) for value in json.loads(done.stdout)] == [-0.7531] * 3
    if CPU_BUILD:
        assert "without fused kernels" in done.stderr
