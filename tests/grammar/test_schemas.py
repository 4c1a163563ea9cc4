"""Whatever a schema of the supported keywords asks for, a finished reply is an instance of it."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest

from tests.fakes_engine import tokenizer
from tests.models.builtin import builtin
from treadle.bench.grammar import constrained_replies, validates
from treadle.bench.schemas import random_schema
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.grammar.compile import grammars_of
from treadle.models.load import load_model
from treadle.output.detokenise import Detokeniser
from treadle.types import Constraint, Finish, Language, Request, Sampling

END = frozenset({0})
MOST_TOKENS = 2000


def random_reply(schema: object, seed: int) -> str:
    """A text of tokens drawn evenly from what the masks allow."""
    draw = random.Random(seed)
    constraint = Constraint(Language.JSON_SCHEMA, json.dumps(schema))
    matcher = grammars_of(tokenizer(), len(tokenizer()), END).matcher(constraint, END)
    detokeniser = Detokeniser(tokenizer())
    text = ""
    for _ in range(MOST_TOKENS):
        bits = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
        assert not matcher.fault and bits
        token = draw.choice(bits)
        if token in END:
            break
        text += detokeniser.push((token,))
        matcher.accept(token)
        if matcher.finished:
            break
    else:
        raise AssertionError("the reply never ended")
    return text + detokeniser.finish()


@pytest.mark.parametrize("seed", range(100))
def test_any_walk_through_the_masks_of_a_random_schema_gives_an_instance(seed: int) -> None:
    schema = random_schema(seed)
    text = random_reply(schema, seed)
    assert validates(text, schema), (schema, text)


def test_the_check_itself_would_notice_a_wrong_instance() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 3}}, "additionalProperties": False}
    assert validates('{"a": 3}', schema)
    assert not any(validates(text, schema) for text in ('{"a": 4}', '{"b": 1}', '{"a": 1', "[]"))


def test_the_built_in_models_streamed_replies_validate_in_a_batch_beside_a_free_row() -> None:
    source = builtin()

    async def free(engine: Engine) -> Finish | None:
        stream = engine.submit(Request("free", np.array([1, 2, 3]), Sampling(seed=1), 100))
        return [output async for output in stream][-1].finish

    async def main() -> None:
        engine = Engine(lambda: load_model(source, None), Config(max_rows=8))
        engine.start()
        model = await engine.ready()
        try:
            replies, finish = await asyncio.gather(
                constrained_replies(engine, model, range(16), rows=7, tokens=300), free(engine)
            )
        finally:
            await engine.stop()
        assert finish is Finish.LENGTH
        assert sum(reply.finished for reply in replies) >= 14
        for reply in replies:
            assert reply.answer.finish in (Finish.STOP, Finish.LENGTH), reply.answer.error
            assert not reply.finished or validates(reply.answer.text, reply.schema), (reply.schema, reply.answer.text)

    asyncio.run(main())
