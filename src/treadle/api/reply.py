"""What both OpenAI routes' answers share: identity, usage, and the two ways to give one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from treadle.output.stream import Event
from treadle.types import Usage


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that are the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    fingerprint: str

    def wrap(self, object: str, choices: list[Any], **rest: Any) -> dict[str, Any]:
        """The object around `choices`; `rest` comes last."""
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **rest,
        }


class ChunkWriter(Protocol):
    """Turns the events of an answer into the bytes of its stream."""

    def opening(self) -> bytes: ...
    def chunk(self, index: int, event: Event) -> bytes: ...
    def closing(self, usage: Usage) -> bytes: ...


class Collector(Protocol):
    """Gathers the same events into one object."""

    def add(self, index: int, event: Event) -> None: ...
    def reply(self, usage: Usage) -> Mapping[str, Any]: ...


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`; cached tokens are part of the prompt's, and predictions are those of speculation, if any.

    Of several prompts, `specprefill` is about the first.
    """
    details = {"reasoning_tokens": reasoning_tokens}
    if usage.drafted_tokens:
        details["accepted_prediction_tokens"] = usage.accepted_tokens
        details["rejected_prediction_tokens"] = usage.drafted_tokens - usage.accepted_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **specprefill(usage)},
        "completion_tokens_details": details,
    }


def specprefill(usage: Usage) -> dict[str, Any]:
    """Whether a part of the prompt was left out, where the server can do that."""
    if usage.sparse is None:
        return {}
    known = asdict(usage.sparse)
    return {"specprefill": known | {name: round(known[name], 6) for name in ("score_s", "prefill_s")}}
