"""What packed rows cost: bytes, error of keys and values, effect on the next tokens, time.

python -m treadle.bench quantise [--model smollm2] [--tokens 600] [--tail 100] [--chunk 100]

The model reads documentation of Python's standard library. The rows of all but the last `tail` tokens are packed and
unpacked; then the tail is computed in chunks, each chunk's rows being packed and unpacked before the next one, and
its distributions are compared with those over exact rows.
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
from treadle.bench.values import positive
from treadle.cache.layers import Layers
from treadle.cache.quantise import Packed, Scheme, pack, scheme_for
from treadle.models.capabilities import forward, new_layers
from treadle.models.load import LoadedModel, load_model
from treadle.models.sources import resolve
from treadle.types import LayerKind

MODULES = ("json", "argparse", "textwrap", "collections", "pathlib", "string", "threading", "decimal", "csv")
CHARACTERS = 8  # of English, more than a token has on average
GROUP = 64


@dataclass(frozen=True)
class _Form:
    """(bits, rotated) of keys and of values."""

    name: str
    keys: tuple[int, bool]
    values: tuple[int, bool]


FORMS = (
    _Form("8 plain", (8, False), (8, False)),
    _Form("8 rotated", (8, True), (8, True)),
    _Form("k8 v4r", (8, False), (4, True)),
    _Form("k4r v8", (4, True), (8, False)),
    _Form("4 rotated", (4, True), (4, True)),
    _Form("4 plain", (4, False), (4, False)),
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench quantise", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=positive, default=600)
    parser.add_argument("--tail", type=int, default=100)
    parser.add_argument("--chunk", type=int, default=100)
    args = parser.parse_args(argv)
    if not 2 <= args.tail < args.tokens:
        parser.error("the tail has at least two tokens and leaves at least one before it")
    loaded = load_model(resolve(args.model, None), None)
    if LayerKind.FOREIGN in loaded.caps.layers:
        parser.error(f"{loaded.name} has layers without rows")
    subject = _subject(loaded, args.tokens, args.tail, args.chunk)
    found = [_measure(subject, form) for form in FORMS]
    errors = {form.name: by_layer for form, (_, by_layer) in zip(FORMS, found, strict=True)}
    facts = {"tokens": args.tokens, "tail": args.tail, "chunk": args.chunk, "group": GROUP}
    report("quantise", [row for row, _ in found], model=loaded.name, **facts, errors_by_layer=errors)


def documentation() -> str:
    """Documentation strings of the running Python's standard library, always in the same order."""
    return "\n\n".join(text for name in MODULES for text in _doc_strings(importlib.import_module(name)))


def _doc_strings(module: Any) -> Iterator[str]:
    for member in [module, *(m for _, m in inspect.getmembers(module) if inspect.getmodule(m) is module)]:
        methods = inspect.getmembers(member, inspect.isfunction) if inspect.isclass(member) else []
        documented = [member, *(method for _, method in methods)]
        yield from (inspect.cleandoc(m.__doc__) for m in documented if isinstance(m.__doc__, str))


@dataclass(frozen=True)
class _Subject:
    model: Any
    layers: Layers  # exact rows of the head
    chunks: list[list[int]]  # the tail
    following: list[list[int]]  # the tokens after each of the tail's, the last one's excepted
    exact: list[Any]  # log probabilities [chunk, vocab] over exact rows


def _subject(loaded: LoadedModel, tokens: int, tail: int, chunk: int) -> _Subject:
    ids = loaded.tokenizer.encode(documentation()[: tokens * CHARACTERS])[:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the documentation has {len(ids)} tokens only")
    layers = new_layers(loaded.model, loaded.caps)
    mx.eval(forward(loaded.model, [ids[:-tail]], layers), layers.arrays())
    starts = range(tokens - tail, tokens, chunk)
    chunks = [ids[i : i + chunk] for i in starts]
    following = [ids[i + 1 : i + 1 + chunk] for i in starts]
    exact = list(_tail(loaded.model, layers.take(0), chunks, None))
    return _Subject(loaded.model, layers.take(0), chunks, following, exact)


def _tail(model: Any, layers: Layers, chunks: list[list[int]], form: _Form | None) -> Iterator[Any]:
    """Log probabilities [chunk, vocab] for each chunk; its rows are replaced by packed ones before the next."""
    for chunk in chunks:
        logits = forward(model, [chunk], layers)[0].astype(mx.float32)
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found, layers.arrays())
        if form is not None:
            _replace(layers, len(chunk), form)
        yield found


@dataclass(frozen=True)
class _Replaced:
    share: float  # bytes of bfloat16 rows
    errors: dict[str, list[float]]  # relative, of each layer's keys and values


def _replace(layers: Layers, num_tokens: int, form: _Form) -> _Replaced:
    """Put what packing leaves of the newest tokens' rows in their place."""
    num_bytes = num_values = 0
    errors: dict[str, list[float]] = {"keys": [], "values": []}
    for r in layers.rows:
        columns = slice(max(0, r.columns.index - num_tokens), r.columns.index)
        for part, buffer, how in (("keys", r.keys, form.keys), ("values", r.values, form.values)):
            rows = mx.contiguous(buffer[:, :, columns])
            held = pack(rows, _scheme(*how, rows.shape[-1]))
            buffer[:, :, columns] = restored = held.unpack()
            errors[part].append(round(_relative_error(rows, restored), 5))
            num_bytes, num_values = num_bytes + held.nbytes, num_values + rows.size
    mx.eval(layers.arrays())
    return _Replaced(num_bytes / (2 * num_values), errors)


def _measure(subject: _Subject, form: _Form) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A row of the table, and the relative errors of every layer."""
    layers = subject.layers.take(0)
    replaced = _replace(layers, layers.lengths[0], form)
    row: dict[str, Any] = {"rows": form.name, "of bf16": replaced.share}
    row |= {f"{part} error": float(np.mean(found)) for part, found in replaced.errors.items()}
    found = _tail(subject.model, layers, subject.chunks, form)
    row |= _effect(subject, found)
    return row | _times(subject.layers, form.keys), replaced.errors


def _scheme(bits: int, rotate: bool, dim: int) -> Scheme:
    found = scheme_for(bits, GROUP, dim)
    if found is None:
        raise SystemExit(f"rows of head size {dim} cannot be quantised")
    return Scheme(bits, found.group_size, rotate)


def _relative_error(exact: Any, found: Any) -> float:
    """Root of the squared error's share of the squares."""
    a, b = exact.astype(mx.float32), found.astype(mx.float32)
    return float(mx.sqrt(mx.square(a - b).sum() / mx.square(a).sum()))


def _effect(subject: _Subject, found: Iterator[Any]) -> dict[str, float]:
    """KL divergence from the exact distribution, share of equal favourites, change of perplexity over the tail."""
    divergence, same, loss = [], [], []
    for a, b, following in zip(subject.exact, found, subject.following, strict=True):
        divergence.append(np.array((mx.exp(a) * (a - b)).sum(-1)))
        same.append(np.array(a.argmax(-1) == b.argmax(-1)))
        told = mx.array(following, mx.int32)[:, None]
        loss.append(np.array(mx.take_along_axis((a - b)[: len(following)], told, axis=-1)[:, 0]))
    return {
        "KL": float(np.concatenate(divergence).mean()),
        "worst KL": float(np.concatenate(divergence).max()),
        "argmax": float(np.concatenate(same).mean()),
        "ppl %": 100 * float(np.expm1(np.concatenate(loss).mean())),
    }


def _times(layers: Layers, how: tuple[int, bool]) -> dict[str, float]:
    """Microseconds per token and layer (keys alone) to pack and to unpack, with rows of two types."""
    row = {}
    for dtype, name in ((mx.float32, "f32"), (mx.bfloat16, "bf16")):
        keys = [r.keys.astype(dtype) for r in layers.rows]
        schemes = [_scheme(*how, k.shape[-1]) for k in keys]
        held = [pack(k, s) for k, s in zip(keys, schemes, strict=True)]
        mx.eval(keys, [p.arrays() for p in held])
        scale = 1e6 / sum(k.shape[2] for k in keys)
        row[f"{name} pack"] = scale * _best(partial(_packed, keys, schemes))
        row[f"{name} unpack"] = scale * _best(partial(_unpacked, held))
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
