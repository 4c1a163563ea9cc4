"""What a node of the prefix tree holds for the tokens of its edge. Engine thread only.

- `Live`: nothing of its own; the rows lie in the layers of a sequence that runs, or that ended and is parked.
- `Owned`: its own arrays, cut to size.
- `Packed`: its own arrays, quantised; unpacked when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from treadle.cache import quantise
from treadle.cache.layers import Layers
from treadle.cache.node import Node, Root
from treadle.cache.pieces import Piece, arrays_of, cut, is_packed, num_tokens, views
from treadle.cache.transfer import read_rows


@dataclass(slots=True, eq=False)
class Holder:
    """The layers in which one sequence's rows lie, as seen by the tree.

    `locate` gives them and the sequence's row there; it is exchanged when the sequence moves. `leaf` covers the last of
    the `known` published tokens and is pinned while the sequence runs.
    """

    root: Root
    locate: Callable[[], tuple[Layers, int]]
    leaf: Node | None = None
    known: int = 0
    parked: bool = False
    lost: bool = False  # its layers are gone or damaged: nothing may be read

    def park(self, layers: Layers) -> None:
        self.locate = lambda: (layers, 0)
        self.parked = True

    def lose(self) -> None:
        """Let go of the layers: nothing may be read any more."""
        self.lost, self.parked, self.locate = True, False, _gone

    @property
    def stale(self) -> bool:
        """Whether a running sequence may replace these rows by its own: lost, or parked without their end."""
        return self.lost or (self.parked and self.leaf is not None and not is_live(self.leaf.payload, self))

    def nodes(self) -> list[Node]:
        """The nodes on its path whose rows lie in its layers, from the root down."""
        return [] if self.leaf is None else [n for n in self.leaf.path() if is_live(n.payload, self)]


class Live:
    """Rows [start, end) of a holder. `nbytes` is the part of a parked holder's memory that counts for them."""

    tier = "live"

    def __init__(self, holder: Holder, start: int, end: int, nbytes: int = 0) -> None:
        self.holder = holder
        self.start = start
        self.end = end
        self.nbytes = nbytes

    def split(self, at: int) -> tuple[Live, Live]:
        middle = self.start + at
        share = self.nbytes * at // (self.end - self.start)
        return (
            Live(self.holder, self.start, middle, share),
            Live(self.holder, middle, self.end, self.nbytes - share),
        )

    def read(self, used: int) -> list[Any]:
        layers, row = self.holder.locate()
        return read_rows(layers, row, self.start, self.start + used)


class Owned:
    """Keys and values by turns, [1, heads, n, ..] each, cut to size; evaluated here. They are in the form in which the
    layers have them: exact, or packed where the layers are."""

    tier = "memory"

    def __init__(self, tensors: Sequence[Piece]) -> None:
        mx.eval([arrays_of(t) for t in tensors])
        self.tensors = list(tensors)
        self.nbytes = sum(t.nbytes for t in self.tensors)

    @property
    def exact(self) -> bool:
        return not any(map(is_packed, self.tensors))

    def split(self, at: int) -> tuple[Owned, Owned]:
        n = num_tokens(self.tensors[0]) if self.tensors else at
        head, tail = ([cut(t, a, b) for t in self.tensors] for a, b in ((0, at), (at, n)))
        return Owned(head), Owned(tail)

    def read(self, used: int) -> list[Piece]:
        return [views(t, 0, used) for t in self.tensors]


class Packed:
    """Exact rows that were quantised while they rest; tensors that cannot be quantised stay as they are."""

    tier = "quantised"

    def __init__(self, tensors: Iterable[Any], num_tokens: int) -> None:
        self.tensors = []
        for tensor in tensors:  # one after another: packing takes some times a tensor's own memory
            mx.eval(arrays_of(tensor))
            self.tensors.append(tensor)
        self.num_tokens = num_tokens
        self.nbytes = sum(t.nbytes for t in self.tensors)

    @classmethod
    def of(cls, owned: Owned, num_tokens: int, bits: int, group_size: int) -> Packed:
        return cls((_packed(t, bits, group_size) for t in owned.tensors), num_tokens)

    def split(self, at: int) -> tuple[Packed, Packed]:
        n = self.num_tokens
        head, tail = ([_slice(t, a, b) for t in self.tensors] for a, b in ((0, at), (at, n)))
        return Packed(head, at), Packed(tail, n - at)

    def read(self, used: int) -> list[Any]:
        return [_unpacked(_slice(t, 0, used)) for t in self.tensors]


def _gone() -> tuple[Layers, int]:
    raise LookupError("these layers were dropped")


Rows: TypeAlias = Live | Owned | Packed


def rows_of(node: Node) -> Rows:
    """What a node holds, typed."""
    assert isinstance(node.payload, Live | Owned | Packed)
    return node.payload


def is_live(payload: object, holder: Holder) -> bool:
    return isinstance(payload, Live) and payload.holder is holder


def _packed(tensor: Any, bits: int, group_size: int) -> Any:
    scheme = quantise.scheme_for(bits, group_size, tensor.shape[-1])
    return tensor if scheme is None else quantise.pack(tensor, scheme)


def _unpacked(tensor: Any) -> Any:
    return tensor.unpack() if isinstance(tensor, quantise.Packed) else tensor


def _slice(tensor: Any, start: int, end: int) -> Any:
    if isinstance(tensor, quantise.Packed):
        return tensor.slice(start, end)
    return mx.contiguous(tensor[:, :, start:end])
