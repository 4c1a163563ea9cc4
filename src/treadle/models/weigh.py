"""How much memory a model's weights will take, from its files alone. No MLX."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle import runtime
from treadle.errors import LoadError
from treadle.models import gguf
from treadle.models.folder_model import read_json
from treadle.models.gguf_blocks import PLAIN
from treadle.models.placement import FLOAT32_BYTES, hold_dense, widen
from treadle.models.sources import ResolvedSource

FLOATS = ("F32", "F16", "BF16")  # as safetensors calls them


def weight_bytes(source: ResolvedSource, backend: runtime.Backend, free_bytes: int) -> int:
    """An estimate; what is really taken is counted after the load. Raises LoadError for files that are damaged."""
    if source.kind == "gguf":
        opened = gguf.read(source.path)
        parameters, stored = opened.num_parameters, sum(path.stat().st_size for path in opened.paths)
        plain = [(math.prod(t.shape), t.raw.nbytes) for t in opened.tensors.values() if t.type.name in PLAIN]
    else:
        tensors = [info for path in sorted(source.path.glob("*.safetensors")) for info in _tensors(path)]
        parameters, stored = folder_parameters(source.path, dict(tensors)), sum(_size(info) for _, info in tensors)
        plain = [(math.prod(info["shape"]), _size(info)) for _, info in tensors if info.get("dtype") in FLOATS]
    if hold_dense("auto", backend, parameters, free_bytes):
        return parameters * FLOAT32_BYTES
    if widen("auto", backend, parameters, free_bytes):
        return stored + sum(number * FLOAT32_BYTES - size for number, size in plain)
    return stored


def folder_parameters(path: Path, tensors: Mapping[str, Any]) -> int:
    """Weights by number: packed ones are as many as their scales have groups of."""
    group = (read_json(path / "config.json").get("quantization") or {}).get("group_size", 64)
    count = 0
    for name, info in tensors.items():
        stem = name.rpartition(".")[0]
        if name.endswith(".scales"):
            count += math.prod(info["shape"]) * int(group)
        elif not name.endswith(".biases") and f"{stem}.scales" not in tensors:
            count += math.prod(info["shape"])
    return count


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names of a safetensors file with their dtype, shape and place."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error, MemoryError, OverflowError) as error:
        raise LoadError(f"{path} is damaged; download the model again.") from error
    if not isinstance(header, dict):
        raise LoadError(f"{path} is damaged; download the model again.")
    for name, info in header.items():
        if name != "__metadata__":
            if not _described(info):
                raise LoadError(f"{path} is damaged; download the model again.")
            yield name, info


def _described(info: Any) -> bool:
    """Whether a tensor says of itself what is counted here."""
    if not isinstance(info, dict):
        return False
    shape, place = info.get("shape"), info.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(place, list) or len(place) != 2:
        return False
    return all(isinstance(number, int) for number in (*shape, *place))


def _size(info: Mapping[str, Any]) -> int:
    start, end = info["data_offsets"]
    return int(end) - int(start)
