"""A memory-mapped reader for GGUF files: versions 2 and 3, one file or a split set. No MLX, no copies."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.errors import LoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ARCHITECTURE = "general.architecture"
MAX_DIMS = 4
SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type: `size` bytes hold `elements` consecutive values of a row."""

    name: str
    elements: int
    size: int


# The format's type numbers. Those that cannot be loaded are here so that an error can name them.
BLOCK_TYPES = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor. `raw` is a view of the file: `[rows, bytes per row]`."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in NumPy
    type: BlockType
    raw: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUF:
    """An opened file: metadata by key, tensors by name. The first of `paths` carries the metadata."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.require(ARCHITECTURE))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def require(self, key: str) -> Any:
        """The value of a metadata key.

        Raises:
            LoadError: the file lacks it.
        """
        if key not in self.metadata:
            raise LoadError(f"{self.paths[0].name} lacks the metadata {key!r}.")
        return self.metadata[key]

    def hyper(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture's own, such as `rope.freq_base`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str) -> int:
        """A positive number among the architecture's own keys, such as `block_count`.

        Raises:
            LoadError: missing, or not one positive number for all layers.
        """
        value = self.require(f"{self.architecture}.{key}")
        if not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.paths[0].name} has {self.architecture}.{key} = {value!r}, not a positive number.")
        return value

    def tensor(self, name: str) -> Tensor:
        """
        Raises:
            LoadError: the file has no such tensor.
        """
        if name not in self.tensors:
            raise LoadError(f"{self.paths[0].name} lacks the tensor {name}.")
        return self.tensors[name]


def read(path: Path) -> GGUF:
    """Open a GGUF file, or the whole set that a split file belongs to (any part may be named).

    Raises:
        LoadError: one sentence: missing part, not a GGUF file, truncated, damaged, or a version not known.
    """
    paths = split_paths(path)
    parts = [_read_part(part) for part in paths]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors.update(part.tensors)
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise LoadError(f"{path.name} is incomplete: {len(tensors)} of {expected} tensors are in its parts.")
    return GGUF(paths, parts[0].metadata, tensors)


def architecture_of(path: Path) -> str | None:
    """What `general.architecture` says, one of the first keys: large files need not be read for it.

    Raises:
        LoadError: as `read`, for as much as is read.
    """
    first = split_paths(path)[0]
    with _told(first):
        cursor = _Cursor(_mapped(first))
        _, num_keys = _header(cursor, first)
        for _ in range(num_keys):
            key, value = cursor.string(), _value(cursor, cursor.scalar("I"))
            if key == ARCHITECTURE:
                return str(value)
    return None


def split_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the set that `path` belongs to, in order; `(path,)` for a file that is not split.

    Raises:
        LoadError: a part is missing.
    """
    match = SPLIT_NAME.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    parts = tuple(path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    for part in parts:
        if not part.is_file():
            raise LoadError(f"{part.name}, a part of the split model, is missing in {path.parent}.")
    return parts


def _read_part(path: Path) -> GGUF:
    file = _mapped(path)
    cursor = _Cursor(file)
    with _told(path):
        num_tensors, num_keys = _header(cursor, path)
        metadata = _metadata(cursor, num_keys)
        heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise LoadError(f"{path.name} is damaged: its alignment is {alignment!r}.")
    start = -(-cursor.position // alignment) * alignment
    return GGUF((path,), metadata, {head.name: _tensor(file, start, head, path) for head in heads})


def _mapped(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, mode="r", dtype=np.uint8)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise LoadError(f"{path} cannot be read: {error}.") from error


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong inside, where a header is read, is a LoadError."""
    try:
        yield
    except (struct.error, IndexError) as error:
        raise LoadError(f"{path.name} is truncated: its header goes on beyond the end of the file.") from error
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise LoadError(f"{path.name} is damaged: {error}.") from error


def _header(cursor: _Cursor, path: Path) -> tuple[int, int]:
    """Number of tensors and of metadata keys."""
    if cursor.take(4) != MAGIC:
        raise LoadError(f"{path.name} is not a GGUF file.")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise LoadError(f"{path.name} is a {kind} GGUF file; versions 2 and 3 in little-endian order can be read.")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.check_count(num_tensors + num_keys)
    return num_tensors, num_keys


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = _value(cursor, cursor.scalar("I"))
    return metadata


def _value(cursor: _Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.string()
    if kind in SCALARS:
        return cursor.scalar(SCALARS[kind])
    if kind != ARRAY:
        raise ValueError(f"metadata of unknown type {kind}")
    kind, count = cursor.scalar("I"), cursor.scalar("Q")
    cursor.check_count(count)
    if kind == STRING:
        return cursor.strings(count)
    if kind not in SCALARS:
        raise ValueError(f"a metadata list of unknown type {kind}")
    return cursor.scalars(SCALARS[kind], count)


@dataclass(frozen=True, slots=True)
class _TensorHead:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _tensor_head(cursor: _Cursor) -> _TensorHead:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", num_dims)))
    return _TensorHead(name, shape, cursor.scalar("I"), cursor.scalar("Q"))


def _tensor(file: NDArray[np.uint8], start: int, head: _TensorHead, path: Path) -> Tensor:
    kind = BLOCK_TYPES.get(head.type)
    if kind is None:
        raise LoadError(f"Tensor {head.name} of {path.name} has the unknown type number {head.type}.")
    *leading, columns = head.shape
    if min(head.shape) < 1 or columns % kind.elements:
        raise LoadError(f"{path.name} is damaged: tensor {head.name} of type {kind.name} has shape {head.shape}.")
    rows, row_size = math.prod(leading), columns // kind.elements * kind.size
    begin = start + head.offset
    if begin + rows * row_size > file.size:
        raise LoadError(f"{path.name} is truncated: tensor {head.name} ends beyond the end of the file.")
    raw = file[begin : begin + rows * row_size].reshape(rows, row_size)
    return Tensor(head.name, head.shape, kind, raw)


_LENGTH_BYTES = 8  # before every string


class _Cursor:
    """Reads little-endian values from a mapped file, one after another."""

    def __init__(self, file: NDArray[np.uint8]) -> None:
        self._view = file.data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._view):
            raise IndexError(end)
        taken = bytes(self._view[self.position : end])
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        (value,) = self.scalars(code, 1)
        return value

    def scalars(self, code: str, count: int) -> list[Any]:
        layout = struct.Struct(f"<{count}{code}")
        return list(layout.unpack(self.take(layout.size)))

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def strings(self, count: int) -> list[str]:
        """As `string`, many times: vocabularies have hundreds of thousands."""
        view, begin, found = self._view, self.position, []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_of(view, begin)  # raises struct.error beyond the end
            begin += _LENGTH_BYTES
            end = begin + length
            if end > len(view):
                raise IndexError(end)
            found.append(str(view[begin:end], "utf-8"))
            begin = end
        self.position = begin
        return found

    def check_count(self, count: int) -> None:
        """Refuse a number of items that the file cannot hold, before a list of that length is built."""
        if count > len(self._view):
            raise ValueError(f"it announces {count} items")
