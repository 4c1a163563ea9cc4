"""The commands as processes: their output, their exit codes and how they end."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError

from tests.e2e.served import COMMAND, ENDLESS, Served, served
from tests.models.builtin import builtin

LONG: dict[str, Any] = {"model": "", "prompt": "Once upon a time", "temperature": 0, "logit_bias": ENDLESS}


@pytest.fixture
def own() -> Iterator[Served]:
    """A server of this test alone."""
    builtin()
    with served() as running:
        yield running


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_generate_prints_one_reply_and_ends_well() -> None:
    builtin()
    done = run("generate", "-p", "What is the capital of France?", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_a_taken_port_is_one_sentence_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 1
    assert (
        done.stderr
        == f"treadle: Port {port} on 127.0.0.1 is in use; stop the other program or choose another with --port.\n"
    )


def test_a_running_reply_is_finished_before_the_server_ends(own: Served) -> None:
    stream: Any = own.client.completions.create(**LONG, max_tokens=20, stream=True)
    finish = None
    for number, chunk in enumerate(stream):
        if number == 2:
            own.process.send_signal(signal.SIGTERM)
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "length"
    assert own.process.wait(20) == 0


def test_a_second_ctrl_c_ends_the_reply_at_once_and_says_why(own: Served) -> None:
    stream: Any = own.client.completions.create(**LONG, stream=True)
    with pytest.raises(APIError) as caught:
        for number, _ in enumerate(stream):
            if number in (2, 4):
                own.process.send_signal(signal.SIGINT)
    assert caught.value.code == "shutting_down"
    assert own.process.wait(20) == 0
    assert own.process.stdout is not None and "Traceback" not in own.process.stdout.read()
