"""What packed rows cost in quality: perplexity, needles, and the speed of decoding, for exact / 8 / 8 over 4 / 4 bits.

The model reads documentation strings of the running Python's standard library, or a text of the user's, in windows of
`context` tokens. A needle is a number told once in such a text; it is found when the model, asked for it at the end,
prefers each of its tokens. Every format reads what it would read in the server: packed tokens, and exact recent ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.needles import NAMES, needle_in
from treadle.bench.quantise import documentation
from treadle.cache.formats import Measured, parse
from treadle.cache.layers import Layers
from treadle.errors import TreadleError
from treadle.models.capabilities import forward, new_layers
from treadle.models.kv import with_kv
from treadle.models.load import LoadedModel
from treadle.models.quality import Quality
from treadle.types import EXACT, KvFormat

FORMATS = ("8", "8/4", "4")
CHUNK = 256  # tokens whose logits are made at once
STEPS = 24  # of decoding that are timed, for each format by turns
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.9)  # of the needles, as shares of the text
HAYSTACK = 1024  # tokens around a needle

Told = Callable[[str], object]


def measure(loaded: LoadedModel, text: str | None, tokens: int, context: int, told: Told) -> Quality:
    """Compare the formats on `tokens` tokens of `text` (None: documentation). `told` hears of progress.

    Raises TreadleError where the text is too short or the model cannot have packed rows.
    """
    context = min(context, loaded.caps.context_length - STEPS - 1)
    ids = loaded.tokenizer.encode(documentation() if text is None else text)[:tokens]
    if len(ids) < 2 * CHUNK:
        raise TreadleError(f"The text has {len(ids)} tokens; at least {2 * CHUNK} are needed.")
    caps = with_kv(loaded.model, loaded.caps, parse("8"), "")
    if caps.kv.exact:
        raise TreadleError(f"{loaded.name} has exact rows only: {caps.kv_why}.")
    loss, needles, layers = {}, {}, {}
    for kv in (EXACT, *map(parse, FORMATS)):
        loss[kv], layers[kv] = _loss(loaded, kv, ids, context)
        needles[kv] = _needles(loaded, kv, ids)
        told(f"{kv} bits: perplexity {np.exp(loss[kv]):.4f}, {needles[kv]:.0%} of the needles")
    length = layers[EXACT].lengths[0]
    speeds = _speeds(loaded.model, layers, ids)
    formats = {
        str(kv): Measured(float(100 * np.expm1(loss[kv] - loss[EXACT])), speeds[kv], length, needles[kv])
        for kv in map(parse, FORMATS)
    }
    when = datetime.now(UTC).date().isoformat()
    source = "documentation of the standard library" if text is None else "a text of the user's"
    return Quality(when, source, len(ids), float(np.exp(loss[EXACT])), formats)


def _loss(loaded: LoadedModel, kv: KvFormat, ids: Sequence[int], context: int) -> tuple[float, Layers]:
    """Mean negative log likelihood of each token but the first of each window, and the layers of a whole window."""
    found: list[Any] = []
    fullest: Layers | None = None
    for start in range(0, len(ids) - 1, context):
        window = list(ids[start : start + context])
        if len(window) < 2:
            break
        layers = new_layers(loaded.model, loaded.caps, kv)
        found += [_read(loaded.model, layers, window, i) for i in range(0, len(window) - 1, CHUNK)]
        fullest = fullest or layers
    assert fullest is not None
    return float(np.concatenate(found).mean()), fullest


def _read(model: Any, layers: Layers, window: list[int], start: int) -> Any:
    """Negative log likelihood of the tokens after those of one chunk, float32 [n]."""
    end = min(start + CHUNK, len(window) - 1)
    logits = forward(model, [window[start:end]], layers)[0].astype(mx.float32)
    told = mx.array(window[start + 1 : end + 1])[:, None]
    loss = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, told, axis=-1)[:, 0]
    mx.eval(loss, layers.arrays())
    return np.array(loss)


def _needles(loaded: LoadedModel, kv: KvFormat, ids: Sequence[int]) -> float:
    """The share of needles that are found."""
    found = 0
    for i, (depth, name) in enumerate(zip(DEPTHS, NAMES, strict=True)):
        prompt, answer = needle_in(np.array(ids[:HAYSTACK]), loaded.tokenizer, depth, name, i)
        found += _says(loaded.model, new_layers(loaded.model, loaded.caps, kv), prompt.tolist(), answer)
    return found / len(DEPTHS)


def _says(model: Any, layers: Layers, prompt: list[int], answer: list[int]) -> bool:
    """Whether the likeliest continuation of `prompt` is `answer`."""
    for start in range(0, len(prompt), CHUNK):
        logits = forward(model, [prompt[start : start + CHUNK]], layers)[0, -1]
        mx.eval(logits, layers.arrays())
    for token in answer:
        if int(logits.argmax()) != token:
            return False
        logits = forward(model, [[token]], layers)[0, -1]
    return True


def _speeds(model: Any, layers: dict[KvFormat, Layers], ids: Sequence[int]) -> dict[KvFormat, float]:
    """Speed of decoding by format, as a share of the exact rows'; timed by turns, medians."""
    times: dict[KvFormat, list[float]] = {kv: [] for kv in layers}
    for i in range(STEPS):
        for kv, held in layers.items():
            began = time.perf_counter()
            mx.eval(forward(model, [[ids[i]]], held), held.arrays())
            times[kv].append(time.perf_counter() - began)
    median = {kv: float(np.median(line[2:])) for kv, line in times.items()}
    return {kv: median[EXACT] / one for kv, one in median.items()}
