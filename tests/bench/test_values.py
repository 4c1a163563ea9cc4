"""Wrong options of a bench end in a sentence, before anything is measured."""

from __future__ import annotations

import sys

import pytest

from treadle.bench.__main__ import main


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
def test_what_cannot_be_measured_is_told_in_a_sentence(
    options: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *options.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (None, 0) and told in f"{ended.value.code} {capsys.readouterr().err}"


def test_help_tells_what_each_bench_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    main()
    told = capsys.readouterr().out
    assert "suite for a CPU" in told and "speculate   Speculation: drafts from the text" in told
