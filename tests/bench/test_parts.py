"""Suites: each part in small, one table of all, and a failing part that is told and stops nobody."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.bench import __main__ as command
from treadle.bench import batch, decode, gpu, parts, roofline, suite, summary
from treadle.bench.drive import random_request
from treadle.bench.parts import Part, Run, apart, inside
from treadle.bench.shapes import forget, subject_of

TINY = ("--model", "random:tiny")
SMALL = [
    Part("decode", (*TINY, "--prompt", "20", "--tokens", "8", "--rounds", "1")),
    Part("batch", (*TINY, "--streams", "1", "3", "--tokens", "6", "--rounds", "1")),
    Part("prefix", (*TINY, "--context", "96")),
    Part("overhead", (*TINY, "--prompt", "20", "--tokens", "16", "--rounds", "1")),
    Part("http", (*TINY, "--streams", "1", "2", "--tokens", "8")),
    Part("kv", (*TINY, "--context", "256", "--steps", "4", "--bits", "16", "8")),
    Part("sparse", (*TINY, "--part", "speed", "--small", "random:tiny", "--context", "256", "--rounds", "1")),
    Part("speculate", (*TINY, "--part", "script", "--accept", "0.8", "--tokens", "12", "--rounds", "1")),
]
LINES = {
    "decode": {"decode, 20 tokens", "prefill, 20 tokens"},
    "batch": {"batch, 1 streams", "batch, 3 streams"},
    "prefix": {"turn on 96 tokens", "8 branches on 96", *(f"look-up, {n} tokens" for n in (1024, 8192, 32768, 131072))},
    "overhead": {"loop, 20 tokens"},
    "http": {"HTTP, 1 streams", "HTTP, 2 streams"},
    "kv": {"KV, 16 bits", "KV, 8 bits"},
    "sparse": {"sparse, 256 tokens"},
    "speculate": {"speculate, 1 rows, right 0.8"},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(roofline.COPIED, "cpu", 2**20)
    monkeypatch.setitem(roofline.SIDE, "cpu", 64)
    yield
    forget()
    roofline.measured.cache_clear()


def last_json(text: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return told


@pytest.mark.parametrize("part", SMALL, ids=lambda part: part.name)
def test_a_part_runs_in_small_and_has_its_lines(part: Part) -> None:
    run = Run("x")
    run.part(part, inside)
    assert run.failures == {}
    found = summary.lines(run.reports)
    assert {line["what"] for line in found} == LINES[part.name]
    for line in found:
        assert line["figure"] > 0 and (line["ratio"] is None or line["ratio"] > 0)
    shared = [line for line in found if line["of roofline"] is not None]
    assert bool(shared) == (part.name not in ("sparse", "speculate"))
    assert all(line["of roofline"] > 0 for line in shared)


def test_a_batch_whose_rows_end_too_early_is_refused() -> None:
    """Rather than waited for without end."""
    short = [random_request(f"r{i}", 256, 8, 1, i) for i in range(3)]
    with pytest.raises(RuntimeError, match="before all 3 decoded"):
        batch._speed(subject_of("random:instant"), short, 4)


def test_every_part_of_a_suite_has_a_rule() -> None:
    known = {name.partition(":")[0] for name in summary.RULES}
    assert {*suite.NAMES, *gpu.NAMES} == known


def test_a_suite_prints_all_and_ends_with_one_table_and_its_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "parts_of", lambda model, small: [SMALL[0], SMALL[3]])
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--models", "random:tiny"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    told = last_json(text)
    assert [row["what"] for row in told["rows"]] == ["decode, 20 tokens", "prefill, 20 tokens", "loop, 20 tokens"]
    assert set(told["seconds"]) == {SMALL[0].title, SMALL[3].title}
    assert told["failed"] == {} and told["left_out"] == []
    assert '{"bench": "decode"' in text


def test_a_failing_part_is_told_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(argv: list[str]) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(decode, "main", broken)
    monkeypatch.setattr(gpu, "parts_of", lambda model, small: [SMALL[0], SMALL[3]])
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--models", "random:tiny"])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert f"FAILED {SMALL[0].title}: ValueError: no such luck" in text
    assert [row["what"] for row in last_json(text)["rows"]] == ["loop, 20 tokens"]
    assert last_json(text)["failed"] == {SMALL[0].title: "ValueError: no such luck"}


def test_a_part_that_refuses_its_options_is_one_that_failed() -> None:
    run = Run("x")
    run.part(Part("http", ("--model", "smollm2")), inside)
    assert run.failures == {"http --model smollm2": "SystemExit: 2"}


def test_a_part_whose_packages_are_not_here_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "treadle.bench.http", raising=False)
    monkeypatch.setitem(sys.modules, "treadle.api.server", None)
    run = Run("x")
    run.part(Part("http"), inside)
    assert "ModuleNotFoundError" in run.failures["http"]


def test_no_part_is_begun_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "parts_of", lambda model, small: [SMALL[0]])
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--models", "random:tiny", "--limit-s", "-1"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"LEFT OUT {SMALL[0].title}" in text and last_json(text)["left_out"] == [SMALL[0].title]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes of parts run this code instead."""

    def of(code: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(parts.sys, "executable", str(script))

    return of


def test_what_a_process_prints_is_passed_on_and_read(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    child("print('a table')\nprint('{\"bench\": \"start\", \"rows\": []}')\nprint('{no json')")
    run = Run("x")
    run.part(Part("start"), apart)
    assert run.failures == {} and run.reports == [{"bench": "start", "rows": []}]
    assert "a table" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import sys; sys.exit('it is broken')", "it is broken"),
        ("raise SystemExit(3)", "it ended with code 3"),
        ("print('nothing of use')", "it ended without a result"),
    ],
)
def test_a_process_that_fails_is_told_by_its_last_line(child: Any, code: str, failure: str) -> None:
    child(code)
    run = Run("x")
    run.part(Part("start"), apart)
    assert run.failures == {"start": failure}


def test_a_process_that_takes_too_long_is_ended_with_its_own(child: Any) -> None:
    """What it started holds its output open, so that this would wait for it otherwise."""
    child("import os, time\nos.fork()\ntime.sleep(600)")
    assert apart(Part("start"), lambda line: None, limit_s=0.5) == "it took longer than 0 s and was ended"


def test_an_interrupted_suite_ends_its_process(child: Any) -> None:
    child("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart(Part("start"), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_suite_that_is_told_to_end_leaves_through_its_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    parts.end_on_sigterm()
    try:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_the_command_runs_the_suite_where_no_benchmark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(suite, "main", ran.append)
    monkeypatch.setattr(sys, "argv", ["treadle.bench"])
    command.main()
    assert ran == [[]]
    monkeypatch.setattr(sys, "argv", ["treadle.bench", "parts"])
    with pytest.raises(SystemExit, match=r"usage: .*decode.*rivals.*suite"):
        command.main()
