"""Random JSON schemas through the engine: how many replies validate, streamed, in a batch beside free rows.

python -m treadle.bench grammar [--model smollm2] [--schemas 200] [--rows 6] [--free 2] [--tokens 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.report import report
from treadle.bench.schemas import Schema, random_schema
from treadle.bench.values import positive
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.engine.sampling import Sampler
from treadle.grammar.compile import grammars_of
from treadle.models.load import ModelCard, load_model
from treadle.models.sources import resolve
from treadle.output.stream import Collected, TextStream, collect, events
from treadle.prompt.tokenise import encode
from treadle.types import Constraint, Finish, Language, Output, Request, Sampling

PROMPT = "Here is an example of such a record as JSON:\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one schema."""

    schema: Schema
    answer: Collected

    @property
    def finished(self) -> bool:
        return self.answer.finish is Finish.STOP


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench grammar", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rows", type=positive, default=6, help="rows with a grammar at a time")
    parser.add_argument("--free", type=int, default=2, help="rows without one beside them")
    parser.add_argument("--tokens", type=positive, default=400)
    args = parser.parse_args(argv)
    source = resolve(args.model)
    engine = Engine(lambda: load_model(source, None), Config(max_rows=args.rows + args.free, max_waiting=args.schemas))
    replies, free = asyncio.run(_with(engine, args.schemas, args.rows, args.free, args.tokens))
    finished = [reply for reply in replies if reply.finished]
    wrong = [reply for reply in finished if not validates(reply.answer.text, reply.schema)]
    for reply in [reply for reply in replies if not reply.finished] + wrong:
        said = "does not validate" if reply.finished else reply.answer.error or "not finished"
        print(f"{said}: {json.dumps(reply.schema)}\n{reply.answer.text}")
    row = {
        "schemas": len(replies),
        "finished": len(finished),
        "valid": len(finished) - len(wrong),
        "errors": sum(reply.answer.finish is Finish.ERROR for reply in replies),
        "tokens": sum(len(reply.answer.ids) for reply in replies),
        "free tokens": free,
        **_mask_times(engine.model, finished),
        "apply ms": _apply_ms(engine.model.caps.vocab_size, args.rows + args.free),
    }
    report("grammar", [row], model=engine.model.name, rows_with=args.rows, rows_without=args.free)


def validates(text: str, schema: Schema) -> bool:
    """Whether `text` is JSON that fits. Needs the package `jsonschema`, which only development installs."""
    from jsonschema import Draft202012Validator, FormatChecker

    formats = FormatChecker(["uuid", "ipv4"])
    formats.checks("date", ValueError)(_is_date)
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    return bool(Draft202012Validator(schema, format_checker=formats).is_valid(value))


def _is_date(value: Any) -> bool:
    """RFC 3339 has a year 0, which Python has not; it is a leap year."""
    return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))


async def _with(engine: Engine, schemas: int, rows: int, free: int, tokens: int) -> tuple[list[Reply], int]:
    engine.start()
    model = await engine.ready()
    stop = asyncio.Event()
    beside = [asyncio.create_task(_chatter(engine, model, f"free{i}", stop)) for i in range(free)]
    try:
        replies = await constrained_replies(engine, model, range(schemas), rows, tokens)
        stop.set()
        return replies, sum([await task for task in beside])
    finally:
        for task in beside:
            task.cancel()
        await engine.stop()


async def constrained_replies(engine: Engine, model: ModelCard, seeds: range, rows: int, tokens: int) -> list[Reply]:
    """One streamed reply for each random schema, `rows` of them at a time."""
    room = asyncio.Semaphore(rows)
    prompt = encode(model.tokenizer, PROMPT, add_special_tokens=True)
    checked = grammars_of(model.tokenizer, model.caps.vocab_size, model.stop_ids)

    async def reply(seed: int) -> Reply:
        schema = random_schema(seed)
        constraint = Constraint(Language.JSON_SCHEMA, json.dumps(schema))
        async with room:
            await asyncio.to_thread(checked.check, constraint)
            sampling = Sampling(temperature=0.8, seed=seed)
            request = Request(f"s{seed}", prompt, sampling, tokens, model.stop_ids, constraint=constraint)
            return Reply(schema, await _streamed(engine, model, request))

    return list(await asyncio.gather(*(reply(seed) for seed in seeds)))


async def _streamed(engine: Engine, model: ModelCard, request: Request) -> Collected:
    stream = engine.submit(request)
    outputs: AsyncIterator[Output] = aiter(stream)
    return await collect(events(outputs, TextStream(model.tokenizer), stream.abort))


async def _chatter(engine: Engine, model: ModelCard, id: str, stop: asyncio.Event) -> int:
    """Free replies, one after another, until `stop`; how many tokens they had."""
    made = 0
    prompt = encode(model.tokenizer, "Once upon a time", add_special_tokens=True)
    for turn in range(10**6):
        if stop.is_set():
            break
        request = Request(f"{id}-{turn}", prompt, Sampling(seed=turn), 64, model.stop_ids)
        made += len((await _streamed(engine, model, request)).ids)
    return made


def _mask_times(model: ModelCard, replies: list[Reply]) -> dict[str, Any]:
    """Milliseconds to make the mask of a token on the host, over all tokens of the replies."""
    grammars = grammars_of(model.tokenizer, model.caps.vocab_size, model.stop_ids)
    times: list[float] = []
    for reply in replies:
        matcher = grammars.matcher(Constraint(Language.JSON_SCHEMA, json.dumps(reply.schema)), model.stop_ids)
        for token in reply.answer.ids:
            began = time.perf_counter()
            matcher.mask()
            matcher.accept(token)
            times.append(1000 * (time.perf_counter() - began))
    return {"mask ms": float(np.mean(times)), "mask p99 ms": float(np.quantile(times, 0.99))} if times else {}


def _apply_ms(vocab_size: int, rows: int, rounds: int = 50) -> float:
    """Milliseconds that a mask adds to the greedy draw of so many rows on the device."""
    sampler = Sampler(vocab_size)
    for _ in range(rows):
        sampler.join(Sampling(temperature=0), np.zeros(1, np.int64), np.zeros(0, np.int64))
    logits = mx.random.normal((rows, vocab_size))
    mask = np.full((rows, -(-vocab_size // 32)), 0x55555555, np.uint32)
    times = []
    for given in (None, mask):
        for turn in range(rounds + 5):
            if turn == 5:  # the first ones warm up
                began = time.perf_counter()
            mx.eval(sampler.draw(logits, [turn] * rows, given).arrays())
        times.append(1000 * (time.perf_counter() - began) / rounds)
    return times[1] - times[0]
