"""The server's log on stderr: in the form asked for, complete when the process ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.test_cli import run

PROGRAM = """
import logging, sys
from treadle.cli.logs import log_to_stderr
log_to_stderr(sys.argv[1])
for i in range(200):
    logging.getLogger("treadle.some").info("line %d", i)
logging.getLogger("another").info("not ours")
logging.getLogger("another").warning("a warning")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("treadle").exception("It broke.")
"""


def logged(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_every_line_is_there_when_the_process_has_ended() -> None:
    lines = logged("text")
    assert [line.split(": ")[1] for line in lines[:201]] == [*(f"line {i}" for i in range(200)), "a warning"]
    assert lines[201].endswith("ERROR treadle: It broke.")
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_in_json_a_traceback_is_part_of_its_line() -> None:
    values = [json.loads(line) for line in logged("json")]
    assert [value["message"] for value in values[199:]] == ["line 199", "a warning", "It broke."]
    assert "ZeroDivisionError" in values[-1]["traceback"] and values[-2]["logger"] == "another"


def test_another_form_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "serve", "--log-format", "xml") == 2
    assert capsys.readouterr().err == "treadle: log_format must be one of text, json, not 'xml'.\n"
