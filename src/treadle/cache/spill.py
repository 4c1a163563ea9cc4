"""Between the prefix tree and the disk tier. Engine thread only; files are written by the tier's own thread.

Rows travel in blocks of `BLOCK` tokens at fixed positions, so that an edge of the tree may be cut anywhere without a
file changing. Snapshots of recurrent and windowed layers are files of their own, found by trying the positions where a
prompt would have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.blocks import Blocks
from treadle.cache.disk import DiskTier
from treadle.cache.disk_format import Tensor
from treadle.cache.disk_keys import BLOCK, block_keys, state_key
from treadle.cache.node import Node, Root
from treadle.cache.pieces import Piece, cut, is_packed, joined
from treadle.cache.quantise import Packed, Scheme
from treadle.cache.segments import Live, Owned, rows_of
from treadle.cache.transfer import Snapshot
from treadle.cache.tree import Tree
from treadle.types import Ids

DTYPES: dict[str, Any] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U8": mx.uint8,
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
STATE = "state"


class Spill:
    """Saves paths of a tree block by block, and brings back what a query needs."""

    def __init__(self, tier: DiskTier, min_tokens: int) -> None:
        self.tier = tier
        self.min_tokens = max(min_tokens, 1)
        self.dirty = False  # whether a path may have something that is not saved
        self._saved = float("-inf")  # paths that were last used before this have nothing more to save

    def save_one(self, tree: Tree) -> bool:
        """Hand one missing file to the writer. Returns whether there was one; call it while idle."""
        if not self.dirty:
            return False
        self.dirty = False
        whole = True
        for node in tree.nodes():
            if node.last_used < self._saved or node.end < self.min_tokens or _covered(node):
                continue
            if any(isinstance(n.payload, Live) and not n.payload.holder.parked for n in node.path()):
                whole = False  # it runs: later
                continue
            if whole:
                self._saved = node.last_used
            if self._save(node):
                self.dirty = True
                return True
            whole = whole and not self.dirty
        return False

    def clear(self) -> None:
        """Remove every file; what the tree still holds is to be saved again."""
        self.tier.clear()
        self.dirty, self._saved = True, float("-inf")

    def _save(self, leaf: Node) -> bool:
        path = leaf.path()
        ids = np.concatenate([n.edge for n in path])
        root = _root_bytes(path[0])
        keys = block_keys(root, ids)
        for key in self.tier.missing(keys)[:1]:
            start = keys.index(key) * BLOCK
            tensors = _rows(path, start, start + BLOCK)
            if tensors:
                return self._put(key, _tensors(_named(tensors)))
        for node in path:
            for checkpoint in node.checkpoints:
                held = checkpoint.value
                key = state_key(root, keys, ids[: checkpoint.position], STATE)
                if isinstance(held, Snapshot) and self.tier.missing([key]):
                    start = checkpoint.position // BLOCK * BLOCK
                    return self._put(key, _packed(held, _rows(path, start, checkpoint.position)))
        return False

    def _put(self, key: bytes, tensors: Sequence[Tensor]) -> bool:
        """A file that the writer has no room for now is tried again later."""
        taken = self.tier.put(key, tensors)
        self.dirty = self.dirty or not taken
        return taken

    def load(self, tree: Tree, root: Root, ids: Ids, positions: Iterable[int] | None, rows_too: bool = True) -> None:
        """Bring back what the disk has of `ids` beyond the tree.

        `positions`: where snapshots may lie; None where rows are all there is. `rows_too`: the model has rows at all.
        """
        known = tree.peek(root, ids).length
        base = repr(root.key).encode()
        keys = block_keys(base, ids)
        first = known // BLOCK
        last = first + self.tier.longest(keys[first:]) if rows_too else len(keys)
        held, rest = None, None
        if positions is not None:
            within = {p for p in positions if known < p <= len(ids) and p // BLOCK <= last}
            held, rest = self._snapshot(base, keys, ids, sorted(within, reverse=True))
            if held is None:
                return
            last = held.position // BLOCK
        pieces = self._blocks(keys[first:last]) if rows_too else []
        if held is not None and rows_too and len(pieces) < last - first:
            return
        if rest:
            pieces.append(rest)
        rows = [joined(parts) for parts in zip(*pieces, strict=True)]
        end = held.position if held is not None else (first + len(pieces)) * BLOCK
        if end > known:
            offset = first * BLOCK
            leaf = tree.insert(root, ids[:end], lambda a, b: Owned([cut(t, a - offset, b - offset) for t in rows]))
            if held is not None:
                tree.add_checkpoint(leaf, held.position, held)

    def _blocks(self, keys: Sequence[bytes]) -> list[list[Piece]]:
        """The blocks up to the first that cannot be read."""
        found: list[list[Piece]] = []
        for key in keys:
            tensors = self.tier.get(key)
            if tensors is None:
                break
            found.append(_pieces({t.name: _array(t) for t in tensors}))
        return found

    def _snapshot(
        self, base: bytes, keys: Sequence[bytes], ids: Ids, positions: Sequence[int]
    ) -> tuple[Snapshot | None, list[Piece] | None]:
        """The first of `positions` that is stored, with the rows after its last full block."""
        for position in positions:
            key = state_key(base, keys, ids[:position], STATE)
            if self.tier.longest([key]) and (tensors := self.tier.get(key)) is not None:
                return _unpacked(tensors)
        return None, None


def _covered(node: Node) -> bool:
    """Whether what was used last on this path goes on below, so that saving that saves this."""
    return any(child.last_used >= node.last_used for child in node.children.values())


def _root_bytes(node: Node) -> bytes:
    assert isinstance(node.parent, Root)
    return repr(node.parent.key).encode()


def _rows(path: Sequence[Node], start: int, end: int) -> list[Piece]:
    """The rows [start, end) of a path: one piece per layer for keys, one for values, by turns."""
    parts = []
    for node in path:
        a, b = max(start, node.start), min(end, node.end)
        if a < b:
            read = rows_of(node).read(b - node.start)
            parts.append([cut(t, a - node.start, b - node.start) for t in read])
    return [joined(line) for line in zip(*parts, strict=True)]


def _named(pieces: Sequence[Piece], letters: str = "kv") -> dict[str, Any]:
    """Arrays by name: "k0" (keys of the first layer), "v0", ...; of a packed one "k0.<part>.<form>" for its arrays."""
    named: dict[str, Any] = {}
    for i, piece in enumerate(pieces):
        name = f"{letters[i % len(letters)]}{i // len(letters)}"
        if is_packed(piece):
            form = _form(piece)
            named |= {f"{name}.{j}.{form}": a for j, a in enumerate(piece.arrays())}
        else:
            named[name] = piece
    return named


def _form(piece: Packed | Blocks) -> str:
    """<number of arrays>.<bits>.<group>.<rotated>.<dtype>, and .<start>.<end> of blocks."""
    packed, span = (piece.rest, f".{piece.start}.{piece.end}") if isinstance(piece, Blocks) else (piece, "")
    scheme = packed.scheme
    count = len(piece.arrays())
    return f"{count}.{scheme.bits}.{scheme.group_size}.{scheme.rotate:d}.{TAGS[packed.dtype]}{span}"


def _pieces(named: Mapping[str, Any]) -> list[Piece]:
    """What `_named` named, in order."""
    found: dict[str, Piece] = {}
    parts: dict[str, list[Any]] = {}
    for full, array in named.items():
        name, *form = full.split(".")
        if not form:
            found[name] = array
            continue
        parts.setdefault(name, []).append(array)
        if len(parts[name]) == int(form[1]):
            found[name] = _formed(parts[name], form[2:])
    return list(found.values())


def _formed(arrays: Sequence[Any], form: Sequence[str]) -> Piece:
    """The piece of these arrays, by what `_form` says behind their number."""
    bits, group_size, rotate = (int(x) for x in form[:3])
    scheme, dtype = Scheme(bits, group_size, bool(rotate)), DTYPES[form[3]]
    if len(form) == 4:
        weights, scales, biases = arrays
        return Packed(weights, scales, biases, scheme, dtype)
    first, weights, scales, biases, *means = arrays
    start, end = (int(x) for x in form[4:])
    return Blocks(start, end, first, Packed(weights, scales, biases, scheme, dtype), means[0] if means else None)


def _tensors(named: Mapping[str, Any]) -> list[Tensor]:
    """Copies in the machine's memory, which the writer may keep."""
    mx.eval(list(named.values()))
    raw = {name: np.array(a.reshape(-1).view(mx.uint8)) for name, a in named.items()}
    return [Tensor(name, TAGS[a.dtype], tuple(a.shape), raw[name]) for name, a in named.items()]


def _array(tensor: Tensor) -> Any:
    return mx.array(np.frombuffer(tensor.raw, np.uint8)).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def _packed(held: Snapshot, rest: Sequence[Piece]) -> list[Tensor]:
    """A snapshot as named arrays: "at" (position, floor), "<s|w><layer>.<array>.<arrays>", and "r<i>.." for `rest`."""
    named: dict[str, Any] = {"at": mx.array([held.position, held.floor], mx.int32)}
    for letter, lines in (("s", held.states), ("w", held.windows)):
        for i, line in enumerate(lines):
            named |= {f"{letter}{i}.{j}.{len(line)}": a for j, a in enumerate(line) if a is not None}
    return _tensors(named | _named(rest, "r"))


def _unpacked(tensors: Sequence[Tensor]) -> tuple[Snapshot, list[Piece]]:
    lines: dict[str, dict[int, list[Any]]] = {"s": {}, "w": {}}
    rest: dict[str, Any] = {}
    position = floor = 0
    for tensor in tensors:
        if tensor.name == "at":
            position, floor = _array(tensor).tolist()
        elif tensor.name[0] == "r":
            rest[tensor.name] = _array(tensor)
        else:
            i, j, size = (int(x) for x in tensor.name[1:].split("."))
            lines[tensor.name[0]].setdefault(i, [None] * size)[j] = _array(tensor)
    states, windows = (tuple(tuple(lines[x][i]) for i in sorted(lines[x])) for x in "sw")
    return Snapshot(position, floor, states, windows), _pieces(rest)
