"""The form of a model's attention rows, tried before it is used: `with_kv(model, caps, kv, why) -> Caps`.

Packed rows go through masks and columns of their own, so a model file is trusted with them only after the same tokens
gave the same logits through rows that take that way unpacked. Engine thread only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache.formats import FORMATS, parse
from treadle.cache.layers import Layers
from treadle.cache.packed_rows import EXACT_BITS, LEAST_BITS, PackedRows
from treadle.cache.recent_columns import BLOCK, SPARE
from treadle.models.calibration import CalibrationFile
from treadle.models.capabilities import forward, new_layers, packed_layers
from treadle.models.packed_attention import install
from treadle.models.rounding import distance, within
from treadle.types import EXACT, Caps, Footprint, KvFormat, LayerKind

PROMPT = BLOCK + 9  # tokens of the trial: the queries of one step have several edges
TAIL = 2
LEAST = KvFormat(LEAST_BITS, LEAST_BITS)


def with_kv(model: Any, caps: Caps, kv: KvFormat, why: str, calibration: CalibrationFile | None = None) -> Caps:
    """`caps` with the format that the model can really have, the bits of each kind of layer, and its footprint.

    Packed rows are tried for exact ones too: a request may ask for them, and memory may run short. `calibration`
    keeps what came of it.
    """
    trial = partial(_fault, model, caps)
    fault = trial() if calibration is None else calibration.packing_fault(trial)
    layers = None if fault is not None else _begun(model, caps, LEAST if kv.exact else kv)
    if layers is not None and kv.exact and set(_bits(layers)) == {str(EXACT)}:
        fault = "no group of 32 values divides its heads"
    if fault is not None or layers is None:
        kinds = {kind.value: str(EXACT) for kind in dict.fromkeys(caps.layers)}
        why = why if kv.exact else f"exact, because {fault}"
        exact = replace(kv, key_bits=EXACT_BITS, value_bits=EXACT_BITS)
        return replace(caps, kv=exact, kv_why=why, kv_layers=kinds, kv_fault=fault)
    install(model)
    caps = replace(caps, kv=kv, kv_why=why, kv_fault=None, kv_footprints=_footprints(caps, layers, kv))
    kinds = {kind.value: str(EXACT) for kind in dict.fromkeys(caps.layers)}
    kinds |= {} if kv.exact else {LayerKind.ROWS.value: ", ".join(sorted(_bits(layers)))}
    return replace(caps, kv_layers=kinds, footprint=caps.kv_footprints[str(kv)])


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
    worst = distance(*found)
    if within(worst, trial.rows[0].keys.dtype, model):
        return None
    return f"its attention goes wrong with packed rows (by {worst:.2g} of the logits' spread)"


def _trial(model: Any, caps: Caps, layers: Layers) -> NDArray[np.float32] | str:
    """Logits after a prompt and some more tokens; or what a third party's model code raised, which is the finding."""
    ids = np.random.default_rng(7).integers(0, caps.vocab_size, PROMPT + TAIL).tolist()
    try:
        logits = [forward(model, [ids[:PROMPT]], layers)[:, -1]]
        logits += [forward(model, [[token]], layers)[:, -1] for token in ids[PROMPT:]]
        return np.array(mx.concatenate(logits).astype(mx.float32))
    except Exception as error:
        return f"its attention fails with packed rows ({type(error).__name__}: {error})"


def _begun(model: Any, caps: Caps, kv: KvFormat) -> Layers:
    """Layers of one token: their shapes are known."""
    layers = new_layers(model, caps, kv)
    mx.eval(forward(model, [[0]], layers))
    return layers


def _bits(layers: Layers) -> set[str]:
    """What layers that keep all tokens really have; several where they differ."""
    return {str(KvFormat(*r.effective_bits())) for r in layers.rows if isinstance(r, PackedRows)}


def _footprints(caps: Caps, layers: Layers, kv: KvFormat) -> dict[str, Footprint]:
    """By format: that of exact rows, with the bytes of packed tokens, and those that are kept exactly for a while."""
    exact = caps.kv_footprints.get(str(EXACT), caps.footprint)
    found = {}
    for form in (parse(name, kv.group_size, kv.recent) for name in FORMATS):
        first = BLOCK if LEAST_BITS in (form.key_bits, form.value_bits) else 0  # the block that 4 bits leave exact
        held = (first + form.recent + SPARE + 3 * BLOCK, exact.row_bytes)
        found[str(form)] = replace(exact, windows=(*exact.windows, held), row_bytes=_token_bytes(layers, form))
    return found | {str(EXACT): exact}


def _token_bytes(layers: Layers, kv: KvFormat) -> int:
    return sum(r.bytes_in(kv) for r in layers.rows if isinstance(r, PackedRows))
