"""What a model is, found by building its caches and by trying it: `describe(model, ...) -> Caps`. Engine thread only.

A model file is trusted with our layers only after the self-check: the same tokens through mlx-lm's own caches, through
ours in exact layout, and as rows of different length in one buffer. Some families are silently wrong when padded, some
address their cache by class; they get fewer abilities, with the sentence why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache.columns import Columns, SoloColumns
from treadle.cache.geometry import SLACK, STEP
from treadle.cache.layers import Layers, Rows, Stack, State
from treadle.cache.packed_rows import PackedRows
from treadle.cache.recent_columns import SoloRecent
from treadle.models.rounding import distance, within
from treadle.runtime import mlx_lm_module
from treadle.types import EXACT, Batching, Caps, Footprint, KvFormat, LayerKind

mlx_cache: Any = mlx_lm_module("models.cache")


def describe(model: Any, vocab_size: int, context_length: int) -> Caps:
    """Build `Caps`: run the self-check with a few tokens (some ten small forwards) and measure the footprint."""
    kinds = tuple(_kind(c) for c in mlx_cache.make_prompt_cache(model))
    windows = {c.max_size for c in _flat(mlx_cache.make_prompt_cache(model)) if type(c) is mlx_cache.RotatingKVCache}
    caps = Caps(
        vocab_size=vocab_size,
        context_length=context_length,
        layers=kinds,
        window=max(windows, default=None),
    )
    if LayerKind.FOREIGN in kinds:
        caps = replace(caps, why="a layer keeps a cache class of its own")
    elif mx.cuda.is_available():
        found = _checked(model, replace(caps, additive_masks=True))
        caps = found if found.batching is Batching.RAGGED else _checked(model, caps)
    else:
        caps = _checked(model, caps)
    return replace(caps, footprint=footprint_of(model, caps, EXACT))


def new_layers(model: Any, caps: Caps, kv: KvFormat | None = None) -> Layers:
    """Empty memory for one sequence. Layers that keep all tokens hold them as `kv` says (None: `caps.kv`)."""
    kv = caps.kv if kv is None else kv
    return _layers(model, caps, None if kv.exact else kv)


def packed_layers(model: Any, caps: Caps, kv: KvFormat) -> Layers:
    """As `new_layers`, in the layout of packed rows even where 16 bits leave nothing to pack: for trials."""
    return _layers(model, caps, kv)


def _layers(model: Any, caps: Caps, kv: KvFormat | None) -> Layers:
    template = mlx_cache.make_prompt_cache(model)
    if LayerKind.FOREIGN in caps.layers:
        return Layers(template, {}, foreign=template)
    columns: dict[int | None, Columns] = {}
    return Layers([_ours(c, columns, caps.additive_masks, kv) for c in template], columns)


def forward(model: Any, ids: list[list[int]], layers: Layers) -> Any:
    """One step over rows of token ids of any length (padded here); returns lazy logits [rows, n, vocab]."""
    counts = [len(row) for row in ids]
    width = max(counts)
    padded = np.zeros((len(ids), width), np.int32)
    for row, line in zip(padded, ids, strict=True):
        row[: len(line)] = line
    layers.begin(counts)
    logits = model(mx.array(padded), cache=layers.caches)
    layers.end()
    return logits


def _flat(caches: Any) -> list[Any]:
    return [child for c in caches for child in (c.caches if type(c) is mlx_cache.CacheList else [c])]


def _kind(cache: Any) -> LayerKind:
    if type(cache) is mlx_cache.CacheList:
        kinds = {_kind(child) for child in cache.caches}
        for kind in (LayerKind.FOREIGN, LayerKind.STATE, LayerKind.WINDOWED):
            if kind in kinds:
                return kind
        return LayerKind.ROWS
    table = {
        mlx_cache.KVCache: LayerKind.ROWS,
        mlx_cache.RotatingKVCache: LayerKind.WINDOWED,
        mlx_cache.ArraysCache: LayerKind.STATE,
    }
    return table.get(type(cache), LayerKind.FOREIGN)


def _ours(cache: Any, columns: dict[int | None, Columns], additive: bool, kv: KvFormat | None) -> Any:
    if type(cache) is mlx_cache.CacheList:
        return Stack([_ours(child, columns, additive, kv) for child in cache.caches])
    if type(cache) is mlx_cache.ArraysCache:
        return State(len(cache.cache))
    window = cache.max_size if type(cache) is mlx_cache.RotatingKVCache else None
    if window is None and kv is not None:
        return PackedRows(columns.setdefault(None, SoloRecent(kv.recent)), kv, additive)
    return Rows(columns.setdefault(window, SoloColumns(window)), additive)


PROBE = 32  # tokens of each of the two chunks that measure activations


def footprint_of(model: Any, caps: Caps, kv: KvFormat) -> Footprint:
    """Bytes of rows and state by their shapes; of activations by the device's peak over two short chunks."""
    layers = new_layers(model, caps, kv)
    peaks = []
    for _ in range(2):
        mx.eval(layers.arrays())
        mx.reset_peak_memory()
        before = mx.get_active_memory() - layers.nbytes
        ids = mx.zeros((1, PROBE), mx.int32)
        layers.begin([PROBE])
        model(ids, cache=layers.caches)
        layers.end()
        mx.eval(layers.arrays())
        peaks.append(max(0, mx.get_peak_memory() - before - layers.nbytes))
    sizes = layers.row_bytes() if not layers.foreign else {None: layers.nbytes // STEP}
    return Footprint(
        row_bytes=sizes.pop(None, 0),
        windows=tuple((2 * (window + SLACK), size) for window, size in sizes.items() if window is not None),
        state_bytes=sum(a.nbytes for s in layers.states for a in s.arrays()),
        step_bytes=peaks[0] // PROBE,
        score_bytes=max(0, peaks[1] - peaks[0]) // PROBE**2,
    )


@dataclass(frozen=True)
class _Trial:
    """Logits of a fixed set of short prompts, each followed by two more tokens: [prompt][3 x vocab]."""

    prompts: list[list[int]]
    tails: list[list[int]]


def _trial(caps: Caps) -> _Trial:
    rng = np.random.default_rng(7)
    sizes = (9, 4)
    draw = rng.integers(0, caps.vocab_size, (len(sizes), max(sizes) + 2)).tolist()
    return _Trial([row[:n] for row, n in zip(draw, sizes, strict=True)], [row[-2:] for row in draw])


def _checked(model: Any, caps: Caps) -> Caps:
    trial = _trial(caps)
    reference = [_reference(model, p, t) for p, t in zip(trial.prompts, trial.tails, strict=True)]
    own = _attempt(lambda: _solo(model, caps, trial))
    if (fault := fault_of(model, reference, own)) is not None:
        foreign = tuple(LayerKind.FOREIGN for _ in caps.layers)
        return replace(caps, layers=foreign, why=f"our layers differ from the model file's own caches: {fault}")
    fault = fault_of(model, reference, _attempt(lambda: _decoded(model, caps, trial)))
    if fault is not None:
        return replace(caps, batching=Batching.NEVER, why=f"rows decoded together differ from rows alone: {fault}")
    fault = fault_of(model, reference, _attempt(lambda: _ragged(model, caps, trial)))
    if fault is not None:
        return replace(caps, batching=Batching.DECODE, why=f"padded prefill differs from rows alone: {fault}")
    return replace(caps, batching=Batching.RAGGED, why="rows of different length equal rows alone")


def _attempt(run: Callable[[], list[_Logits]]) -> list[_Logits] | str:
    """Run a trial of a third party's model code; whatever it raises is the finding, not a fault of ours."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _reference(model: Any, prompt: list[int], tail: list[int]) -> _Logits:
    """mlx-lm's own caches, the prompt in two chunks."""
    cache = mlx_cache.make_prompt_cache(model)
    model(mx.array([prompt[:3]]), cache=cache)
    logits = [model(mx.array([prompt[3:]]), cache=cache)[:, -1]]
    logits += [model(mx.array([[t]]), cache=cache)[:, -1] for t in tail]
    return evaluated(mx.concatenate(logits))


def _solo(model: Any, caps: Caps, trial: _Trial) -> list[_Logits]:
    found = []
    for prompt, tail in zip(trial.prompts, trial.tails, strict=True):
        layers = new_layers(model, caps)
        logits = [forward(model, [prompt], layers)[:, -1]]
        logits += [forward(model, [[t]], layers)[:, -1] for t in tail]
        found.append(evaluated(mx.concatenate(logits)))
    return found


def _decoded(model: Any, caps: Caps, trial: _Trial) -> list[_Logits]:
    """Each prompt alone, then joined; the last prompt token and the tail decode together."""
    layers = None
    for prompt in trial.prompts:
        solo = new_layers(model, caps)
        forward(model, [prompt[:-1]], solo)
        if layers is None:
            layers = solo
        else:
            layers.join(solo)
    assert layers is not None
    steps = zip(*[[p[-1], *t] for p, t in zip(trial.prompts, trial.tails, strict=True)], strict=True)
    logits = [forward(model, [[t] for t in step], layers)[:, -1] for step in steps]
    stacked = mx.stack(logits, axis=1)
    return [evaluated(stacked[row]) for row in range(len(trial.prompts))]


def _ragged(model: Any, caps: Caps, trial: _Trial) -> list[_Logits]:
    """Joined after one token, then the rest of the prompts as one padded step."""
    layers = None
    for prompt in trial.prompts:
        solo = new_layers(model, caps)
        forward(model, [prompt[:1]], solo)
        if layers is None:
            layers = solo
        else:
            layers.join(solo)
    assert layers is not None
    first = forward(model, [prompt[1:] for prompt in trial.prompts], layers)
    logits = [mx.stack([first[row, len(prompt) - 2] for row, prompt in enumerate(trial.prompts)])]
    for step in zip(*trial.tails, strict=True):
        logits.append(forward(model, [[t] for t in step], layers)[:, -1])
    stacked = mx.stack(logits, axis=1)
    return [evaluated(stacked[row]) for row in range(len(trial.prompts))]


@dataclass(frozen=True)
class _Logits:
    logits: NDArray[np.float32]  # [steps, vocab]
    dtype: Any  # that they were computed in


def evaluated(logits: Any) -> _Logits:
    """Logits [steps, vocab]."""
    return _Logits(np.array(logits.astype(mx.float32)), logits.dtype)


def fault_of(model: Any, reference: list[_Logits], found: list[_Logits] | str) -> str | None:
    """A sentence when logits of a model differ by more than rounding explains."""
    if isinstance(found, str):
        return found
    if not all(np.isfinite(one.logits).all() for one in found):
        return "logits are not finite"
    worst = float(np.max([distance(a.logits, b.logits) for a, b in zip(reference, found, strict=True)]))
    return None if within(worst, reference[0].dtype, model) else f"logits differ by {worst:.2g} of their spread"
