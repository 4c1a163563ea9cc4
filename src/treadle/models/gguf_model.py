"""From an opened GGUF file to one of mlx-lm's models with its weights, and its config. Engine thread."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from treadle.errors import LoadError
from treadle.models.architectures import model_classes
from treadle.models.gguf import GGUF, Tensor
from treadle.models.gguf_names import ROPE_FACTORS, Config, Family, family_of, row_order, target_name
from treadle.models.gguf_tokenizer import end_ids
from treadle.models.gguf_types import Weight, check_types, convert, to_mlx
from treadle.runtime import Backend
from treadle.types import Embedding

log = logging.getLogger(__name__)

NORM = "norm.weight"


def build(gguf: GGUF, backend: Backend, *, dense: bool) -> tuple[Any, Config]:
    """The model, evaluated, and its config in Hugging Face style.

    `dense` expands every weight to floats. Floats are float32 on a CPU, elsewhere float16, or bfloat16 for a
    file whose matrices are.

    Raises:
        LoadError: an architecture, variant or type that is not supported, or weights that do not fit it.
    """
    import mlx.core as mx
    import mlx.nn as nn

    family = family_of(gguf)
    check_types(gguf.tensors)
    config: Config = {**family.config(gguf), "eos_token_id": end_ids(gguf)}
    model_class, args_class = model_classes(config)
    model = model_class(args_class.from_dict(config))
    weights, quantised = _weights(gguf, family, _float_type(gguf, backend), dense)
    weights = model.sanitize(weights)
    nn.quantize(model, class_predicate=lambda path, _: quantised.get(path, False))
    _fill(model, weights, gguf)
    mx.eval(model.parameters())
    if quantised:
        config["quantization"] = {"group_size": 32, "bits": 4, **quantised}
    return model, config


def _weights(gguf: GGUF, family: Family, dtype: Any, dense: bool) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """All arrays by mlx-lm's names, and how each packed module is quantised."""
    weights: dict[str, Any] = {}
    quantised: dict[str, dict[str, Any]] = {}
    became: Counter[str] = Counter()
    for tensor, weight in _converted(gguf, family, dense):
        target = target_name(family, tensor.name)
        parts = to_mlx(weight, dtype)
        if weight.quantization is None:
            weights[target] = parts["weight"]
        else:
            module = target.removesuffix(".weight")
            quantised[module] = weight.quantization
            weights.update({f"{module}.{part}": array for part, array in parts.items()})
        became[f"{tensor.type.name} {weight.became}"] += 1
    lines = ", ".join(f"{count} x {kind}" for kind, count in sorted(became.items()))
    log.info("GGUF %s: %s", gguf.paths[0].name, lines)
    return weights, quantised


def _fill(model: Any, weights: dict[str, Any], gguf: GGUF) -> None:
    model.eval()
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise LoadError(f"The weights in {gguf.paths[0].name} do not fit its architecture: {first}") from error


def _float_type(gguf: GGUF, backend: Backend) -> Any:
    import mlx.core as mx

    if backend == "cpu":
        return mx.float32
    kinds = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1}
    return mx.bfloat16 if kinds == {"BF16"} else mx.float16


def _converted(gguf: GGUF, family: Family, dense: bool) -> Iterator[tuple[Tensor, Weight]]:
    """Every tensor converted, in order; a few threads work ahead, so that little is held twice."""
    tensors = [tensor for name, tensor in gguf.tensors.items() if name != ROPE_FACTORS]
    workers = min(os.cpu_count() or 1, 8)
    ahead: deque[tuple[Tensor, Future[Weight]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="gguf") as pool:
        for tensor in tensors:
            rows = row_order(family, gguf, tensor)
            offset = family.norm_offset if tensor.name.endswith(NORM) else 0.0
            ahead.append((tensor, pool.submit(convert, tensor, rows, dense=dense, offset=offset)))
            if len(ahead) > 2 * workers:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()


def embedding_of(gguf: GGUF) -> Embedding | None:
    """None for a file of a model that writes. Those that embed cannot do so here: their ends of texts are not known."""
    if not gguf.hyper("pooling_type", 0):
        return None
    return Embedding(None, "embedding models work from folders only, not from GGUF files")
