"""API keys: which of them a request carries, found in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence

HeaderList = Iterable[tuple[bytes, bytes]]

SCHEME = b"bearer "


class Keys:
    """The accepted keys, as digests: neither time nor a dump of this object tells one. None: all may enter."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: HeaderList) -> str | None:
        """A name for the key that the headers carry, safe to keep and to log; None without an accepted key.

        Every given key is compared with every accepted one, so the time says nothing about where they differ.
        """
        found = None
        for given in presented(headers):
            digest = _digest(given)
            for index, known in enumerate(self._digests):
                if hmac.compare_digest(digest, known):
                    found = f"key {index}"
        return found


def presented(headers: HeaderList) -> Iterator[bytes]:
    """The keys in `Authorization: Bearer ...` and `x-api-key: ...`."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and value[: len(SCHEME)].lower() == SCHEME:
            yield value[len(SCHEME) :].strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
