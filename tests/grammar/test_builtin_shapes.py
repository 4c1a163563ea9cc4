"""The built-in model under the grammars of tools, formats and budgets, all in one batch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema

from tests.models.builtin import builtin
from treadle.api.body import generation
from treadle.api.fields import ChatBody
from treadle.api.prompts import Prompt, chat_prompts
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import LoadedModel, load_model
from treadle.output.reply import ReplyStream
from treadle.output.stream import Event, Kind, events
from treadle.prompt.tokenise import encode
from treadle.types import Constraint, Finish, Language, Reasoning, Request, Sampling

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}
BODIES: list[dict[str, Any]] = [
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "response_format": FORMAT},
    {"tools": TOOLS, "response_format": FORMAT},
    {"tools": TOOLS},
]


async def reply(engine: Engine, model: LoadedModel, id: str, prompt: Prompt, seed: int) -> list[Event]:
    sampling = Sampling(temperature=1.0, seed=seed)
    request = Request(id, prompt.ids, sampling, 48, model.stop_ids, constraint=prompt.constraint)
    stream = engine.submit(request)
    return [event async for event in events(aiter(stream), ReplyStream(model.tokenizer, (), prompt.form), stream.abort)]


def calls_in(made: list[Event]) -> list[str]:
    found: list[str] = []
    for event in made:
        if event.tool is not None and event.tool.name is not None:
            found.append("")
        if event.tool is not None:
            found[-1] += event.tool.arguments
    return found


def text_in(made: list[Event]) -> str:
    return "".join(event.text for event in made if event.kind is Kind.TEXT)


def test_every_reply_of_a_batch_has_its_shape() -> None:
    source = builtin()

    async def main() -> None:
        engine = Engine(lambda: load_model(source, None), Config(max_rows=9))
        engine.start()
        model = await engine.ready()
        try:
            bodies = [
                generation({"messages": [{"role": "user", "content": "Weather?"}], **body}, ChatBody) for body in BODIES
            ]
            prompts = [prompt for body in bodies for prompt in chat_prompts(model, body)]
            closer = tuple(int(i) for i in encode(model.tokenizer, "</think>", add_special_tokens=False))
            ids = encode(model.tokenizer, "<think>Let me see.", add_special_tokens=False)
            budgeted = Prompt(ids, constraint=Constraint(Language.FREE, reasoning=Reasoning(closer, budget=6)))
            jobs = [reply(engine, model, f"r{i}", prompt, i) for i, prompt in enumerate([*prompts, budgeted])]
            *made, thought = await asyncio.gather(*jobs)
        finally:
            await engine.stop()
        for i, heard in enumerate(made):
            check(i % len(BODIES), heard)
        ids_made = [id for event in thought for id in event.ids]
        assert tuple(ids_made[6 : 6 + len(closer)]) == closer and len(ids_made) > 6 + len(closer)

    asyncio.run(main())


def check(kind: int, made: list[Event]) -> None:
    calls, text, finish = calls_in(made), text_in(made), made[-1].finish
    assert finish in (Finish.STOP, Finish.LENGTH), made[-1].error
    whole = calls if finish is Finish.STOP else calls[:-1]
    for arguments in whole:
        jsonschema.validate(json.loads(arguments), CITY)
    if kind < 2:
        assert calls and (finish is Finish.LENGTH or not text.strip())
    elif kind == 2 and finish is Finish.STOP:
        assert calls or set(json.loads(text)) == {"ok"}
