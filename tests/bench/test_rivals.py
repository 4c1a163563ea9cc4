"""Rivals are real processes: started, asked what all are asked, and surely ended. Here they are tiny fakes."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.bench import rival_servers, rivals
from treadle.bench.rival_servers import RIVALS, Rival, started, versions
from treadle.errors import TreadleError
from treadle.models.sources import ResolvedSource, resolve

SERVER = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, pids, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # a worker that would outlive it
        open(pids, "a").write(f"{os.getpid()} ")
        time.sleep(600)
open(pids, "a").write(f"{os.getpid()} ")
if kind == "broken":
    sys.exit("no weights here")


class Handler(BaseHTTPRequestHandler):
    asked = []

    def log_message(self, *args):
        pass

    def send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        system = body["messages"][0]["content"]
        if body["model"] != "the-model" or kind == "deaf" or (kind == "tired" and body.get("stream")):
            return self.send(500, b'{"error": {"message": "not today"}}')
        if not body.get("stream"):
            return self.send(200, b"{}")
        time.sleep(0.01 if system in self.asked else 0.2)
        self.asked.append(system)
        self.send_response(200)
        self.end_headers()
        for i in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\\n\\n')
            self.wfile.flush()
            time.sleep(0.005)
        self.wfile.write(b"data: [DONE]\\n\\n")


ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """A rival that runs SERVER; `pids` tells which processes there were."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    pids = tmp_path / "pids"

    def of(name: str, kind: str = "well", takes: tuple[str, ...] = ("gguf", "folder"), module: str = "json") -> Rival:
        def command(python: str, model: str, port: int) -> list[str]:
            return [python, str(script), str(port), str(pids), kind]

        return Rival(name, module, "numpy", takes, command)

    of.pids = pids  # type: ignore[attr-defined]
    return of


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def all_ended(pids: Path) -> bool:
    found = [int(pid) for pid in pids.read_text().split()]
    deadline = time.monotonic() + 5
    while any(map(alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found) and not any(map(alive, found))


def source(tmp_path: Path, kind: Any = "folder") -> ResolvedSource:
    return ResolvedSource("demo", kind, tmp_path, "0")


ASK = partial(rivals.ask, tokens=8, words=30, streams=3, rounds=1)


def test_servers_are_asked_the_same_one_after_the_other(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = fake("absent", module="no_such_module")
    assert rivals.compare([fake("one"), absent, fake("two")], {}, source(tmp_path), ASK) == 0
    text = capsys.readouterr().out
    told = last(text)
    assert "Not installed: absent (" in text and told["not_installed"] == ["absent"]
    first, second = told["rows"]
    assert (first["server"], second["server"], first["version"]) == ("one", "two", np.__version__)
    assert first["cold ms"] > 200 > first["cached ms"] > 10  # the fake remembers system messages
    assert 20 < first["decode tok/s"] <= 200 and first["streams tok/s"] > 0
    assert first["decode ratio"] == 1 and second["decode ratio"] == first["decode tok/s"] / second["decode tok/s"]
    assert all_ended(fake.pids)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("broken", "bad ended with code 1: no weights here"),
        ("deaf", "bad gave no answer to a chat within 5 s (last: 500)"),
        ("tired", "bad failed 2 of 2 requests: HTTP 500: not today"),
    ],
)
def test_a_server_that_fails_is_told_and_the_next_one_runs(
    fake: Any, tmp_path: Path, kind: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "deaf":
        rival_list, start_s = [fake("bad", kind)], 5.0
    else:
        rival_list, start_s = [fake("bad", kind), fake("good")], 60.0
    ask = ASK if kind == "tired" else (lambda rival, url: {"decode tok/s": 1.0, "streams tok/s": 1.0})
    assert rivals.compare(rival_list, {}, source(tmp_path), ask, start_s) == 1
    text = capsys.readouterr().out
    assert f"FAILED bad: {reason}" in text
    [row] = last(text)["rows"]
    assert row["server"] == ("none" if kind == "deaf" else "good")
    assert row.get("decode ratio") is None  # the first one has no figure to compare with
    assert all_ended(fake.pids)


def last(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_a_server_that_will_not_end_is_killed_with_its_workers(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rival_servers, "END_S", 0.3)
    with pytest.raises(KeyboardInterrupt), started(fake("stubborn", "stubborn"), sys.executable, tmp_path):
        raise KeyboardInterrupt
    assert len(fake.pids.read_text().split()) == 2 and all_ended(fake.pids)


def test_a_server_is_told_apart_from_what_is_not_installed() -> None:
    """By the package in the interpreter that was named for it."""
    found = versions(RIVALS, {"vllm-mlx": sys.executable}, sys.executable)
    assert found["treadle"] is not None and found["mlx_lm.server"] is not None and found["vllm-mlx"] is None
    with pytest.raises(TreadleError, match="/no/such/python cannot be run"):
        versions(RIVALS, {"vllm-mlx": "/no/such/python"}, sys.executable)


def test_a_folder_is_not_given_to_a_server_of_gguf_files(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rivals.compare([fake("llama", takes=("gguf",))], {}, source(tmp_path), ASK) == 1
    assert "FAILED llama: llama takes a GGUF file, and demo is a folder." in capsys.readouterr().out
    assert not fake.pids.exists()


def test_an_interpreter_for_an_unknown_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rivals.main(["--python", "ollama=/usr/bin/python3"])
    assert "not 'ollama'" in capsys.readouterr().err


def test_a_gguf_file_becomes_a_folder_that_mlx_lm_reads(tmp_path: Path) -> None:
    from mlx_lm import load

    from treadle.models.load import load_model

    found = resolve("smollm2", None)
    folder = rivals.as_folder(found.path, tmp_path)
    model, tokenizer = load(str(folder))
    ours = load_model(found, None)
    text = "What is the capital of France?"
    assert tokenizer.encode(text) == ours.tokenizer.encode(text)
    assert tokenizer.has_chat_template
    del model
