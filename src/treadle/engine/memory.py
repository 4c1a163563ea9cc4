"""How much memory a request needs, and whether it may start. Pure: bytes in, decisions out.

The estimate of a sequence is its rows (tokens x bytes per token, by whole steps of their buffers, windows capped), its
state, and once for the whole server the activations of one prefill chunk. Nothing is refused from a momentary reading
of the device: the ledger adds up what running sequences may still need, and only what could not even fit alone is
refused for good. A picture is encoded while no chunk is computed, so the larger of the two counts; encoded pictures
that are kept count as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from treadle.cache.geometry import round_up
from treadle.errors import MemoryRefused
from treadle.types import Footprint, KvFormat

FORESEEN = 2048  # generated tokens that an open-ended request is counted for at first
LEAST_CHUNK = 16


class Kept(Protocol):
    """Encoded pictures that are remembered, see `vision/encoder.py`."""

    nbytes: int

    @property
    def spare(self) -> int:
        """Bytes of those that may be forgotten now."""
        ...

    def forget(self, nbytes: int) -> None:
        """Free at least so many bytes of them, or all."""
        ...


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
        self.look_correction = 1.0  # the same of the image encoder
        self.pictures: Kept | None = None  # of a model that sees
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
        """Bytes of so many tokens in a format, in buffers that grow by steps; None: the model's."""
        footprint = self.footprint if kv is None else self.formats.get(str(kv), self.footprint)
        return footprint.rows(round_up(num_tokens))

    def need(self, num_prompt: int, room: int, kv: KvFormat | None = None, picture: int = 0) -> int:
        """Bytes for a request: its rows, and the smallest chunk over its whole prompt or its largest picture.

        `picture`: the embeddings of that one which is still to be encoded.
        """
        return self.rows(num_prompt + min(room, FORESEEN), kv) + self.activations(LEAST_CHUNK, num_prompt, picture)

    @property
    def most(self) -> int:
        """Bytes that there are beside the weights of all models."""
        return self.limit - sum(ledger.base for ledger in tuple(self.peers))

    def check(self, num_prompt: int, room: int, kv: KvFormat | None = None, picture: int = 0) -> None:
        """Raises MemoryRefused when the request cannot fit even alone."""
        need, most = self.need(num_prompt, room, kv, picture), self.most
        if need > most:
            looking = need - self.need(num_prompt, room, kv)
            image = f", {_gb(looking)} of it for its largest image (a smaller one needs less)" if looking else ""
            raise MemoryRefused(
                f"This request needs about {_gb(need)} of memory{image}, but the server may use {_gb(max(most, 0))} "
                f"beside the model ({_gb(self.limit)} in all)."
            )

    def fits(self, need: int) -> bool:
        """Whether a request may start beside the running ones. With none running it always may.

        Encoded pictures give way to one that may, so far as that is needed.
        """
        alone = not any(ledger.promised for ledger in self.peers)
        if not alone and need > self.free + sum(ledger.spare for ledger in self.peers):
            return False
        for ledger in self.peers:
            ledger.forget(need - self.free)
        return True

    def promise(self, id: str, need: int) -> None:
        self._promised[id] = need

    def grow(self, id: str, num_tokens: int, kv: KvFormat | None = None) -> None:
        """A sequence became longer than it was counted for. One that ended meanwhile stays released."""
        if id in self._promised:
            self._promised[id] = max(self._promised[id], self.rows(num_tokens, kv))

    @property
    def free(self) -> int:
        """Bytes that nobody was promised and no encoded picture takes; the prefix cache may have them."""
        return self.limit - sum(ledger.taken + ledger.kept for ledger in self.peers)

    @property
    def kept(self) -> int:
        """Bytes of encoded pictures."""
        return 0 if self.pictures is None else self.pictures.nbytes

    @property
    def spare(self) -> int:
        """Bytes of encoded pictures that may be forgotten."""
        return 0 if self.pictures is None else self.pictures.spare

    def forget(self, nbytes: int) -> None:
        """Free so many bytes of encoded pictures, as far as there are any."""
        if self.pictures is not None and nbytes > 0:
            self.pictures.forget(nbytes)

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

    def looked(self, num_rows: int, peak: int) -> None:
        """Encoding a picture of `num_rows` embeddings took `peak` bytes; the estimate follows, as for chunks."""
        estimate = self.footprint.look(num_rows)
        if estimate:
            self.look_correction = max(1.0, 0.95 * self.look_correction, peak / estimate)

    def activations(self, num_tokens: int, context: int, picture: int = 0) -> int:
        """Bytes that a chunk of `num_tokens` over `context` tokens takes while it is computed.

        Or, if that is more, what encoding a picture of so many embeddings takes before it.
        """
        looking = int(self.look_correction * self.footprint.look(picture))
        return max(looking, int(self.correction * self.footprint.chunk(num_tokens, context)))


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 10**8 or n == 0 else f"{n / 1e6:.1f} MB"
