"""What packed rows cost: bytes, error of keys and values, effect on the next tokens, time.

python -m treadle.bench quantise [--model smollm2] [--tokens 600] [--tail 100]

The model reads documentation of Python's standard library. Then the rows of all but the last `tail` tokens are
packed and unpacked, and the tail is computed over them and over the exact ones.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.report import report
from treadle.cache.layers import Layers
from treadle.cache.quantise import Packed, Scheme, pack, scheme_for
from treadle.models.capabilities import forward, new_layers
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.types import LayerKind

MODULES = ("json", "argparse", "textwrap", "collections", "pathlib", "string", "threading", "decimal", "random", "csv")
GROUP = 64
CHARACTERS = 8  # of English, more than any token has on average
# A name, and the (bits, rotated) of keys and of values.
FORMATS: tuple[tuple[str, tuple[int, bool], tuple[int, bool]], ...] = (
    ("8 plain", (8, False), (8, False)),
    ("8 rotated", (8, True), (8, True)),
    ("k 8, v 4 rotated", (8, False), (4, True)),
    ("k 4 rotated, v 8", (4, True), (8, False)),
    ("4 rotated", (4, True), (4, True)),
    ("4 plain", (4, False), (4, False)),
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench quantise", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--tail", type=int, default=100)
    args = parser.parse_args(argv)
    loaded = load_model(resolve(args.model, None), None)
    if LayerKind.FOREIGN in loaded.caps.layers:
        parser.error(f"{loaded.name} has layers without rows")
    text = documentation()[: args.tokens * CHARACTERS]
    ids = loaded.tokenizer.encode(text)[: args.tokens]
    subject = _subject(loaded.model, loaded.caps, ids, args.tail)
    formats = [_measure(subject, *form) for form in FORMATS]
    errors = {name: errors for (name, _, _), (_, errors) in zip(FORMATS, formats, strict=True)}
    shape = list(subject.layers.rows[0].keys.shape)
    facts = {"tokens": len(ids), "tail": args.tail, "group": GROUP, "rows_shape": shape, "errors_by_layer": errors}
    report("quantise", [row for row, _ in formats], model=loaded.name, **facts)


def documentation() -> str:
    """Documentation strings of the running Python's standard library, always in the same order."""
    return "\n\n".join(text for name in MODULES for text in _doc_strings(importlib.import_module(name)))


def _doc_strings(module: Any) -> Iterator[str]:
    members = [module, *(m for _, m in inspect.getmembers(module) if inspect.getmodule(m) is module)]
    for member in members:
        functions = [f for _, f in inspect.getmembers(member, inspect.isfunction)] if inspect.isclass(member) else []
        yield from (inspect.cleandoc(m.__doc__) for m in [member, *functions] if m.__doc__)


@dataclass(frozen=True)
class _Subject:
    model: Any
    layers: Layers  # exact rows of the head
    tail: list[int]
    exact: Any  # log probabilities [tail, vocab] over exact rows


def _subject(model: Any, caps: Any, ids: list[int], tail: int) -> _Subject:
    layers = new_layers(model, caps)
    mx.eval(forward(model, [ids[:-tail]], layers), layers.arrays())
    layers = layers.take(0)  # without spare columns
    mx.eval(layers.arrays())
    return _Subject(model, layers, ids[-tail:], _log_probabilities(model, layers.take(0), ids[-tail:]))


def _log_probabilities(model: Any, layers: Layers, tail: list[int]) -> Any:
    logits = forward(model, [tail], layers)[0].astype(mx.float32)
    found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(found)
    return found


def _measure(
    subject: _Subject, name: str, keys: tuple[int, bool], values: tuple[int, bool]
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A row of the table, and the relative errors of every layer."""
    layers = subject.layers.take(0)
    errors: dict[str, list[float]] = {"keys": [], "values": []}
    num_bytes = num_values = 0
    for exact, packed in zip(subject.layers.rows, layers.rows, strict=True):
        for part, form in (("keys", keys), ("values", values)):
            rows = getattr(exact, part)
            held = pack(rows, _scheme(*form, rows.shape[-1]))
            setattr(packed, part, restored := held.unpack())
            errors[part].append(round(_relative_error(rows, restored), 5))
            num_bytes, num_values = num_bytes + held.nbytes, num_values + rows.size
    row = {"rows": name, "of bf16": num_bytes / (2 * num_values)}
    row |= {f"{part} error": float(np.mean(found)) for part, found in errors.items()}
    row |= _effect(subject, _log_probabilities(subject.model, layers, subject.tail))
    return row | _times(subject.layers, keys), errors


def _scheme(bits: int, rotate: bool, dim: int) -> Scheme:
    found = scheme_for(bits, GROUP, dim)
    if found is None:
        raise ValueError(f"rows of head size {dim} cannot be quantised")
    return Scheme(bits, found.group_size, rotate)


def _relative_error(exact: Any, found: Any) -> float:
    """Root of the squared error's share of the squares."""
    a, b = exact.astype(mx.float32), found.astype(mx.float32)
    return float(mx.sqrt(mx.square(a - b).sum() / mx.square(a).sum()))


def _effect(subject: _Subject, found: Any) -> dict[str, float]:
    """KL divergence from the exact distribution, share of equal favourites, change of perplexity over the tail."""
    exact = subject.exact
    divergence = (mx.exp(exact) * (exact - found)).sum(-1)
    same = (exact.argmax(-1) == found.argmax(-1)).astype(mx.float32)
    following = mx.array(subject.tail[1:])[:, None]
    loss = [-mx.take_along_axis(p[:-1], following, axis=-1).mean() for p in (exact, found)]
    return {
        "KL": float(divergence.mean()),
        "worst KL": float(divergence.max()),
        "same argmax": float(same.mean()),
        "perplexity %": 100 * (float(mx.exp(loss[1] - loss[0])) - 1),
    }


def _times(layers: Layers, form: tuple[int, bool]) -> dict[str, float]:
    """Microseconds per token and layer (keys alone) to pack and to unpack, with rows of two types."""
    row = {}
    for dtype, name in ((mx.float32, "f32"), (mx.bfloat16, "bf16")):
        keys = [r.keys.astype(dtype) for r in layers.rows]
        schemes = [_scheme(*form, k.shape[-1]) for k in keys]
        held = [pack(k, s) for k, s in zip(keys, schemes, strict=True)]
        mx.eval(keys, [p.arrays() for p in held])
        scale = 1e6 / sum(k.shape[2] for k in keys)
        row[f"pack {name} us"] = scale * _best(partial(_packed, keys, schemes))
        row[f"unpack {name} us"] = scale * _best(partial(_unpacked, held))
    return row


def _packed(rows: list[Any], schemes: list[Scheme]) -> list[Any]:
    return [a for r, s in zip(rows, schemes, strict=True) for a in pack(r, s).arrays()]


def _unpacked(held: list[Packed]) -> list[Any]:
    return [p.unpack() for p in held]


def _best(work: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds to evaluate what `work` returns, best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        mx.eval(work())
        best = min(best, time.perf_counter() - began)
    return best
