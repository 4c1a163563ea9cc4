"""The engine without a server: the same loop and the same rules for a request, fed from the terminal."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from treadle import runtime
from treadle.cli.progress import bars, waiting
from treadle.config import Config
from treadle.errors import EngineFault, LoadError
from treadle.models.catalogue import read_catalogue

if TYPE_CHECKING:
    from treadle.api.fields import GenerationBody
    from treadle.api.ports import EnginePort, ModelPort, OneModelPort
    from treadle.api.prompts import Prompt
    from treadle.output.stream import Event

Show = Callable[[str], None]
Body = TypeVar("Body", bound="GenerationBody")


def _unseen(text: str) -> None:
    """What becomes of reasoning that nobody asked to see."""


class Session:
    """A ready engine and the event loop that runs while a reply is made."""

    def __init__(self, engine: OneModelPort, runner: asyncio.Runner) -> None:
        self._engine = engine
        self._runner = runner

    @property
    def model(self) -> ModelPort:
        return self._engine.model

    def chat(self, values: dict[str, Any], show: Show, thought: Show = _unseen) -> Event:
        """Reply to `values`, the fields of a chat request; `show` gets each piece of text as it comes.

        `thought` gets the pieces of a model's reasoning, which are not part of the reply.

        Returns the last event, with finish and usage. Fields that are None count as absent.

        Raises:
            KeyboardInterrupt: Ctrl-C; the sequence is aborted, the session can go on.
            TreadleError: a bad field, no chat template, a prompt over the context, a fault of the engine.
        """
        from treadle.api.fields import ChatBody
        from treadle.api.prompts import chat_prompts

        body = _parse(values, ChatBody)
        return self._runner.run(self._reply(body, lambda: chat_prompts(self.model, body), show, thought))

    def complete(self, values: dict[str, Any], show: Show) -> Event:
        """Continue a bare text; as `chat`, with the fields of a completion request."""
        from treadle.api.fields import CompletionBody
        from treadle.api.prompts import completion_prompts

        body = _parse(values, CompletionBody)
        return self._runner.run(self._reply(body, lambda: completion_prompts(self.model, body), show))

    async def _reply(
        self, body: GenerationBody, prompts: Callable[[], list[Prompt]], show: Show, thought: Show = _unseen
    ) -> Event:
        from treadle.api.sampling import sampling
        from treadle.output.reply import ReplyStream
        from treadle.output.stream import Kind, events
        from treadle.types import Finish, Request

        model, prompt = self.model, prompts()[0]
        request = Request(
            id=f"cli-{uuid.uuid4().hex}",
            prompt=prompt.ids,
            sampling=sampling(body, model.defaults, model.caps.vocab_size),
            max_tokens=body.limit,
            stop_ids=model.stop_ids,
            boundaries=prompt.boundaries,
            constraint=prompt.constraint,
            spans=prompt.spans,
        )
        stream = self._engine.submit(request)
        made = events(aiter(stream), ReplyStream(model.tokenizer, body.stop, prompt.form), stream.abort)
        try:
            async for event in made:
                if event.kind is Kind.TEXT:
                    show(event.text)
                elif event.kind is Kind.REASONING:
                    thought(event.text)
        finally:
            stream.abort()  # nothing when it has ended
        if event.finish is Finish.ERROR:
            raise EngineFault(event.error or "The engine failed on this prompt.")
        return event


def _parse(values: dict[str, Any], kind: type[Body]) -> Body:
    """The server's own checks, so that the terminal and HTTP accept the same."""
    import orjson

    from treadle.api.body import parse

    return parse(orjson.dumps(values), kind)


@contextmanager
def opened(config: Config) -> Iterator[Session]:
    """Download and load the model of `config`; the engine is stopped at the end. Raises LoadError, ConfigError."""
    runtime.prepare()
    from treadle.engine.engine import Engine
    from treadle.models.prepare import offer
    from treadle.models.recipe import Prepared

    model = offer(config, read_catalogue(config.models_file), bars).first
    prepared: Prepared = model.prepare()
    engine = Engine(replace(model, prepare=lambda: prepared), config)
    with asyncio.Runner() as runner:
        try:
            with waiting(f"Loading {model.name}"):
                runner.run(_started(engine))
            yield Session(engine, runner)
        finally:
            runner.run(engine.stop())


async def _started(engine: EnginePort) -> None:
    engine.start()
    await settled(engine)


async def settled(engine: EnginePort) -> None:
    """Return when the model is loaded. Polls, so that Ctrl-C ends it at once. Raises LoadError."""
    while engine.state == "loading":
        await asyncio.sleep(0.02)
    if engine.failure is not None:
        raise LoadError(engine.failure)
