"""mlx-lm's own loops over a model of mlx-lm's own, to compare with. Engine thread only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import mlx.core as mx

from treadle.runtime import mlx_lm_module
from treadle.types import Ids

# What loading one of our models exchanges in the file that both models come from, and where it was from.
EXCHANGED = {"scaled_dot_product_attention": "models.base", "swiglu": "models.activations"}


@contextmanager
def untouched(plain: Any) -> Iterator[None]:
    """While inside, the files of `plain` call mlx-lm's own functions, whatever was exchanged there for our models."""
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in plain.modules()}]
    own = {name: vars(mlx_lm_module(home))[name] for name, home in EXCHANGED.items()}
    changed = [(file, name, file[name]) for file in files for name in own if _ours(file.get(name), own[name])]
    for file, name, _ in changed:
        file[name] = own[name]
    try:
        yield
    finally:
        for file, name, exchanged in changed:
            file[name] = exchanged


def _ours(present: Any, original: Any) -> bool:
    """Whether a function of a model's file took the place of `original`; some files have one of the same name."""
    if present is None or present is original:
        return False
    made_here = str(getattr(present, "__module__", "")).startswith("treadle.")
    return made_here or unwrap(present, stop=lambda f: f is original) is original


def stream(plain: Any, prompt: Ids, tokens: int) -> tuple[float, float]:
    """(prefill, decode) tokens per second of `mlx_lm.generate.generate_step`."""
    generate = mlx_lm_module("generate")
    with untouched(plain):
        began = time.perf_counter()
        times = []
        for _ in generate.generate_step(mx.array(prompt), plain, max_tokens=tokens):
            times.append(time.perf_counter() - began)
    return len(prompt) / times[0], (len(times) - 1) / (times[-1] - times[0])


def batch(plain: Any, prompts: Sequence[Ids], tokens: int, warm: int) -> float | None:
    """Tokens per second over all rows of `mlx_lm.generate.BatchGenerator`, after `warm` steps in which all decode.

    None where the installed version has none.
    """
    made = vars(mlx_lm_module("generate")).get("BatchGenerator")
    if made is None:
        return None
    rows = len(prompts)
    lengths = [tokens + warm + 1] * rows
    with untouched(plain):
        generator = made(plain, completion_batch_size=rows, prefill_batch_size=rows)
        try:
            generator.insert([prompt.tolist() for prompt in prompts], lengths)
            while 0 < (decoding := len(generator.next_generated())) < rows:
                pass
            if not decoding:
                raise RuntimeError("mlx_lm's batch ended before all of its rows decoded.")
            for _ in range(warm - 1):
                generator.next_generated()
            began, count = time.perf_counter(), 0
            for _ in range(tokens):
                count += len(generator.next_generated())
            return count / (time.perf_counter() - began)
        finally:
            generator.close()
