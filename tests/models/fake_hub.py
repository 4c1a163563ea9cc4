"""A model hub on a local port, just large enough: revisions, lists of files, ranges, a store for large files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"  # such files are listed with their SHA-256 and come from the store


@dataclass
class FakeHub:
    """What the hub has, what it was asked, and how it misbehaves."""

    files: dict[str, bytes]
    repo: str = "org/demo"
    commit: str = COMMIT
    gated: bool = False
    takes_ranges: bool = True
    cut: dict[str, int] = field(default_factory=dict)  # file -> byte at which the connection drops
    drops: int = 0  # how many more times it does
    spoilt: Counter[str] = field(default_factory=Counter)  # file -> how many more times it comes with a wrong byte
    ranges: dict[str, list[str | None]] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)  # bytes of each file that went out
    tokens: dict[str, set[str | None]] = field(default_factory=dict)  # part of the hub -> authorisations seen
    url: str = ""

    def digest(self, name: str) -> str:
        """What the file is listed with, and what its blob is called in the library's cache."""
        data = self.files[name]
        if name.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _row(hub: FakeHub, name: str) -> dict[str, Any]:
    size = len(hub.files[name])
    row = {"type": "file", "path": name, "size": size, "oid": hub.digest(name)[:40]}
    if name.endswith(LARGE):
        row["xetHash"] = "ab" * 32  # the library would rather fetch it elsewhere
        row["lfs"] = {"oid": hub.digest(name), "size": size, "pointerSize": 130}
    return row


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
            path = self.path.split("?")[0].replace("/resolve/main/", f"/resolve/{hub.commit}/")
            if path.startswith("/store/"):
                self.seen("store")
                self.body(path.removeprefix("/store/"), {"ETag": '"of the store"'})
                return
            self.seen("hub")
            if f"{path}/".startswith(f"/api/models/{hub.repo}/") and not hub.gated:
                self.api(path.removeprefix(f"/api/models/{hub.repo}").strip("/"))
            elif path.startswith(f"/{hub.repo}/resolve/{hub.commit}/") and not hub.gated:
                self.file(path.removeprefix(f"/{hub.repo}/resolve/{hub.commit}/"), with_body)
            else:
                code = "GatedRepo" if hub.gated else "RepoNotFound"
                self.send(401, b"{}", {"X-Error-Code": code})

        def seen(self, part: str) -> None:
            hub.tokens.setdefault(part, set()).add(self.headers.get("Authorization"))

        def api(self, rest: str) -> None:
            if rest in ("", "revision/main", f"revision/{hub.commit}"):
                self.send(200, json.dumps({"id": hub.repo, "sha": hub.commit, "siblings": []}).encode())
            elif rest == f"tree/{hub.commit}":
                self.send(200, json.dumps([_row(hub, name) for name in hub.files]).encode())
            else:
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

        def file(self, name: str, with_body: bool) -> None:
            size, etag = str(len(hub.files[name])), f'"{hub.digest(name)}"'
            headers = {"X-Repo-Commit": hub.commit}
            if name.endswith(LARGE):
                # By another name, so that clients take it for another host and keep their token to themselves.
                location = hub.url.replace("127.0.0.1", "localhost") + f"/store/{name}"
                linked = {"X-Linked-Etag": etag, "X-Linked-Size": size, "Location": location}
                self.send(302, b"", {**headers, **linked})
            elif with_body:
                self.body(name, {**headers, "ETag": etag})
            else:
                self.send(200, b"", {**headers, "ETag": etag, "Content-Length": size})

        def body(self, name: str, headers: dict[str, str]) -> None:
            data, asked = hub.files[name], self.headers.get("Range")
            hub.ranges.setdefault(name, []).append(asked)
            first, last = 0, len(data) - 1
            status = 200
            if asked and hub.takes_ranges:
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                status = 206
            if hub.spoilt[name] > 0:
                hub.spoilt[name] -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            stop = last + 1
            if name in hub.cut and hub.drops and first <= hub.cut[name] < stop:
                hub.drops -= 1
                stop = hub.cut[name]
            hub.served[name] += stop - first
            self.send(status, data[first:stop], {**headers, "Content-Length": str(last + 1 - first)})
            if stop <= last:
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
