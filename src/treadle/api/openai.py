"""The routes that generate: chat completions and legacy completions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle.api.body import parse, read
from treadle.api.chat import ChatCollector, ChatWriter
from treadle.api.completions import CompletionCollector, CompletionWriter
from treadle.api.context import Context, context
from treadle.api.echo import ScoredEchoes
from treadle.api.exchange import Streamed, Whole
from treadle.api.fields import ChatBody, CompletionBody, GenerationBody
from treadle.api.grammar import check_constraint, constraint_of
from treadle.api.job import Choice, Job
from treadle.api.kv import format_of
from treadle.api.logprobs import ChatLogprobs, LegacyLogprobs
from treadle.api.ports import ModelPort, ResidentPort
from treadle.api.progress import PromptProgress
from treadle.api.prompts import Prompt, chat_prompts, completion_prompts
from treadle.api.reply import Head
from treadle.api.sampling import choice_seed, sampling
from treadle.api.schema import body_schema
from treadle.api.waiting import answer
from treadle.errors import BadRequest
from treadle.metrics.request_log import log_prompt
from treadle.output.pieces import pieces_of
from treadle.output.reply import ReplyStream
from treadle.output.stops import automaton
from treadle.output.stream import events
from treadle.types import Request, Sampling

router = APIRouter()
Body = TypeVar("Body", bound=GenerationBody)
Build = Callable[[ModelPort, Body], list[Prompt]]


@router.post("/chat/completions", include_in_schema=False)
@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
async def chat_completions(http: HttpRequest) -> Response:
    """One or more replies to a conversation."""
    here = context(http)
    body = parse(await read(http, here.max_body), ChatBody)
    return await answer(here, here.engine.find(body.model), body.stream, partial(chat_reply, here, body))


async def chat_reply(here: Context, body: ChatBody, resident: ResidentPort) -> Response:
    model = resident.model
    job, prompts = await start(here, resident, body, "chatcmpl-", chat_prompts)
    head = head_of(model, job)
    logprobs = None if body.alternatives is None else ChatLogprobs(model.tokenizer)
    if body.stream:
        writer = ChatWriter(head, body.n, body.stream_options.include_usage, logprobs, progress_of(body, prompts))
        return Streamed(job, writer, here.config.keepalive_s)
    return Whole(job, ChatCollector(head, body.n, logprobs))


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
async def completions(http: HttpRequest) -> Response:
    """Continuations of one or more texts or token lists."""
    here = context(http)
    body = parse(await read(http, here.max_body), CompletionBody)
    return await answer(here, here.engine.find(body.model), body.stream, partial(completion_reply, here, body))


async def completion_reply(here: Context, body: CompletionBody, resident: ResidentPort) -> Response:
    model = resident.model
    job, prompts = await start(here, resident, body, "cmpl-", completion_prompts)
    head = head_of(model, job)
    scored = ScoredEchoes(prompts, body.n) if body.scores_prompt else None
    echoes = ["" if scored else prompt.echo for prompt in prompts for _ in range(body.n)]
    logprobs = None if body.alternatives is None else LegacyLogprobs(model.tokenizer)
    if body.stream:
        include_usage = body.stream_options.include_usage
        writer = CompletionWriter(head, echoes, include_usage, logprobs, progress_of(body, prompts), scored)
        return Streamed(job, writer, here.config.keepalive_s)
    return Whole(job, CompletionCollector(head, echoes, logprobs, scored))


def progress_of(body: GenerationBody, prompts: Sequence[Prompt]) -> PromptProgress | None:
    if not body.return_progress:
        return None
    return PromptProgress([len(prompt.ids) for prompt in prompts for _ in range(body.n)])


def head_of(model: ModelPort, job: Job) -> Head:
    return Head(job.id, job.created, model.name, f"fp_{model.revision[:16]}")


async def start(
    here: Context, resident: ResidentPort, body: Body, prefix: str, build: Build[Body]
) -> tuple[Job, Sequence[Prompt]]:
    """Build the prompts and submit every choice. All errors known before generation are raised here."""
    model = resident.model
    refuse_to_write(model, chat=isinstance(body, ChatBody))
    most = here.config.max_rows + here.config.max_waiting
    if body.num_replies > most:
        raise BadRequest(f"n: {body.num_replies} replies are more than the {most} that may wait here.", param="n")
    drawn = sampling(body, model.defaults, model.caps.vocab_size)
    prompts = await asyncio.get_running_loop().run_in_executor(
        here.threads(body.shows_images), prepared, model, body, build
    )
    return submit(here, resident, body, f"{prefix}{uuid.uuid4().hex}", prompts, drawn), prompts


def refuse_to_write(model: ModelPort, *, chat: bool) -> None:
    """Raise BadRequest where an embedding model cannot make the reply that is asked for."""
    embedding = model.caps.embedding
    if embedding is None or (embedding.generates and not (chat and model.chat_template is None)):
        return
    lacks = "no chat template" if embedding.generates else "no output layer"
    raise BadRequest(
        f"{model.name} is an embedding model with {lacks}: ask it at /v1/embeddings.",
        param="model",
        code="unsupported_model",
    )


def prepared(model: ModelPort, body: Body, build: Build[Body]) -> list[Prompt]:
    """The prompts; before them, what others will find made: the tokenizer's tables, and the reply's grammar."""
    pieces_of(model.tokenizer)
    automaton(tuple(body.stop))
    check_constraint(model, constraint_of(body))
    return build(model, body)


def submit(
    here: Context, resident: ResidentPort, body: GenerationBody, id: str, prompts: Sequence[Prompt], drawn: Sampling
) -> Job:
    """`body.n` engine requests per prompt, in order, as one running job. If one is refused, none goes on."""
    model = resident.model
    timeout_s = shortest(body.timeout, here.config.request_timeout_s)
    job = Job(id, here.jobs)
    try:
        for index in range(len(prompts) * body.n):
            prompt = prompts[index // body.n]
            request = Request(
                id=f"{id}:{index}" if index else id,
                prompt=prompt.ids,
                sampling=replace(drawn, seed=choice_seed(drawn.seed, index % body.n)),
                max_tokens=body.limit,
                stop_ids=model.stop_ids,
                timeout_s=timeout_s,
                cache_salt=body.cache_salt,
                speculation=body.speculation,
                kv=format_of(body.kv_bits, model.caps),
                sparse=False if body.scores_prompt else body.specprefill,  # the same for all choices
                keep=body.specprefill_keep_pct,
                boundaries=prompt.boundaries,
                constraint=prompt.constraint,
                prompt_logprobs=body.scores_prompt and index % body.n == 0,
                spans=prompt.spans,
            )
            stream = resident.submit(request)
            if here.config.log_prompts:
                here.pool.submit(log_prompt, model.tokenizer, request)
            made = events(aiter(stream), ReplyStream(model.tokenizer, body.stop, prompt.form), stream.abort)
            job.add(Choice(index, stream, made, counts_prompt=index % body.n == 0))
    except BaseException:
        job.close()
        raise
    return job


def shortest(*limits: float | None) -> float | None:
    given: list[Any] = [limit for limit in limits if limit is not None]
    return min(given, default=None)
