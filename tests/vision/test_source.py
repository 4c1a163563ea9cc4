"""Data URIs as clients write them; the web only where it is allowed; files never."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import BadRequest
from treadle.vision.fetch import fetch, is_public
from treadle.vision.source import image_bytes

DATA = bytes(range(256)) * 3


def embedded(url: str) -> bytes:
    return image_bytes(url, allow_web=False, param="x")


@pytest.mark.parametrize("head", ["data:image/png;base64", "data:;base64", "DATA:image/jpg;charset=utf-8;BASE64",
                                  "data:application/octet-stream;base64", " data:image/webp;base64 "])  # fmt: skip
@given(data=st.binary(max_size=200))
def test_a_data_uri_is_its_data_whatever_it_says_that_it_is(head: str, data: bytes) -> None:
    assert embedded(f"{head},{base64.b64encode(data).decode()}") == data


@pytest.mark.parametrize(
    "text",
    [
        "\r\n".join(base64.encodebytes(DATA).decode().split("\n")),
        base64.urlsafe_b64encode(DATA).decode().rstrip("="),
        quote(base64.b64encode(DATA).decode()),
        f"  {base64.b64encode(DATA).decode()}\t\n",
    ],
    ids=["line breaks", "url-safe", "percent", "spaces"],
)
def test_base64_is_read_as_clients_write_it(text: str) -> None:
    assert embedded(f"data:image/png;base64,{text}") == DATA


def test_data_without_base64_is_percent_encoded() -> None:
    assert embedded(f"data:image/bmp,{quote(DATA)}") == DATA


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,?!", "not base64"),
        ("data:image/png;base64,aGk", ""),
        ("file:///etc/passwd", "files are not read"),
        ("/etc/passwd", "files are not read"),
        ("C:\\image.png", "files are not read"),
        ("ftp://example.com/a.png", "files are not read"),
        ("", "files are not read"),
        ("https://example.com/a.png", "--allow-image-urls"),
    ],
)
def test_any_other_address_is_refused_by_name(url: str, reason: str) -> None:
    if not reason:
        assert embedded(url) == b"hi"
        return
    with pytest.raises(BadRequest, match=reason) as caught:
        embedded(url)
    assert caught.value.param == "x"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
     "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
     "2002:7f00:1::", "64:ff9b::7f00:1", "ff02::1"],
)  # fmt: skip
def test_addresses_of_this_machine_and_its_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


class Handler(BaseHTTPRequestHandler):
    """/N redirects to /N-1, /0 is the image; /large never ends, /missing is a 404, /away leads elsewhere."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if name == "0":
            self._answer(200, DATA)
        elif name.isdigit():
            self._answer(302, b"", location=f"/{int(name) - 1}")
        elif name == "away":
            self._answer(302, b"", location="http://inside.example/secret")
        elif name == "file":
            self._answer(302, b"", location="file:///etc/passwd")
        elif name == "large":
            self._answer(200, b"x" * 100_000)
        elif name == "slow":
            self._drip()
        elif name == "short":
            self._answer(200, DATA, length=len(DATA) + 5)
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, location: str = "", length: int | None = None) -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def _drip(self) -> None:
        """A header that never ends, a byte at a time."""
        with suppress(OSError):
            for _ in range(200):
                self.wfile.write(b"H")
                self.wfile.flush()
                time.sleep(0.02)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def web(port: int, name: str, **limits: Any) -> bytes:
    """Names that end in `.test` are the test's server, which counts as public here."""
    return fetch(
        f"http://images.test:{port}/{name}",
        param="x",
        resolve=lambda host, _: ["127.0.0.1" if host == "images.test" else "10.0.0.1"],
        public=lambda address: address == "127.0.0.1",
        **limits,
    )


def test_an_image_is_fetched_through_redirects(port: int) -> None:
    assert web(port, "0") == DATA
    assert web(port, "3") == DATA


@pytest.mark.parametrize(
    ("name", "limits", "reason"),
    [
        ("4", {}, "redirected more than 3 times"),
        ("away", {}, "public addresses only"),
        ("file", {}, "must be http"),
        ("missing", {}, "status 404"),
        ("large", {"most_bytes": 50_000}, "larger than"),
        ("0", {"seconds": 0.0}, "took too long"),
        ("short", {}, "ended early"),
        ("slow", {"seconds": 0.2}, "cannot be fetched"),
    ],
)
def test_what_is_too_far_too_large_or_inside_is_refused(
    port: int, name: str, limits: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        web(port, name, **limits)
    assert caught.value.param == "x"


def test_this_machine_is_refused_by_its_name_and_by_its_address(port: int) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1"):
        with pytest.raises(BadRequest, match=r"public addresses only|cannot be fetched"):
            image_bytes(f"http://{host}:{port}/0", allow_web=True, param="x")


def test_a_name_that_has_one_private_address_among_others_is_refused() -> None:
    with pytest.raises(BadRequest, match="public addresses only"):
        fetch("http://a.test/x", param="x", resolve=lambda *_: ["8.8.8.8", "10.0.0.1"])


def test_user_names_in_addresses_are_refused() -> None:
    with pytest.raises(BadRequest, match="without a user name"):
        fetch("http://me:secret@a.test/x", param="x")
