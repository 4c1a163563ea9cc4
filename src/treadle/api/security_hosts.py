"""Which `Host` and `Origin` values may reach the server. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

ANY = "*"


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without port or brackets, means this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hostname(authority: str) -> str:
    """`[::1]:8080` -> `::1`, `Box:80` -> `box`; "" when it is no authority."""
    try:
        parts = urlsplit(f"//{authority}")
        plain = parts.netloc == authority and "@" not in authority
        return (parts.hostname or "") if plain else ""
    except ValueError:
        return ""


class Hosts:
    """The names that a request may call this server by.

    A web page can make its own name resolve to 127.0.0.1 (DNS rebinding) and then read a server that has no
    key; the `Host` header still tells that name. A server on loopback therefore answers to loopback names and
    to `allowed` only. One on the network answers to any name unless `allowed` is given. "*" allows all.
    """

    def __init__(self, bound: str, allowed: Sequence[str]) -> None:
        self._any = ANY in allowed or not (allowed or is_loopback(bound))
        self._names = {bound.lower(), *(name.lower().strip("[]") for name in allowed)}

    def accept(self, host: str) -> bool:
        """`host` is the value of the header; "" if there was none."""
        if self._any:
            return True
        name = hostname(host)
        return is_loopback(name) or name in self._names


class Origins:
    """The web pages that may use this server: those of this machine, those it serves, and the configured."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self.any = ANY in allowed
        self._allowed = {origin.lower() for origin in allowed}

    def accept(self, origin: str, host: str) -> bool:
        """`host` is the request's `Host` header: a page of this very server is no stranger."""
        if self.any or origin.lower() in self._allowed:
            return True
        scheme, _, authority = origin.partition("://")
        if scheme.lower() not in ("http", "https"):
            return False
        return authority.lower() == host.lower() or is_loopback(hostname(authority))
