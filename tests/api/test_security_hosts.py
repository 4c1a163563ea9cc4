"""Host names and origins: loopback and the configured ones, nothing that only looks like them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.security_hosts import Hosts, Origins, hostname, is_loopback

LOOPBACK = Hosts("127.0.0.1", ["box.lan", "[fd00::1]"])


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("localhost", True),
        ("LOCALHOST:8080", True),
        ("127.0.0.1:8080", True),
        ("127.8.8.8", True),
        ("[::1]:8080", True),
        ("box.lan:80", True),
        ("[fd00::1]:80", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example@localhost", False),
        ("localhost/evil.example", False),
        ("evil.example:80#localhost", False),
        ("[::1", False),
        ("192.168.0.1", False),
        ("", False),
    ],
)
def test_a_loopback_server_answers_to_its_own_names(host: str, accepted: bool) -> None:
    assert LOOPBACK.accept(host) is accepted


def test_a_server_on_the_network_answers_to_any_name_unless_told_which() -> None:
    assert Hosts("0.0.0.0", []).accept("box.example")
    assert not Hosts("0.0.0.0", ["box.lan"]).accept("box.example")
    assert Hosts("0.0.0.0", ["box.lan"]).accept("localhost:8080")
    assert Hosts("127.0.0.1", ["*"]).accept("box.example")


@pytest.mark.parametrize(
    ("origin", "accepted"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("https://page.example", True),
        ("app://notes.md", True),
        ("http://box.lan:8080", True),  # served by this very server
        ("https://page.example.evil", False),
        ("http://page.example", False),
        ("http://localhost.evil.example", False),
        ("http://box.lan:9090", False),
        ("file://localhost", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins_of_this_machine_this_server_and_the_configuration_may_ask(origin: str, accepted: bool) -> None:
    assert Origins(["https://page.example", "app://notes.md"]).accept(origin, "box.lan:8080") is accepted


def test_any_origin_is_any_origin() -> None:
    assert Origins(["*"]).accept("null", "localhost")


@given(st.text())
def test_no_header_value_breaks_the_parsers(text: str) -> None:
    Origins([]).accept(text, text)
    assert is_loopback(hostname(text)) or not LOOPBACK.accept(text) or hostname(text) in ("box.lan", "fd00::1")
