"""A model hub on a local port, just large enough for a snapshot download: refs, file lists, ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the hub has, what it was asked, and how it misbehaves."""

    files: dict[str, bytes]
    repo: str = "org/demo"
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)  # file -> byte at which the connection drops
    drops: int = 0  # how many more times it does
    ranges: dict[str, list[str | None]] = field(default_factory=dict)
    url: str = ""


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            if path.startswith(f"/api/models/{hub.repo}/") and not hub.gated:
                self.api(path.removeprefix(f"/api/models/{hub.repo}/"))
            elif path.startswith(f"/{hub.repo}/resolve/{COMMIT}/"):
                self.file(path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/"), with_body)
            else:
                code = "GatedRepo" if hub.gated else "RepoNotFound"
                self.send(401, b"{}", {"X-Error-Code": code})

        def api(self, rest: str) -> None:
            if rest in ("revision/main", f"revision/{COMMIT}"):
                self.send(200, json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": []}).encode())
            elif rest == f"tree/{COMMIT}":
                rows = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files.items()
                ]
                self.send(200, json.dumps(rows).encode())
            else:
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

        def file(self, name: str, with_body: bool) -> None:
            data = hub.files[name]
            etag = hashlib.sha256(data).hexdigest()  # 64 digits: a large file, which may be resumed
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if not with_body:
                self.send(200, b"", {**headers, "Content-Length": str(len(data))})
                return
            asked = self.headers.get("Range")
            hub.ranges.setdefault(name, []).append(asked)
            start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            stop = len(data)
            if name in hub.cut and hub.drops:
                hub.drops -= 1
                stop = hub.cut[name]
            self.send(206 if asked else 200, data[start:stop], {**headers, "Content-Length": str(len(data) - start)})
            if stop < len(data):
                self.close_connection = True

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free local port; its `url` is set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
