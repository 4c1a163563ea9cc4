"""One request inside the engine. Engine thread only.

`tokens` is the prompt and what was accepted; only `commit` appends. `computed` of them have rows in the layers; the
rest are pending. A token that is still lazy on the device is `launched`, not committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.cache.segments import Holder
from treadle.grammar.matcher import Matcher
from treadle.sparse.select import Places, placed
from treadle.speculate.speculator import Speculator
from treadle.types import Finish, Ids, KvFormat, Request, SparsePrefill, TokenLogprob, Usage
from treadle.vision.positions import Positions
from treadle.vision.spans import key_ids, largest


class Stage(Enum):
    WAITING = "waiting"  # no layers yet
    PREFILL = "prefill"  # own layers, more than one token pending
    DECODE = "decode"  # a row of a group
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    room: int  # most tokens that may be generated
    arrived: float
    stage: Stage = Stage.WAITING
    layers: Layers | None = None  # its own, until it joins a group
    holder: Holder | None = None  # its place in the prefix cache
    matcher: Matcher | None = None  # where it stands in its grammar, while it decodes
    speculator: Speculator | None = None  # its drafts, while it decodes; None: none are made
    computed: int = 0
    launched: int = 0  # steps under way whose token is not read yet
    retried: bool = False  # computed once more after a fault in a shared step
    alone: bool = False  # must not share a step: it was in one that failed
    cached: int = 0
    kv: KvFormat | None = None  # how its rows are held; None: as its model's are
    preempted: bool = False  # its memory was taken once already
    positions: Positions | None = None  # of the prompt, where they are not the places in it; see `vision/positions.py`
    looked: int = 0  # pictures that were encoded for it ahead of the chunk that shows them
    shift: int = 0  # how far a token behind the prompt stands from its place
    original: Request | None = None  # the request before tokens of its prompt were left out
    places: Places | None = None  # where the tokens of the prompt stood in the original one, if some were left out
    sparse: SparsePrefill | None = None  # what became of leaving some out
    chosen: float | None = None  # when that was decided
    started: float | None = None
    first_token: float | None = None
    vision_s: float = 0.0
    pooled: Any = None  # float32 [size]: what was pooled of the states so far, if an embedding is asked for
    finish: Finish | None = None
    stop_id: int | None = None  # the end id that was drawn
    _buffer: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    _length: int = 0

    def __post_init__(self) -> None:
        self._length = len(self.request.prompt)
        self._buffer = np.array(self.request.prompt, np.int64)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens(self) -> Ids:
        """int64 [prompt + accepted], a view valid until the next commit."""
        return self._buffer[: self._length]

    @property
    def text(self) -> Ids:
        """As `tokens`, with those of the prompt that were left out."""
        if self.original is None:
            return self.tokens
        return np.concatenate([self.original.prompt, self.tokens[self.num_prompt :]])

    @property
    def keys(self) -> Ids:
        """int64 [prompt + accepted]: what the prefix cache knows the tokens by; pictures by their content.

        A token behind a gap is another one than without, and than at any other place.
        """
        return self._placed(key_ids(self.tokens, self.request.spans))

    def keys_with(self, token: int) -> Ids:
        """As `keys`, with one token more."""
        return self._placed(np.append(key_ids(self.tokens, self.request.spans), token))

    def _placed(self, keys: Ids) -> Ids:
        return keys if self.places is None else placed(keys, self.places, self.gap)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt that are computed."""
        return len(self.request.prompt)

    @property
    def gap(self) -> int:
        """Tokens of the prompt that were left out: those behind it stand so far behind their number."""
        return 0 if self.original is None else len(self.original.prompt) - self.num_prompt

    @property
    def reached(self) -> int:
        """The place of the next token without rows: how far the text was read."""
        if self.places is not None and self.computed < len(self.places):
            return int(self.places[self.computed])
        return self.computed + self.gap

    def leave_out(self, request: Request, places: Places) -> None:
        """Go on as `request`, whose prompt are the tokens at `places` of this one's. Nothing may have rows yet."""
        assert self.layers is None and self.num_generated == 0
        self.original, self.request, self.places = self.request, request, places
        self._buffer, self._length = np.array(request.prompt, np.int64), len(request.prompt)

    @property
    def num_generated(self) -> int:
        return self._length - self.num_prompt

    @property
    def pending(self) -> int:
        """Tokens that still have no rows, one of which a decode step always takes."""
        return self._length - self.computed

    @property
    def ahead(self) -> int:
        """Tokens that prefill computes: the last one is left to the first decode step, if there is to be one."""
        return self.pending - (self.request.pooling is None)

    @property
    def picture(self) -> int:
        """Embeddings of the largest picture that has tokens without rows, and so may have to be encoded; 0: none."""
        return largest(self.request.spans, self.computed)

    @property
    def wants_more(self) -> bool:
        """Whether a further step may be launched: the steps under way do not already fill the room."""
        return self.finish is None and self.num_generated + self.launched < self.room

    @property
    def fault(self) -> str:
        """A sentence when its grammar cannot be followed any further, else ""."""
        return "" if self.matcher is None else self.matcher.fault

    @property
    def ended(self) -> Finish | None:
        """How it ends with the tokens it has: its grammar lets nothing follow, or its room is full."""
        if self.matcher is not None and self.matcher.finished:
            return Finish.STOP
        return Finish.LENGTH if self.num_generated >= self.room else None

    def passes(self, tokens: list[int]) -> bool:
        """Whether none of these tokens, drawn one after the other, can end it, so that `commit` may take them all."""
        return (
            self.matcher is None
            and self.num_generated + len(tokens) < self.room
            and min(tokens, default=0) >= 0
            and self.request.stop_ids.isdisjoint(tokens)
        )

    def commit(self, tokens: list[int]) -> None:
        """Accept tokens; one at a time where there is a grammar, which may end behind any."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            more = max(256, end // 2, end - len(self._buffer))
            self._buffer = np.concatenate([self._buffer, np.empty(more, np.int64)])
        self._buffer[self._length : end] = tokens
        self._length = end
        if self.matcher is not None:
            (token,) = tokens
            self.matcher.accept(token)
            if self.matcher.free:
                self.matcher = None
        if self.speculator is not None:
            self.speculator.extend(tokens)

    def restart(self) -> None:
        """Forget what was computed, not what was accepted: all tokens are pending again."""
        self.layers = self.holder = self.matcher = self.pooled = None
        self.computed = self.launched = 0
        self.stage = Stage.WAITING

    def reckon(self) -> None:
        """What was cached exactly when parts were chosen, and is no more, counts as kept."""
        if self.sparse is not None and self.sparse.engaged:
            lost = max(0, self.num_prompt - self.sparse.kept - self.computed)
            self.sparse = replace(self.sparse, tokens=self.sparse.tokens + lost, kept=self.sparse.kept + lost)

    def stand(self, n: int) -> tuple[int, Any]:
        """Where the next `n` tokens stand: how far behind their numbers, or int32 [1, n] of them if that changes."""
        if self.places is None:
            return 0, None
        numbers = np.arange(self.computed, self.computed + n)
        known = self.places[self.computed : self.computed + n]
        places = np.concatenate([known, numbers[len(known) :] + self.gap])
        gaps = places - numbers
        if (gaps == gaps[0]).all():
            return int(gaps[0]), None
        return 0, mx.array(places.astype(np.int32))[None]

    def usage(self, now: float) -> Usage:
        started = self.started if self.started is not None else now
        first = self.first_token if self.first_token is not None else now
        sparse = self.sparse
        if sparse is not None and sparse.engaged and self.first_token is None:
            sparse = replace(sparse, kept=sparse.tokens - self.reached + self.computed)  # left out so far is no more
        chosen = self.chosen if self.chosen is not None else first
        return Usage(
            prompt_tokens=self.num_prompt + self.gap,
            completion_tokens=self.num_generated + (self.stop_id is not None),
            cached_tokens=self.cached,
            queue_s=started - self.arrived,
            prefill_s=first - started,
            decode_s=now - first,
            drafted_tokens=0 if self.speculator is None else self.speculator.drafted,
            accepted_tokens=0 if self.speculator is None else self.speculator.accepted,
            vision_s=self.vision_s,
            sparse=None if sparse is None else replace(sparse, prefill_s=first - chosen),
        )


class Found(NamedTuple):
    """What a step found for one sequence, line after line, before it is known whether the sequence goes on."""

    tokens: list[int]
    logprobs: list[TokenLogprob]  # empty: not asked
    gaps: list[float] | None  # how far each token was ahead of the next best; None: not asked
