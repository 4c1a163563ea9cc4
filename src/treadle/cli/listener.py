"""The port, taken before anything slow is done: who cannot have it learns so at once."""

from __future__ import annotations

import errno
import socket

from treadle.errors import TreadleError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises TreadleError when the address is taken or not to be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise TreadleError(f"The host {host!r} is not known: {error.strerror}.", param="host") from error
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise TreadleError(_why_not(host, port, error), param="port") from error
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use; stop the other program or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} may not be used by this user; choose one above 1023 with --port."
    return f"Cannot listen on {host}, port {port}: {error.strerror}."
