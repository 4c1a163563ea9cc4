"""A scripted engine with the real one's interface: emits given tokens on the event loop, computes nothing.

With it go a tiny byte-level tokenizer and a model record, so that the HTTP side is tested without MLX.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.config import Config
from treadle.engine.slot import Facts
from treadle.errors import ModelNotFound, NotReady, TreadleError
from treadle.metrics.recorder import Recorder
from treadle.types import (
    Batching,
    CacheReport,
    Caps,
    Drafting,
    Finish,
    LayerKind,
    Output,
    Request,
    Skimming,
    TokenLogprob,
    Usage,
)

SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "t"))
TEMPLATE = (
    "{% if shout %}<|system|>SHOUT{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, a few merges, four special tokens. Made here, nothing downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in MERGES)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    made.chat_template = chat_template
    return made


@dataclass(frozen=True)
class FakeModel:
    """The fields of a loaded model that the HTTP side reads."""

    name: str = "fake"
    source: str = "tests/fake"
    revision: str = "0123456789abcdef"
    tokenizer: Any = field(default_factory=tokenizer)
    caps: Caps = field(
        default_factory=lambda: Caps(
            vocab_size=len(tokenizer()),
            context_length=256,
            layers=(LayerKind.ROWS, LayerKind.WINDOWED, LayerKind.ROWS),
            window=64,
            batching=Batching.RAGGED,
            why="proved by nothing: this model is a fake",
        )
    )
    stop_ids: frozenset[int] = frozenset({0})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = TEMPLATE
    reader: Any = None


@dataclass(frozen=True)
class Script:
    """What happens to one request: waiting, then steps of tokens, then an end."""

    steps: tuple[tuple[int, ...], ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0
    finish: Finish = Finish.STOP
    error: str | None = None
    cached: int = 0


def say(text: str, *, per_step: int = 1, **rest: Any) -> Script:
    """A script that emits the tokens of `text`, so many per step."""
    ids = tokenizer().encode(text, add_special_tokens=False)
    return Script(steps=in_steps(ids, per_step), **rest)


class FakeStream:
    """The outputs of one scripted request, through a queue as in the engine."""

    def __init__(self, engine: FakeEngine, request: Request, script: Script) -> None:
        self.id = request.id
        self.phase = "queue"
        self._engine = engine
        self._request = request
        self._script = script
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._task = asyncio.create_task(self._play())
        if request.timeout_s is not None:
            asyncio.get_running_loop().call_later(request.timeout_s, engine.abort, self.id, "Too slow.")

    async def __aiter__(self) -> AsyncIterator[Output]:
        while True:
            output = await self._queue.get()
            yield output
            if output.finish is not None:
                return

    def abort(self, finish: Finish = Finish.ABORT) -> None:
        self._engine.abort(self.id, finish=finish)

    def cancel(self, error: str | None, finish: Finish) -> None:
        self._task.cancel()
        self._put(self._end(finish, 0)._replace(error=error))

    def _put(self, output: Output) -> None:
        self._engine.recorder.turn([output], 0.001)
        self._queue.put_nowait(output)

    async def _play(self) -> None:
        script = self._script
        await asyncio.sleep(script.queue_s)
        self.phase = "prefill"
        self._put(Output(self.id, prefilled=0))
        if self._request.prompt_logprobs:
            self._score()
        await asyncio.sleep(script.prefill_s)
        self.phase = "decode"
        made = 0
        for step in script.steps:
            if script.step_s:
                await asyncio.sleep(script.step_s)
            made += await self._emit(step, made)
            if self._full(made):
                break
        finish = Finish.LENGTH if self._full(made) else script.finish
        self._engine.streams.pop(self.id, None)
        self._put(self._end(finish, made))

    def _score(self) -> None:
        """The prompt's log probabilities in two parts, of which only the first one goes with progress."""
        scores = self._logprobs(self._request.prompt[1:].tolist())
        half = len(scores) // 2
        self._put(Output(self.id, prefilled=half, prompt_logprobs=scores[:half]))
        self._put(Output(self.id, prompt_logprobs=scores[half:]))

    async def _emit(self, step: tuple[int, ...], made: int) -> int:
        limit = self._request.max_tokens
        tokens = step if limit is None else step[: limit - made]
        self._put(Output(self.id, tokens=tokens, logprobs=self._logprobs(tokens)))
        return len(tokens)

    def _full(self, made: int) -> bool:
        return self._request.max_tokens is not None and made >= self._request.max_tokens

    def _logprobs(self, tokens: Iterable[int]) -> tuple[TokenLogprob, ...]:
        wanted = self._request.sampling.logprobs
        if wanted is None:
            return ()
        return tuple(TokenLogprob(t, -0.25, tuple((t + i, -0.25 - i) for i in range(wanted))) for t in tokens)

    def _end(self, finish: Finish, made: int) -> Output:
        prompt = len(self._request.prompt)
        usage = Usage(prompt, made, cached_tokens=min(self._script.cached, prompt))
        stop_id = 0 if finish is Finish.STOP else None
        return Output(self.id, finish=finish, stop_id=stop_id, usage=usage, error=self._script.error)


class FakeEngine:
    """`submit` starts the script that `plan` makes of a request. Everything it saw can be asked for.

    A `silent` one never answers questions about its cache.
    """

    def __init__(
        self, plan: Callable[[Request], Script] | Script | None = None, *, silent: bool = False, **model: Any
    ) -> None:
        self._plan = plan or say("hello")
        self._model = FakeModel(**model)
        self.state = "loading"
        self.failure: str | None = None
        self.refusal: TreadleError | None = None
        self.streams: dict[str, FakeStream] = {}
        self.requests: list[Request] = []
        self.aborted: dict[str, str] = {}  # id -> the phase it was aborted in
        self.report = CacheReport()
        self.recorder = Recorder()
        self._silent = silent

    @property
    def model(self) -> FakeModel:
        if self.state != "ready":
            raise NotReady("The model is still loading.")
        return self._model

    # As a list of one model, which is its own resident

    @property
    def slots(self) -> list[FakeEngine]:
        return [self]

    @property
    def resident(self) -> FakeEngine | None:
        return self if self.state == "ready" else None

    @property
    def facts(self) -> Facts:
        model = self._model
        return Facts(model.name, model.source, model.revision, model.caps, model.chat_template is not None)

    @property
    def name(self) -> str:
        return self._model.name

    aliases = (Config().model,)
    pinned = False
    num_bytes = 0
    drafting = Drafting(("lookup", "forced"))
    skimming: Skimming | None = None

    def find(self, name: str | None) -> FakeEngine:
        if name and name not in (self._model.name, self._model.source, *self.aliases):
            raise ModelNotFound(f"The model {name[:200]!r} is not served here.", param="model")
        return self

    @asynccontextmanager
    async def use(self) -> AsyncIterator[FakeEngine]:
        _ = self.model
        yield self

    async def load(self) -> None:
        _ = self.model

    async def unload(self) -> bool:
        return self.state == "ready"

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.state = "ready" if self.failure is None else "failed"

    def counts(self) -> tuple[int, int]:
        waiting = sum(stream.phase == "queue" for stream in self.streams.values())
        return len(self.streams) - waiting, waiting

    def submit(self, request: Request) -> FakeStream:
        if self.state != "ready":
            raise NotReady("The model is still loading.")
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        script = self._plan if isinstance(self._plan, Script) else self._plan(request)
        self.recorder.submitted(request, self._model.name)
        stream = self.streams[request.id] = FakeStream(self, request, script)
        return stream

    def abort(self, id: str, error: str | None = None, finish: Finish = Finish.ABORT) -> bool:
        stream = self.streams.pop(id, None)
        if stream is None:
            return False
        self.aborted[id] = stream.phase
        stream.cancel(error, finish)
        return True

    async def cache_report(self) -> CacheReport:
        await self._answering()
        return self.report

    async def cache_clear(self) -> int:
        await self._answering()
        freed, self.report = self.report.used_bytes, replace(self.report, entries=(), used_bytes=0)
        return freed

    async def _answering(self) -> None:
        if self.state != "ready":
            raise NotReady("The model is still loading.")
        if self._silent:
            await asyncio.Event().wait()

    async def stop(self) -> None:
        self.state = "stopped"
        for id in list(self.streams):
            self.abort(id)


def in_steps(ids: Sequence[int], per_step: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids[i : i + per_step]) for i in range(0, len(ids), per_step))
