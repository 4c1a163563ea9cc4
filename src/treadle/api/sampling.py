"""From a request body to `Sampling`: the request first, then the model's defaults, then OpenAI's."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from treadle.api.fields import GenerationBody
from treadle.errors import BadRequest
from treadle.types import Sampling

NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SEED_BITS = 63


def sampling(body: GenerationBody, defaults: Mapping[str, Any], vocab_size: int) -> Sampling:
    """The sampling of choice 0. Raises BadRequest when `logit_bias` names an id beyond the vocabulary."""
    for token in body.logit_bias:
        if token >= vocab_size:
            raise BadRequest(
                f"logit_bias: token {token} is outside the vocabulary of {vocab_size} tokens.",
                param="logit_bias",
            )
    values: dict[str, Any] = {}
    for name in NAMES:
        value = getattr(body, name)
        value = defaults.get(name) if value is None else value
        if value is not None:
            values[name] = value
    values["top_k"] = max(0, values.get("top_k", 0))  # -1 is another common "off"
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
    return Sampling(
        **values,
        logit_bias=tuple(sorted(body.logit_bias.items())),
        seed=seed & (2**SEED_BITS - 1),
        logprobs=body.alternatives,
    )


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 keeps the request's seed; the others get seeds spread by the SplitMix64 finaliser."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) >> (64 - SEED_BITS)
