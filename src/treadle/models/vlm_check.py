"""Whether a model sees right with our layers and positions: a picture through mlx-vlm's own path and through ours.

Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.models.capabilities import new_layers
from treadle.models.rounding import distance, tolerance
from treadle.models.vlm import Seeing, own_cache
from treadle.types import Caps, Ids, Request, Span, Vision
from treadle.vision.positions import Positions
from treadle.vision.sight import Sight
from treadle.vision.spans import chunk_of

CHUNK = 7  # tokens: pictures are cut wherever they may be


class Looking:
    """A prompt on its way through `Sight`."""

    def __init__(self, sight: Sight, prompt: Ids, spans: Sequence[Span]) -> None:
        self.request = Request("check", prompt, spans=tuple(spans))
        self.tokens = prompt
        self.computed = self.looked = 0
        self.vision_s = 0.0
        self.positions: Positions | None
        self.positions, self.shift = sight.positions(prompt, spans)


class Peaks:
    """What encoding pictures took at most: (embeddings, bytes) of each; see `vision.encoder.Books`."""

    def __init__(self) -> None:
        self.pictures: Any = None
        self.found: list[tuple[int, int]] = []

    def looked(self, num_rows: int, peak: int) -> None:
        self.found.append((num_rows, peak))

    def footprint(self) -> tuple[int, int]:
        """Bytes per embedding, and per embedding times embeddings, through the first and the last of them."""
        (few, small), (many, large) = self.found[0], self.found[-1]
        pairs = max(0.0, (large / many - small / few) / (many - few)) if many > few else 0.0
        return max(0, math.ceil(large / many - pairs * many)), math.ceil(pairs)


def judged(
    model: Seeing, caps: Caps, family: str, prompt: Ids, spans: Sequence[Span], tail: Sequence[int], peaks: Peaks
) -> Vision:
    """Compare the logits behind `prompt`, which shows one picture, and behind each token of `tail`."""
    try:
        own = own_logits(model, prompt, model.inputs(spans[0].picture), tail)
        ours = our_logits(model, caps, prompt, spans, tail, peaks)
    except Exception as error:  # a third party's model code: whatever it raises is the finding
        return Vision(family, False, f"This model cannot see images here: {type(error).__name__}: {error}.")
    found, wanted = (np.array(logits.astype(mx.float32)) for logits in (ours, own))
    worst = distance(wanted, found)
    if not np.isfinite(found).all() or worst > tolerance(own.dtype):
        sentence = f"its logits differ from mlx-vlm's by {worst:.2g} of their spread"
        return Vision(family, False, f"This model cannot see images here: {sentence}.")
    return Vision(family, True, "Logits with an image equal those of mlx-vlm.")


def own_logits(model: Seeing, prompt: Ids, inputs: Mapping[str, Any], tail: Sequence[int]) -> Any:
    """[1 + tail, vocab]: mlx-vlm's embeddings, positions, caches and calls, as its own generation makes them."""
    whole = model.whole
    ids = mx.array(prompt.astype(np.int32))[None]
    features = whole.get_input_embeddings(ids, **inputs, mask=mx.ones_like(ids))
    given = {name: value for name, value in features.to_dict().items() if value is not None}
    cache = own_cache(whole)
    logits = [whole.language_model(ids, cache=cache, **given).logits[:, -1]]
    later = {"rope_deltas": features.rope_deltas} if features.rope_deltas is not None else {}
    for token in tail:
        logits.append(whole.language_model(mx.array([[token]]), cache=cache, **later).logits[:, -1])
    made = mx.concatenate(logits)
    mx.eval(made)
    return made


def our_logits(model: Seeing, caps: Caps, prompt: Ids, spans: Sequence[Span], tail: Sequence[int], peaks: Peaks) -> Any:
    """The same through our layers, in chunks, with explicit positions."""
    layers = new_layers(model, caps)
    sight = Sight(model, 2**40, peaks)
    look = Looking(sight, prompt, spans)
    shift: dict[str, Any] = {"shift": mx.array([look.shift], mx.int32)} if look.shift else {}
    logits: Any = None
    while look.computed < len(prompt):
        n = chunk_of(spans, look.computed, min(CHUNK, len(prompt) - look.computed))
        ids = mx.array(prompt[look.computed : look.computed + n].astype(np.int32))[None]
        layers.begin([n])
        logits = model(ids, layers.caches, **sight.given(look, n))[:, -1]
        layers.end()
        look.computed += n
    found = [logits]
    for token in tail:
        layers.begin([1])
        found.append(model(mx.array([[token]]), layers.caches, **shift)[:, -1])
        layers.end()
    made = mx.concatenate(found)
    mx.eval(made)
    return made
