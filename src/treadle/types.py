"""The vocabulary: what crosses between prompt, engine and output. No MLX, no HTTP, no strings of text.

A `Request` goes in, `Output`s come out; both hold token ids only. Everything here is immutable and may be
read from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Vector = NDArray[np.float32]


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end id, or the output stage matched a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # cancelled: disconnect, cancel route, shutdown, timeout
    ERROR = "error"  # a fault in this sequence only


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token of one sequence is drawn.

    Order: bias, repetition, presence and frequency penalties, temperature, top-k, top-p, min-p.
    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` and penalties of 1 / 0 / 0 are "off".
    Random numbers are a function of (`seed`, position) alone. Repetition counts prompt and output,
    presence and frequency count output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None  # number of alternatives reported per token; None: no logprobs at all

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Language(StrEnum):
    """How a `Constraint` says what may be generated."""

    JSON_OBJECT = "json_object"  # any JSON object; no source
    JSON_SCHEMA = "json_schema"  # source: a JSON schema as JSON text; properties come in its order
    REGEX = "regex"  # source: a regular expression that the whole reply matches
    CHOICE = "choice"  # source: a JSON list of strings, one of which is the reply
    LARK = "lark"  # source: a grammar in llguidance's dialect of Lark
    FREE = "free"  # anything; for the sake of `Constraint.reasoning`


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning at the start of a reply, in which everything is allowed. Markers count in whatever tokens they come."""

    closer: tuple[int, ...]  # what ends it, at least one id
    opener: tuple[int, ...] = ()  # what the reply must begin with to begin inside; (): it does so anyway
    budget: int | None = None  # most tokens between the two; then nothing but `closer` may come


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the reply must look like. Compared and hashed by value; compiled by `treadle.grammar`."""

    kind: Language
    source: str = ""
    reasoning: Reasoning | None = None  # what may come first


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded image as the encoder of one model takes it. Equal digests mean equal embeddings."""

    digest: bytes  # 32, of the decoded pixels and of the settings that prepared them
    inputs: Mapping[str, NDArray[Any]]  # by the names that the encoder has for them
    num_rows: int  # embeddings that the encoder makes of it
    grid: tuple[int, int] = (1, 1)  # rows and columns of these, where positions follow them (M-RoPE)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens [start, end) of a prompt that show a picture: those with the model's image id take its embeddings in turn.

    `whole`: they are computed in one step, because the model lets them attend to each other.
    """

    start: int
    end: int
    picture: Picture
    whole: bool = False


class Pooling(StrEnum):
    """Which of a text's final hidden states are its embedding."""

    MEAN = "mean"  # the mean of all
    LAST = "last"  # that of the last token


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine. Ids are already checked against the vocabulary (`Engine.submit` checks again)."""

    id: str
    prompt: Ids  # [num_tokens], at least one
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # None: until the model ends or the context is full
    stop_ids: frozenset[int] = frozenset()  # end ids; a hit is not part of the output
    timeout_s: float | None = None  # wall clock from submit; then Finish.ABORT
    cache_salt: str = ""  # requests with different salts never share computed rows
    boundaries: tuple[int, ...] = ()  # positions in `prompt` where a message starts, ascending; may be many
    constraint: Constraint | None = None
    speculation: bool = True  # whether drafts may be made for it; the text is the same either way
    prompt_logprobs: bool = False  # report the prompt's own too, as many alternatives as `sampling.logprobs`
    spans: tuple[Span, ...] = ()  # pictures in the prompt, ascending; its last token is in none
    kv: KvFormat | None = None  # how its rows are held; None: as the model's are, until memory is short
    pooling: Pooling | None = None  # what is asked for is the prompt's embedding, and no token
    sparse: bool | None = None  # whether a part of a long prompt may be left out; None: where that seems right
    keep: float | None = None  # then the share of its tokens that are computed; None: the server's

    @property
    def computes_all(self) -> bool:
        """Whether every token of the prompt has to be computed, whatever is known of it already."""
        return self.prompt_logprobs or self.pooling is not None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one emitted token and its likeliest alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """Whether a part of a prompt was left out, and why (one sentence). Times in seconds."""

    engaged: bool
    reason: str
    tokens: int  # of the prompt, without those that were cached exactly
    kept: int  # of these, what was computed
    score_s: float = 0.0  # what the small model took to tell which
    prefill_s: float = 0.0  # from then to the first token


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence and its times in seconds, known when it ends."""

    prompt_tokens: int
    completion_tokens: int  # a final end id counts
    cached_tokens: int = 0  # prompt tokens whose rows were really not computed
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    drafted_tokens: int = 0  # proposed by speculation
    accepted_tokens: int = 0  # of those, what the model itself would have drawn
    vision_s: float = 0.0  # of `prefill_s`, what the image encoder took
    sparse: SparsePrefill | None = None  # None: the server has no small model for that


class Output(NamedTuple):
    """What one step made for one sequence: zero or more tokens, and at the end `finish` with `usage`.

    A named tuple, because one is made for each row of each step, and a frozen dataclass sets its fields one by one.
    `tokens` never contains an end id. After an `Output` with `finish` nothing more comes for that id.
    An `Output` without tokens and without finish reports prefill progress.
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    prefilled: int | None = None  # prompt tokens in the layers so far, at first those from the cache; progress reports
    skimmed: int | None = None  # prompt tokens that the small model of sparse prefill has read; before any `prefilled`
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the next prompt tokens, when asked for; the first has none
    finish: Finish | None = None
    stop_id: int | None = None  # the end id that was hit
    usage: Usage | None = None
    error: str | None = None  # one sentence, with Finish.ERROR
    embedding: Vector | None = None  # of length 1, at the end, when asked for


class LayerKind(StrEnum):
    """How the memory of one layer may be cut."""

    ROWS = "rows"  # attention: one row per token, sliceable anywhere
    WINDOWED = "windowed"  # attention over the last `window` tokens
    STATE = "state"  # recurrent: only whole checkpoints
    FOREIGN = "foreign"  # a cache class of the model file's own: one sequence, no rewind, no reuse


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How attention layers that keep all tokens hold them while sequences run. 16 bits are exact rows.

    A query reads the `recent` tokens up to its own exactly, and whole blocks of older ones packed. What it reads of a
    token depends on the two positions alone, not on how the prompt was cut or what else runs.
    """

    key_bits: int = 16  # 16, 8 or 4
    value_bits: int = 16
    group_size: int = 64  # most values that share a scale; the largest that divides the head size is taken
    recent: int = 64  # at least 1

    @property
    def exact(self) -> bool:
        return self.key_bits == self.value_bits == 16

    def __str__(self) -> str:
        """As it is written in settings: 16, 8, 4 or 8/4 (keys/values)."""
        return str(self.key_bits) if self.key_bits == self.value_bits else f"{self.key_bits}/{self.value_bits}"


EXACT = KvFormat()


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculation is in force for a loaded model, for monitoring."""

    sources: tuple[str, ...] = ()  # lookup | draft | forced; none: no drafts are made
    draft_model: str | None = None
    why: str = ""  # a sentence on what is not in force


@dataclass(frozen=True, slots=True)
class Skimming:
    """What sparse prefill is in force for a loaded model, for monitoring."""

    model: str  # that says what of a prompt matters
    threshold: int  # tokens that are not cached, beyond which it is done
    keep: float  # share of them that is computed
    automatic: bool  # without being asked to
    why: str = ""  # a sentence on what stands against it


class Batching(StrEnum):
    """What the load-time self-check proved about several rows in one forward."""

    RAGGED = "ragged"  # slices of different length in one step are right
    DECODE = "decode"  # one token per row is right
    NEVER = "never"  # one sequence at a time


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one sequence of a model occupies, in bytes."""

    row_bytes: int = 0  # per token, in layers that keep all of them
    windows: tuple[tuple[int, int], ...] = ()  # (most tokens held, bytes per token) of windowed layers
    state_bytes: int = 0  # of recurrent layers, whatever the length
    step_bytes: int = 0  # activations per token of a prefill chunk
    score_bytes: int = 0  # and per token of the chunk times tokens before it, where attention is not fused
    look_bytes: int = 0  # activations of the image encoder per embedding of a picture
    look_score_bytes: int = 0  # and per embedding times embeddings

    def rows(self, num_tokens: int) -> int:
        """Bytes of a sequence of that length."""
        windowed = sum(min(num_tokens, most) * size for most, size in self.windows)
        return num_tokens * self.row_bytes + windowed + self.state_bytes

    def beside(self, other: Footprint) -> Footprint:
        """Of a sequence that two models know; they compute by turns."""
        return Footprint(
            self.row_bytes + other.row_bytes,
            self.windows + other.windows,
            self.state_bytes + other.state_bytes,
            max(self.step_bytes, other.step_bytes),
            max(self.score_bytes, other.score_bytes),
            max(self.look_bytes, other.look_bytes),
            max(self.look_score_bytes, other.look_score_bytes),
        )

    def chunk(self, num_tokens: int, context: int) -> int:
        """Bytes of the activations of one chunk that attends over `context` tokens."""
        return num_tokens * (self.step_bytes + context * self.score_bytes)

    def look(self, num_rows: int) -> int:
        """Bytes of the activations of the image encoder for a picture of `num_rows` embeddings, and of these."""
        return num_rows * (self.look_bytes + num_rows * self.look_score_bytes)


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model of a family that was made to see can do here."""

    family: str
    works: bool
    why: str  # the sentence behind it


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a model that was made to embed texts can do here."""

    pooling: Pooling | None  # None: it embeds nothing here
    why: str  # the sentence behind it
    size: int = 0  # numbers in an embedding
    least_size: int | None = None  # to which they may be cut; None: they may not
    sizes: tuple[int, ...] = ()  # to which alone they may be cut, if its makers name them
    context_length: int | None = None  # of its texts, in tokens, where that is less than the model's
    prefix: str = ""  # what its makers put before every text
    generates: bool = True  # whether it has an output layer, and so can write too


@dataclass(frozen=True, slots=True)
class Caps:
    """What a loaded model is, as data. Nobody probes with `hasattr`."""

    vocab_size: int
    context_length: int
    layers: tuple[LayerKind, ...]
    window: int | None = None
    batching: Batching = Batching.NEVER
    additive_masks: bool = False  # array masks are handed to attention as numbers, not as booleans
    footprint: Footprint = field(default_factory=Footprint)
    why: str = ""  # the sentence behind `batching`
    kv: KvFormat = EXACT  # how layers that keep all tokens hold them unless a request asks otherwise
    kv_why: str = ""  # the sentence behind it
    kv_layers: Mapping[str, str] = field(default_factory=dict)  # by kind of layer, the bits that it really has
    kv_fault: str | None = "that was not tried"  # why a request's rows cannot have another format; None: they can
    kv_footprints: Mapping[str, Footprint] = field(default_factory=dict)  # by format ("16", "8/4", ..), if they can
    kv_losses: Mapping[str, float] = field(default_factory=dict)  # measured, by format: per cent of perplexity
    vision: Vision | None = None  # None: a model for text alone
    embedding: Embedding | None = None  # None: a model that writes and was not made to embed


HIT_KINDS = ("exact", "prefix", "supersequence", "branch", "miss")


def _no_hits() -> Mapping[str, int]:
    return dict.fromkeys(HIT_KINDS, 0)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One stored prefix, for monitoring."""

    tokens: int
    bytes: int
    hits: int
    age_s: float  # since it was last used
    tier: str  # parked | live | memory | quantised | disk
    has_images: bool


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix cache at one moment, for monitoring. The default is that of a cache that is off."""

    enabled: bool = False
    budget_bytes: int = 0
    used_bytes: int = 0  # on the device; not what is on disk
    entries: tuple[CacheEntry, ...] = ()
    hits: Mapping[str, int] = field(default_factory=_no_hits)  # look-ups by kind, all of HIT_KINDS
    reused_tokens: int = 0  # prompt tokens that were really not computed, over all requests
    computed_tokens: int = 0  # prompt tokens that were
    evictions: Mapping[str, int] = field(default_factory=dict)  # by reason
    freed_bytes: Mapping[str, int] = field(default_factory=dict)  # by reason
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] | None = None  # None: no disk tier
    note: str = ""  # a sentence on what the cache cannot do for this model
