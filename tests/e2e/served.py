"""`treadle serve` as a process of its own, the way a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI

from tests.live import until

COMMAND = (sys.executable, "-c", "from treadle.cli import console; console()")
START_S = 60.0
ENDLESS = {"0": -100, "2": -100}  # a bias under which the built-in model never draws one of its end ids


@dataclass(frozen=True)
class Served:
    """A running server; `client` never retries, so that every answer is the first one."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0, timeout=60)

    def health(self) -> tuple[int, int, int]:
        """(status, running, waiting)."""
        answer = httpx.get(self.url + "/health", timeout=10)
        return answer.status_code, answer.json()["running"], answer.json()["waiting"]

    def idle(self) -> bool:
        return self.health() == (200, 0, 0)

    def send(self, path: str, body: object) -> socket.socket:
        """Post `body` over a raw socket and leave the answer unread."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def served(*options: str) -> Iterator[Served]:
    """A server with the built-in model, ready; it is ended at the end if the test has not done so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [*COMMAND, "serve", "--port", str(port), *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            server = Served(process, port)
            until(lambda: _ready(server), within_s=START_S)
            yield server
        finally:
            process.kill()


def _ready(server: Served) -> bool:
    assert server.process.poll() is None, "the server has ended"
    try:
        return server.health()[0] == 200
    except httpx.TransportError:
        return False
