"""Images from the web: only from public addresses, of a limited size and within a limited time.

A name is resolved once, each of its addresses must be public, and the connection goes to the address that was checked:
a name that answers differently the second time changes nothing. Every redirect is treated as a new address.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import SplitResult, urljoin, urlsplit

from treadle.errors import BadRequest

MOST_BYTES = 32 * 2**20
MOST_SECONDS = 10.0
MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
PIECE = 65536
PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], list[str]]


def resolved(host: str, port: int) -> list[str]:
    """The addresses of a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet: not this machine's, its network's, or one that hides such a one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(hidden is not None and not hidden.is_global for hidden in inner):
            return False
    return ip.is_global and not ip.is_multicast


def fetch(
    url: str,
    *,
    param: str,
    resolve: Resolve = resolved,
    public: Callable[[str], bool] = is_public,
    most_bytes: int = MOST_BYTES,
    seconds: float = MOST_SECONDS,
) -> bytes:
    """The body behind `url`; blocks. Raises BadRequest naming `param` with what is in the way."""
    deadline = time.monotonic() + seconds
    try:
        for _ in range(MOST_REDIRECTS + 1):
            connection, path = _connected(urlsplit(url), resolve, public, deadline, param)
            with _until(deadline, connection):
                body, location = _answer(connection, path, most_bytes, param)
            if location is None:
                return body
            url = urljoin(url, location)
    except (OSError, http.client.HTTPException, ValueError) as fault:
        reason = " ".join(str(fault).split())[:200] or type(fault).__name__
        raise BadRequest(f"The image cannot be fetched ({reason}).", param=param) from fault
    raise BadRequest(f"The image's address was redirected more than {MOST_REDIRECTS} times.", param=param)


def _connected(
    parts: SplitResult, resolve: Resolve, public: Callable[[str], bool], deadline: float, param: str
) -> tuple[http.client.HTTPConnection, str]:
    if parts.scheme not in PORTS or not parts.hostname or parts.username is not None:
        raise BadRequest("An image's address must be http(s)://host/path without a user name.", param=param)
    port = parts.port or PORTS[parts.scheme]
    addresses = resolve(parts.hostname, port)
    if not addresses or not all(map(public, addresses)):
        raise BadRequest("Images are fetched from public addresses only.", param=param)
    connection: http.client.HTTPConnection = http.client.HTTPConnection(parts.hostname, port)
    sock = socket.create_connection((addresses[0], port), timeout=_left(deadline))
    if parts.scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
    connection.sock = sock
    return connection, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _answer(connection: http.client.HTTPConnection, path: str, most_bytes: int, param: str) -> tuple[bytes, str | None]:
    """The body, or where else it is."""
    connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "treadle"})
    response = connection.getresponse()
    if response.status in REDIRECTS and (location := response.getheader("Location")):
        return b"", location
    if response.status != 200:
        raise BadRequest(f"The image's server answered with status {response.status}.", param=param)
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(PIECE):
        size += len(piece)
        if size > most_bytes:
            raise BadRequest(f"The image's file is larger than {most_bytes // 2**20} MB.", param=param)
        pieces.append(piece)
    if response.length:
        raise OSError("it ended early, or took too long")
    return b"".join(pieces), None


@contextmanager
def _until(deadline: float, connection: http.client.HTTPConnection) -> Iterator[None]:
    """Cuts the connection when time is up, however slowly the other side sends, and closes it."""
    sock = connection.sock
    timer = threading.Timer(_left(deadline), sock.shutdown, (socket.SHUT_RDWR,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left
