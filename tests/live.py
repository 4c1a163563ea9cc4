"""A real HTTP server around a scripted engine, on a free port, in a thread of its own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.fakes_engine import FakeEngine
from treadle.api.server import Server
from treadle.config import Config


@dataclass(frozen=True)
class Live:
    """A running server and the engine behind it."""

    engine: FakeEngine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any = None, **rest: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **rest)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, path: str, body: Any) -> socket.socket:
        """Post `body` over a raw socket and leave the answer unread."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def live(engine: FakeEngine, **config: Any) -> Iterator[Live]:
    settings = Config.of(**{"drain_s": 0.1, **config})
    server = Server(engine, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started)
        yield Live(engine, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def until(happened: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for a condition, failing when it does not come."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def data_lines(text: str) -> list[str]:
    """The payloads of a server-sent event stream."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON payloads, without the end mark."""
    return [json.loads(line) for line in data_lines(text) if line != "[DONE]"]
