"""The form of a model's attention rows, tried before it is used: `with_kv(model, caps, kv, why) -> Caps`.

Packed rows go through masks and columns of their own, so a model file is trusted with them only after the same tokens
gave the same logits through rows that take that way unpacked. Engine thread only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache.layers import Layers
from treadle.cache.packed_rows import EXACT_BITS, PackedRows
from treadle.cache.recent_columns import BLOCK, SPARE
from treadle.models.capabilities import footprint_of, forward, new_layers, packed_layers
from treadle.models.packed_attention import install
from treadle.types import EXACT, Caps, KvFormat, LayerKind

PROMPT = 2 * BLOCK + 9  # tokens of the trial: the queries of one step have several edges
TAIL = 2
TOLERANCE = {True: 0.01, False: 0.08}  # share of the logits' spread, for float32 rows and others


def with_kv(model: Any, caps: Caps, kv: KvFormat, why: str) -> Caps:
    """`caps` with the format that the model can really have, the bits of each kind of layer, and its footprint."""
    fault = None if kv.exact else _fault(model, caps)
    if kv.exact or fault is not None:
        why = why if fault is None else f"exact, because {fault}"
        kinds = {kind.value: str(EXACT) for kind in dict.fromkeys(caps.layers)}
        return replace(caps, kv=EXACT, kv_why=why, kv_layers=kinds)
    install(model)
    caps = replace(caps, kv=kv, kv_why=why)
    return replace(caps, kv_layers=_bits(model, caps), footprint=_footprint(model, caps))


def _fault(model: Any, caps: Caps) -> str | None:
    """Why the model cannot have packed rows, as the end of a sentence; None when it can."""
    if LayerKind.FOREIGN in caps.layers:
        return "a layer keeps a cache class of its own"
    trial = packed_layers(model, caps, KvFormat(EXACT_BITS, EXACT_BITS, recent=1))
    if not any(isinstance(r, PackedRows) for r in trial.rows):
        return "no layer keeps all tokens"
    found = []
    for layers in (new_layers(model, caps, EXACT), trial):
        logits = _trial(model, caps, layers)
        if isinstance(logits, str):
            return logits
        found.append(logits)
    exact, packed = found
    worst = float(np.abs(exact - packed).max() / (exact.std() + 1e-9))
    float32 = all(r.keys.dtype == mx.float32 for r in layers.rows)
    limit = TOLERANCE[float32]
    return (
        None if worst <= limit else f"its attention goes wrong with packed rows (by {worst:.2g} of the logits' spread)"
    )


def _trial(model: Any, caps: Caps, layers: Layers) -> NDArray[np.float32] | str:
    """Logits after a prompt and some more tokens; or what a third party's model code raised, which is the finding."""
    ids = np.random.default_rng(7).integers(0, caps.vocab_size, PROMPT + TAIL).tolist()
    try:
        logits = [forward(model, [ids[:PROMPT]], layers)[:, -1]]
        logits += [forward(model, [[token]], layers)[:, -1] for token in ids[PROMPT:]]
        return np.array(mx.concatenate(logits).astype(mx.float32))
    except Exception as error:
        return f"its attention fails with packed rows ({type(error).__name__}: {error})"


def _bits(model: Any, caps: Caps) -> dict[str, str]:
    """By kind of layer; several where layers of a kind differ."""
    layers = new_layers(model, caps)
    mx.eval(forward(model, [[0]], layers))
    packed = {str(KvFormat(*r.effective_bits())) for r in layers.rows if isinstance(r, PackedRows)}
    found = {kind.value: str(EXACT) for kind in dict.fromkeys(caps.layers)}
    return found | {LayerKind.ROWS.value: ", ".join(sorted(packed))}


def _footprint(model: Any, caps: Caps) -> Any:
    """That of exact rows, with the bytes of packed tokens, and those that are kept exactly for a while."""
    exact, packed = footprint_of(model, caps, EXACT), footprint_of(model, caps, caps.kv)
    recent = (caps.kv.recent + SPARE + 3 * BLOCK, exact.row_bytes)
    return replace(exact, row_bytes=packed.row_bytes, windows=(*exact.windows, recent))
