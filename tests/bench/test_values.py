"""Wrong options of a bench end in a sentence, before anything is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle.bench", *options], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("decode --tokens 0", "'0' is no whole number from 1"),
        ("speculate --accept 1.5", "'1.5' is no number from 0 to 1"),
        ("decode --model random:huge", "decode: 'random:huge' is none of"),
        ("decode --model random:tiny:5", "with SHAPE one of"),
        ("nothing", "usage: python -m treadle.bench {"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(options: str, told: str) -> None:
    ran = bench(*options.split())
    assert ran.returncode != 0 and told in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


def test_help_tells_what_each_bench_measures() -> None:
    ran = bench("--help")
    assert ran.returncode == 0
    assert "suite for a CPU" in ran.stdout and "speculate   Speculation: drafts from the text" in ran.stdout
