"""The load generator: conversations over HTTP against any server with OpenAI's chat route, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from httpx2 import AsyncClient, HTTPError, Limits, Response

from treadle.bench.serve_workloads import Conversation, Message, after
from treadle.errors import NotAuthorised, Unreachable

SPOKEN = ("content", "reasoning_content", "reasoning", "tool_calls")  # the parts of a delta that are tokens


@dataclass(slots=True)
class Sample:
    """One request. Times in seconds from when it was sent; `error` is set when it failed."""

    turn: int
    chunk_times: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    prompt_tokens: int | None = None  # None: the server does not tell
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times[0] if self.chunk_times else None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def num_tokens(self) -> int:
        """As the server counts, else the chunks."""
        return len(self.chunk_times) if self.completion_tokens is None else self.completion_tokens


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask for what. `url` with or without `/v1`; times in seconds."""

    url: str
    model: str | None = None
    api_key: str | None = None
    max_tokens: int = 64
    timeout_s: float = 600.0

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def client(self, concurrency: int) -> AsyncClient:
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        limits = Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        return AsyncClient(headers=headers, timeout=self.timeout_s, limits=limits, trust_env=False)


async def measure(
    target: Target, conversations: Sequence[Conversation], concurrency: int
) -> tuple[str, list[Sample], float]:
    """Run them, so many at a time: the model's name, a sample for each request, and seconds in all.

    Raises Unreachable when the server does not answer before the load begins.
    """
    async with target.client(concurrency) as client:
        model = target.model or await first_model(client, target.base)
        waiting = iter(conversations)
        samples: list[Sample] = []
        began = time.perf_counter()
        workers = [_worker(client, target, model, waiting, samples) for _ in range(concurrency)]
        await asyncio.gather(*workers)
        return model, samples, time.perf_counter() - began


async def first_model(client: AsyncClient, base: str) -> str:
    """The first that the server lists. Raises Unreachable, NotAuthorised."""
    try:
        answer = await client.get(f"{base}/models")
        if answer.status_code == NotAuthorised.status:
            raise NotAuthorised("The server wants an API key: --api-key or TREADLE_API_KEY.")
        if not answer.is_success:
            raise Unreachable(f"{base}/models names no model (HTTP {answer.status_code}).")
        return str(answer.json()["data"][0]["id"])
    except (HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unreachable(f"{base}/models names no model ({type(error).__name__}: {error}).") from error


async def _worker(
    client: AsyncClient, target: Target, model: str, waiting: Iterable[Conversation], samples: list[Sample]
) -> None:
    for conversation in waiting:
        messages = list(conversation.opening)
        for turn in range(conversation.num_turns):
            sample = Sample(turn)
            samples.append(sample)
            await ask(client, target, model, messages, sample)
            if turn < len(conversation.later):
                messages = after(messages, sample.text, conversation.later[turn])


async def ask(client: AsyncClient, target: Target, model: str, messages: list[Message], sample: Sample) -> None:
    """One streamed request; everything that happens goes into `sample`."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": target.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    try:
        async with client.stream("POST", f"{target.base}/chat/completions", json=body) as answer:
            if answer.is_success:
                await _read(answer, sample, began)
            else:
                sample.error = f"HTTP {answer.status_code}: {_message(await answer.aread())}"
    except HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.duration_s = time.perf_counter() - began
    if sample.error is None and not sample.chunk_times and not sample.num_tokens:
        sample.error = "The stream ended without a token."


async def _read(answer: Response, sample: Sample, began: float) -> None:
    async for line in answer.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            note(sample, json.loads(data), time.perf_counter() - began)


def note(sample: Sample, chunk: dict[str, Any], at: float) -> None:
    """Add one chunk that came `at` seconds after the request was sent."""
    if (error := chunk.get("error")) is not None:
        sample.error = str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(part) for part in SPOKEN):
            sample.chunk_times.append(at)
            sample.text += delta.get("content") or ""
    usage = chunk.get("usage")
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens")
        sample.completion_tokens = usage.get("completion_tokens")
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _message(body: bytes) -> str:
    """OpenAI's error message, or the beginning of whatever was sent."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
