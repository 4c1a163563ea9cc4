"""One file of the disk tier: the safetensors layout, written and checked without any tensor library. Pure.

    8 bytes: length of the header | header: JSON, padded with spaces | data of the tensors, one after the other

The header names the format, the key and a checksum of every tensor that also covers its name, dtype and shape. So a
file is sound exactly when the header built anew from its tensors equals the header that was read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

FORMAT = "treadle-prefix-1"
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 64  # of the data within the file
_MOST_HEADER_BYTES = 1 << 24

Data: TypeAlias = bytes | memoryview | NDArray[np.uint8]


class Damaged(Exception):
    """A file that is truncated, altered, of another format or of another key."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: the data may be an array
class Tensor:
    """A named array as raw little-endian bytes. The data must not change while the disk tier has it.

    Raises ValueError for a name that is not ASCII, an unknown dtype, an impossible shape, and data that is not
    contiguous or has the wrong number of bytes.
    """

    name: str
    dtype: str  # as safetensors calls it: a key of ITEM_BYTES
    shape: tuple[int, ...]
    data: Data

    def __post_init__(self) -> None:
        if not self.name.isascii():
            raise ValueError(f"The name of tensor {self.name!r} is not ASCII.")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"Tensor {self.name!r} has the unknown dtype {self.dtype!r}.")
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise ValueError(f"Tensor {self.name!r} has the impossible shape {self.shape}.")
        view = _view(self.data)
        if not view.c_contiguous:
            raise ValueError(f"The data of tensor {self.name!r} is not contiguous.")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if view.nbytes != expected:
            raise ValueError(f"Tensor {self.name!r} has {view.nbytes} bytes of data, its shape {expected}.")

    @property
    def nbytes(self) -> int:
        return _view(self.data).nbytes

    @property
    def raw(self) -> memoryview:
        """The data as one line of bytes, not copied."""
        view = _view(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")


def _view(data: Data) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def require_names(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError where tensors cannot share a file."""
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors) or _METADATA in names:
        raise ValueError(f"Tensors of one file need names of their own, none {_METADATA!r}.")


def encode(key: bytes, tensors: Sequence[Tensor]) -> list[memoryview]:
    """The file as pieces to be written one after the other; data is not copied, but read for its checksum."""
    header: dict[str, Any] = {
        _METADATA: {
            "format": FORMAT,
            "key": key.hex(),
            "crc32": ",".join(f"{_checksum(key, tensor):08x}" for tensor in tensors),
        }
    }
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
    text = orjson.dumps(header)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    start = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return [memoryview(start), *(tensor.raw for tensor in tensors)]


def decode(key: bytes, file: NDArray[np.uint8]) -> list[Tensor]:
    """The tensors of a file [bytes], as views of it. Raises Damaged unless it is as `encode` made it for `key`."""
    length = int.from_bytes(file[:_LENGTH_BYTES].tobytes(), "little")
    start = _LENGTH_BYTES + length
    if length > _MOST_HEADER_BYTES or start > len(file):
        raise Damaged("The file is shorter than its header says.")
    try:
        tensors = _tensors(orjson.loads(file[_LENGTH_BYTES:start].tobytes()), file[start:])
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a header of any other form
        raise Damaged(f"The header is not readable: {error}") from error
    expected = encode(key, tensors)
    if sum(map(len, expected)) != len(file):
        raise Damaged("The file does not end where its last tensor does.")
    if expected[0] != file[:start].data:
        raise Damaged("The format, the key or a checksum differs.")
    return tensors


def _tensors(header: dict[str, Any], data: NDArray[np.uint8]) -> list[Tensor]:
    del header[_METADATA]
    tensors = []
    for name, fields in header.items():
        begin, end = fields["data_offsets"]
        tensors.append(Tensor(name, fields["dtype"], tuple(fields["shape"]), data[begin:end]))
    return tensors


def _checksum(key: bytes, tensor: Tensor) -> int:
    about = f"{key.hex()} {tensor.name} {tensor.dtype} {list(tensor.shape)}"
    return zlib.crc32(tensor.raw, zlib.crc32(about.encode()))
