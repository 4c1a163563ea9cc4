"""OpenAI's route for embeddings: texts or token lists in, vectors of length 1 out, from a model that was made for it.

Every input is a request to the engine like any other prompt, a few of them at a time. So running streams keep their
pace, others may be served in between, and what nobody waits for any more is ended within a chunk.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.api.body import checked, json_object, read
from treadle.api.context import Context, context
from treadle.api.errors import error_response, json_response
from treadle.api.exchange import Exchange
from treadle.api.fields import Number, is_id
from treadle.api.job import Jobs, Running
from treadle.api.openai import shortest
from treadle.api.ports import ModelPort, ResidentPort, SlotPort, StreamPort
from treadle.api.prompts import refuse_hopeless
from treadle.api.schema import body_schema
from treadle.api.tokenise import in_pool
from treadle.api.unsupported import refuse_unsupported
from treadle.errors import BadRequest, ContextLengthExceeded, QueueFull, TimedOut, TreadleError
from treadle.metrics.request_log import log_prompt
from treadle.prompt.tokenise import encode
from treadle.types import EXACT, Caps, Embedding, Finish, Ids, Output, Request, Vector

router = APIRouter()

MOST_INPUTS = 2048  # as OpenAI's
MOST_TOKENS = 300_000  # of all inputs, as OpenAI's
AHEAD = 4  # inputs that wait in the engine, so that it need not wait for the next one
RETRY_S = 0.02  # how soon an input is submitted again that found the queue full

Input = str | list[int]


def _inputs(value: Any) -> Any:
    """A text, token ids, or a list of either, as a list of inputs."""
    one = isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(is_id, value)))
    inputs = [value] if one else value
    if not isinstance(inputs, list) or not inputs:
        raise ValueError("must be a string, a list of token ids, or a non-empty list of either")
    if len(inputs) > MOST_INPUTS:
        raise ValueError(f"has {len(inputs)} inputs, more than the {MOST_INPUTS} of one request")
    for place, item in enumerate(inputs):
        if not isinstance(item, str) and not (isinstance(item, list) and all(map(is_id, item))):
            raise ValueError("must be a string, a list of token ids, or a non-empty list of either")
        if not item:
            raise ValueError("must not be empty" if one else f"has an empty item ({place})")
    return inputs


class EmbeddingsBody(BaseModel):
    """`POST /v1/embeddings`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: Annotated[
        list[Input], BeforeValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    timeout: Number | None = Field(default=None, gt=0)


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingsBody))
async def embeddings(http: HttpRequest) -> Response:
    """One vector for each input."""
    here = context(http)
    values = json_object(await read(http, here.max_body))
    slot = here.engine.find(values["model"] if isinstance(values.get("model"), str) else None)
    if slot.facts is not None:
        embedding_of(slot.name, slot.facts.caps)  # a refusal comes first, and needs no load
    body = checked(values, EmbeddingsBody)
    refuse_unsupported(body.model_extra or {}, n=1)
    return Embedded(here, slot, body, list_form=isinstance(values["input"], list))


def embedding_of(name: str, caps: Caps) -> Embedding:
    """What the model can do. Raises BadRequest where it embeds nothing."""
    found = caps.embedding
    if found is None:
        why = f"{name} was made to write text and not to embed it; serve an embedding model beside it"
    elif found.pooling is None:
        why = f"{name} makes no embeddings here: {found.why}"
    else:
        return found
    raise BadRequest(f"{why}.", param="model", code="unsupported_model")


class Embedded(Exchange):
    """The answer of this route: loads the model if need be, and has every input computed."""

    def __init__(self, here: Context, slot: SlotPort, body: EmbeddingsBody, *, list_form: bool) -> None:
        self._job = EmbeddingJob(f"embd-{uuid.uuid4().hex}", here.jobs)
        super().__init__(self._job)
        self._here = here
        self._slot = slot
        self._body = body
        self._list_form = list_form

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer()
        except TreadleError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _answer(self) -> Response:
        here, body = self._here, self._body
        timeout_s = shortest(body.timeout, here.config.request_timeout_s)
        async with self._slot.use() as resident:
            model = resident.model
            embedding = embedding_of(model.name, model.caps)
            size = cut_size(embedding, body.dimensions)
            prompts = await in_pool(here, partial(prompts_of, model, embedding, body.input, self._list_form))
            requests = [self._request(index, ids, embedding) for index, ids in enumerate(prompts)]
            if here.config.log_prompts:
                for request in requests:
                    here.pool.submit(log_prompt, model.tokenizer, request)
            vectors = await self._job.run(resident, requests, timeout_s)
        num_tokens = sum(map(len, prompts))
        return await in_pool(here, partial(reply, self._job.id, model.name, vectors, size, body, num_tokens))

    def _request(self, index: int, ids: Ids, embedding: Embedding) -> Request:
        id = f"{self._job.id}:{index}" if index else self._job.id
        return Request(id, ids, max_tokens=0, speculation=False, kv=EXACT, pooling=embedding.pooling)


def cut_size(embedding: Embedding, wanted: int | None) -> int:
    """How many numbers of an embedding are given. Raises BadRequest for a number that the model does not allow."""
    size = embedding.size
    if wanted is None or wanted == size:
        return size
    if embedding.sizes:
        allowed, may = wanted in embedding.sizes and wanted < size, ", ".join(map(str, embedding.sizes))
    elif embedding.least_size is not None:
        allowed, may = embedding.least_size <= wanted < size, f"{embedding.least_size} to {size}"
    else:
        allowed, may = False, f"only {size}, for its makers say nothing of shorter ones"
    if not allowed:
        raise BadRequest(f"dimensions: this model's embeddings may have {may} numbers.", param="dimensions")
    return wanted


def prompts_of(model: ModelPort, embedding: Embedding, inputs: Sequence[Input], list_form: bool) -> list[Ids]:
    """The ids of every input. Raises BadRequest, ContextLengthExceeded naming the input."""
    prompts: list[Ids] = []
    total = 0
    for index, item in enumerate(inputs):
        param = f"input[{index}]" if list_form and len(inputs) > 1 else "input"
        prompts.append(_ids(model, embedding, item, param))
        total += len(prompts[-1])
        if total > MOST_TOKENS:
            raise BadRequest(
                f"input: the inputs have more than the {MOST_TOKENS} tokens of one request; send them in several.",
                param="input",
            )
    return prompts


def _ids(model: ModelPort, embedding: Embedding, item: Input, param: str) -> Ids:
    """A text with what the tokenizer puts around it; token ids as they are."""
    caps = model.caps
    most = min(caps.context_length, embedding.context_length or caps.context_length)
    if isinstance(item, str):
        text = embedding.prefix + item
        refuse_hopeless(model, text, param)
        ids = encode(model.tokenizer, text, add_special_tokens=True)
    else:
        if min(item) < 0 or max(item) >= caps.vocab_size:
            raise BadRequest(f"{param}: token ids must lie between 0 and {caps.vocab_size - 1}.", param=param)
        ids = np.array(item, np.int64)
    if len(ids) > most:
        raise ContextLengthExceeded(len(ids), most, param=param)
    if len(ids) == 0:
        raise BadRequest(f"{param}: the text has no tokens.", param=param)
    return ids


class EmbeddingJob(Running):
    """The inputs of one client request. Run once, on one event loop."""

    def __init__(self, id: str, jobs: Jobs) -> None:
        super().__init__(id, jobs)
        self._streams: dict[str, StreamPort] = {}
        self._begun = False

    async def run(self, resident: ResidentPort, requests: Sequence[Request], timeout_s: float | None) -> list[Vector]:
        """The embedding of each. Raises the first error; then nothing of it goes on once the job is closed."""
        left = clock_of(timeout_s)
        made: dict[int, Vector] = {}
        waiting = iter(enumerate(requests))

        async def work(waiting: Iterator[tuple[int, Request]]) -> None:
            for index, request in waiting:
                made[index] = await self._embedded(resident, request, left)

        tasks = [asyncio.create_task(work(waiting)) for _ in range(AHEAD)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [made[index] for index in range(len(requests))]

    async def _embedded(self, resident: ResidentPort, request: Request, left: Callable[[], float | None]) -> Vector:
        stream = await self._submitted(resident, request, left)
        self._streams[request.id] = stream
        last = Output(request.id, finish=Finish.ABORT)
        async for output in stream:
            last = output
        del self._streams[request.id]
        if last.embedding is None:
            assert last.finish is not None
            raise self.fault(last.finish, last.error)
        return last.embedding

    async def _submitted(
        self, resident: ResidentPort, request: Request, left: Callable[[], float | None]
    ) -> StreamPort:
        """A full queue refuses the first input; the others, of a request that is under way, wait for their turn."""
        while True:
            try:
                stream = resident.submit(replace(request, timeout_s=left()))
            except QueueFull:
                if not self._begun:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._begun = True
                return stream

    def end(self) -> None:
        for stream in self._streams.values():
            stream.abort()


def clock_of(timeout_s: float | None) -> Callable[[], float | None]:
    """Says how many seconds are left of `timeout_s` from now on. Raises TimedOut when none are."""
    began = time.monotonic()

    def left() -> float | None:
        if timeout_s is None:
            return None
        seconds = timeout_s - (time.monotonic() - began)
        if seconds <= 0:
            raise TimedOut(f"The request passed its time limit of {timeout_s:g} s.", param="timeout")
        return seconds

    return left


def reply(id: str, name: str, vectors: Sequence[Vector], size: int, body: EmbeddingsBody, num_tokens: int) -> Response:
    """OpenAI's list of embeddings, cut to `size` numbers and brought to length 1 again."""
    write: Callable[[Vector], Any] = as_base64 if body.encoding_format == "base64" else as_list
    data = [
        {"object": "embedding", "index": index, "embedding": write(cut(vector, size))}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    content = {"object": "list", "data": data, "model": name, "usage": usage}
    return json_response(content, headers={"x-request-id": id})


def cut(vector: Vector, size: int) -> Vector:
    """The first numbers, as a vector of length 1; a vector whose first numbers are all 0 stays so."""
    if size == len(vector):
        return vector
    first = vector[:size].astype(np.float64)
    length = np.linalg.norm(first)
    return (first / length if length else first).astype(np.float32)


def as_list(vector: Vector) -> list[float]:
    """Its numbers."""
    numbers: list[float] = vector.tolist()
    return numbers


def as_base64(vector: Vector) -> str:
    """Its numbers as float32, little end first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
