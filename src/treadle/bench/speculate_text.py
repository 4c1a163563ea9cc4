"""Drafts on real text: four kinds of prompt, short and long, by the loop as the server builds it. Engine thread only.

Source text and prose come from Python's own library, so that everybody has the same. Replies of other requests are not
looked up, or the second round would only repeat the first.
"""

from __future__ import annotations

import argparse as options
import collections
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from typing import Any

import numpy as np

from treadle.bench.drive import run
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.build import build_loop
from treadle.engine.loop import UNLIMITED, Loop
from treadle.engine.memory import Ledger
from treadle.models.load import LoadedModel
from treadle.prompt.template import render
from treadle.prompt.tokenise import encode
from treadle.types import Footprint, Ids, Request, Sampling

LENGTHS = {"short": 250, "long": 1500}  # tokens of a prompt, about
SHIFT = 61  # tokens that the material of one row begins behind that of the row before it
PROSE = textwrap.dedent("\n\n".join(str(x.__doc__) for x in (options, options.ArgumentParser, textwrap.TextWrapper)))
CODE = "\n\n".join(getsource(x) for x in (collections.Counter, textwrap.TextWrapper))
NAMES = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Niklaus", "Tony")


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt as a template around material that is cut to size."""

    kind: str
    before: str
    material: str
    after: str


TASKS = (
    Task("chat", "I am reading this manual:\n\n", PROSE, "\n\nForget it. How do rainbows form, and why the arc?"),
    Task("code edit", "```python\n", CODE, "\n```\nRename `self` to `this`. Reply with the code, else unchanged."),
    Task("json", "", "\n".join(
        f"{name} {i}, born {1900 + 7 * i % 100}, lives at {3 * i + 1} Mill Road" for i in range(60) for name in NAMES
    ), "\nWrite these as a JSON list of objects with the keys name, born and address."),
    Task("summary", "", PROSE, "\n\nSum this text up in a few sentences, with quotes from it."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replies:
    """Of all rows that decode together. `speed`: tokens per second from the first one to the last."""

    texts: tuple[tuple[int, ...], ...]  # their tokens
    speed: float
    steps: int  # of each row, added up
    drafted: int
    accepted: int


class Bench:
    """A model with one loop for each mode, which all share a prefix cache and what steps cost."""

    def __init__(self, loaded: LoadedModel, modes: Sequence[str], tokens: int, most_rows: int) -> None:
        store = Store(Settings(Budget(2**40), 2**62))
        self.loaded = loaded
        self.tokens = tokens
        self.loops = {mode: _loop(loaded, mode, store, most_rows) for mode in modes}

    def cases(self, lengths: Sequence[str], rows: int, rounds: int) -> Iterator[Mapping[str, Any]]:
        """One line for each length, kind and mode. Modes take turns; the first round only warms up.

        `rows` requests at once, with pieces of the same material that overlap.
        """
        for length in lengths:
            for task in TASKS:
                prompts = [self._prompt(task, LENGTHS[length], row * SHIFT) for row in range(rows)]
                runs = [{mode: self._replies(mode, prompts) for mode in self.loops} for _ in range(rounds + 1)]
                for mode in self.loops:
                    facts = {"prompt": task.kind, "length": f"{length} {len(prompts[0])}", "rows": rows, "mode": mode}
                    yield facts | _line([run["off"] for run in runs[1:]], [run[mode] for run in runs[1:]])

    def _prompt(self, task: Task, size: int, start: int) -> Ids:
        tokenizer = self.loaded.tokenizer
        ids = np.roll(encode(tokenizer, task.material, add_special_tokens=False), -start)[:size]
        material = tokenizer.decode(ids)
        content = task.before + material + task.after
        return encode(tokenizer, render(tokenizer, [{"role": "user", "content": content}]), add_special_tokens=False)

    def _replies(self, mode: str, prompts: Sequence[Ids]) -> Replies:
        asked = partial(Request, sampling=Sampling(0.0), max_tokens=self.tokens, stop_ids=self.loaded.stop_ids)
        requests = [asked(f"r{i}", prompt, cache_salt="bench") for i, prompt in enumerate(prompts)]
        loop = self.loops[mode]
        before = _totals(loop)
        lines = run(loop, requests).values()
        drafted, accepted = (b - a for a, b in zip(before, _totals(loop), strict=True))
        times = sorted(time for line in lines for time in line.times)
        speed = (len(times) - 1) / (times[-1] - times[0])
        texts = tuple(tuple(line.tokens) for line in lines)
        return Replies(texts, speed, sum(line.steps for line in lines), drafted, accepted)


def _line(off: Sequence[Replies], mine: Sequence[Replies]) -> dict[str, Any]:
    drafted, accepted = (sum(getattr(r, name) for r in mine) for name in ("drafted", "accepted"))
    tokens = sum(len(text) for r in mine for text in r.texts)
    return {
        "tokens": tokens // len(mine),
        "tok/s": float(np.median([r.speed for r in mine])),
        "ratio to off": float(np.median([b.speed / a.speed for a, b in zip(off, mine, strict=True)])),
        "tokens/row/step": tokens / sum(r.steps for r in mine),
        "drafted": drafted // len(mine),
        "accepted": accepted // len(mine),
        "rate": accepted / drafted if drafted else 0.0,
        "same text": all(a.texts == b.texts for a, b in zip(off, mine, strict=True)),
    }


def _loop(loaded: LoadedModel, mode: str, store: Store, most_rows: int) -> Loop:
    """`mode`: off, lookup, or draft, which is the model as its own draft."""
    config = Config.of(speculation=mode, max_rows=most_rows)
    if mode == "draft":
        loaded = replace(loaded, draft=loaded)
    return build_loop(loaded, config, Ledger(Footprint(), 0, UNLIMITED), store)


def _totals(loop: Loop) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    if loop.speculation is None:
        return 0, 0
    counters = loop.speculation.counters
    drafted, accepted = (sum(counts.values()) for counts in (counters.drafted, counters.accepted))
    return drafted, accepted
