"""How much memory a request needs, and whether it may start. Pure: bytes in, decisions out.

The estimate of a sequence is its rows (tokens x bytes per token, windows capped), its state, and once for the whole
server the activations of one prefill chunk. Nothing is refused from a momentary reading of the device: the ledger adds
up what running sequences may still need, and only what could not even fit alone is refused for good.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.errors import MemoryRefused
from treadle.types import Footprint, KvFormat

FORESEEN = 2048  # generated tokens that an open-ended request is counted for at first
LEAST_CHUNK = 16


class Ledger:
    """Bytes promised to running sequences, under `limit`; `base` is taken before any (weights and the like).

    `peers`: the ledgers of all models of the process, which share the limit. This one joins them until `close`.
    `formats`: the footprints of sequences whose rows have another form than the model's, by its name.
    """

    def __init__(
        self,
        footprint: Footprint,
        base: int,
        limit: int,
        peers: list[Ledger] | None = None,
        formats: Mapping[str, Footprint] | None = None,
    ) -> None:
        self.peers = [] if peers is None else peers
        self.footprint = footprint
        self.formats = formats or {}
        self.base = base
        self.limit = limit
        self.correction = 1.0  # measured activations / estimated, at least 1
        self._promised: dict[str, int] = {}
        self.peers.append(self)

    def close(self) -> None:
        """The model is gone: its bytes are the others'."""
        self.peers.remove(self)

    @property
    def promised(self) -> int:
        return sum(self._promised.values())

    @property
    def taken(self) -> int:
        """Bytes of the weights and of what was promised."""
        return self.base + self.promised

    def rows(self, num_tokens: int, kv: KvFormat | None = None) -> int:
        """Bytes of so many tokens in a format; None: the model's."""
        return (self.footprint if kv is None else self.formats.get(str(kv), self.footprint)).rows(num_tokens)

    def need(self, num_prompt: int, room: int, kv: KvFormat | None = None) -> int:
        """Bytes for a request: its rows, and the smallest chunk over its whole prompt."""
        return self.rows(num_prompt + min(room, FORESEEN), kv) + self.activations(LEAST_CHUNK, num_prompt)

    @property
    def most(self) -> int:
        """Bytes that there are beside the weights of all models."""
        return self.limit - sum(ledger.base for ledger in tuple(self.peers))

    def check(self, num_prompt: int, room: int, kv: KvFormat | None = None) -> None:
        """Raises MemoryRefused when the request cannot fit even alone."""
        need, most = self.need(num_prompt, room, kv), self.most
        if need > most:
            raise MemoryRefused(
                f"This request needs about {_gb(need)} of memory, but the server may use {_gb(max(most, 0))} "
                f"beside the model ({_gb(self.limit)} in all)."
            )

    def fits(self, need: int) -> bool:
        """Whether a request may start beside the running ones. With none running it always may."""
        return not any(ledger.promised for ledger in self.peers) or need <= self.free

    def promise(self, id: str, need: int) -> None:
        self._promised[id] = need

    def grow(self, id: str, num_tokens: int, kv: KvFormat | None = None) -> None:
        """A sequence became longer than it was counted for. One that ended meanwhile stays released."""
        if id in self._promised:
            self._promised[id] = max(self._promised[id], self.rows(num_tokens, kv))

    @property
    def free(self) -> int:
        """Bytes that nobody was promised; the prefix cache may have them."""
        return self.limit - sum(ledger.taken for ledger in self.peers)

    def release(self, id: str) -> None:
        self._promised.pop(id, None)

    def chunk(self, most: int, context: int) -> int:
        """The largest chunk, up to `most` tokens, whose activations fit now."""
        while most > LEAST_CHUNK and self.activations(most, context) > self.free:
            most //= 2
        return most

    def observe(self, num_tokens: int, context: int, peak: int) -> None:
        """A chunk took `peak` bytes beyond what is promised for rows; the estimate follows, slowly downwards."""
        estimate = self.footprint.chunk(num_tokens, context)
        if estimate:
            self.correction = max(1.0, 0.95 * self.correction, peak / estimate)

    def activations(self, num_tokens: int, context: int) -> int:
        """Bytes that a chunk of `num_tokens` over `context` tokens takes while it is computed."""
        return int(self.correction * self.footprint.chunk(num_tokens, context))


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 10**8 or n == 0 else f"{n / 1e6:.1f} MB"
