"""Images on their way through a chat template: in whatever form it takes them, and each in its place.

Nothing is known of model families: the template is asked, by rendering small conversations, once for each template.

- Some templates read a content as text only, some as a list of parts only, most read both.
- Where a template writes no marker for an image part, the marker is put into the text.
- Where it writes none in the result of a tool, the image goes to a user's message behind the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from treadle.errors import BadRequest
from treadle.prompt.conversation import ImageRef
from treadle.prompt.template import render
from treadle.prompt.turns import CALL, RESULT, USER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

WORD = "quillwort"  # no template writes it by itself
SHOWN: list[Message] = [{"type": "text", "text": WORD}, {"type": "image"}]


@dataclass(frozen=True, slots=True)
class Ways:
    """What a template reads: contents that are text, or lists; image parts of a user, and of a tool's result."""

    text: bool
    lists: bool
    parts: bool
    results: bool


_found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, str], Ways]] = WeakKeyDictionary()
_lock = Lock()


def ways_of(tokenizer: PreTrainedTokenizerBase, marker: str) -> Ways:
    """What the template reads of images whose place it marks by `marker`; kept with the tokenizer."""
    key = (str(tokenizer.chat_template or ""), marker)
    with _lock:
        known = _found.setdefault(tokenizer, {})
        if key not in known:
            user, result = {**USER, "content": SHOWN}, {**RESULT, "content": SHOWN}
            known[key] = Ways(
                text=WORD in _rendered(tokenizer, [{**USER, "content": WORD}]),
                lists=WORD in _rendered(tokenizer, [{**USER, "content": SHOWN[:1]}]),
                parts=_marks(_rendered(tokenizer, [user]), marker),
                results=_marks(_rendered(tokenizer, [USER, CALL, result]), marker),
            )
        return known[key]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    try:
        return render(tokenizer, messages)
    except BadRequest:
        return ""


def _marks(text: str, marker: str) -> bool:
    return WORD in text and text.count(marker) == 1


def image_refs(messages: Sequence[Message]) -> list[ImageRef]:
    """The images of normalised messages, in order."""
    return [part["image"] for message in messages for part in _parts(message["content"]) if part["type"] == "image"]


def for_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], marker: str | None) -> list[Message]:
    """Normalised messages in the form that the template reads; `marker` None: the model sees nothing."""
    ways = ways_of(tokenizer, marker or WORD * 2)
    shown = messages if ways.results or not ways.parts else behind_results(messages)
    as_lists = ways.lists and not ways.text
    contents = [message["content"] for message in shown]
    if not ways.parts:
        contents = [_written(content, marker or "") for content in contents]
    return [{**m, "content": _plain(c, as_lists=as_lists)} for m, c in zip(shown, contents, strict=True)]


def _plain(content: Any, *, as_lists: bool) -> Any:
    """Text stays what it is if the template reads it; parts without what only this program reads of them."""
    if isinstance(content, str):
        return _parts(content) if as_lists else content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def _written(content: Any, marker: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(marker if part["type"] == "image" else part["text"] for part in content)


def _parts(content: Any) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def behind_results(messages: Sequence[Message]) -> list[Message]:
    """The images of neighbouring results in one user's message behind them, joined to what the user says there."""
    made: list[Message] = []
    held: list[Message] = []
    for message in messages:
        if held and message["role"] != "tool":
            if message["role"] == "user":
                message, held = {**message, "content": [*held, *_parts(message["content"])]}, []
            else:
                made.append({"role": "user", "content": held})
                held = []
        if message["role"] == "tool" and not isinstance(message["content"], str):
            held = held + [part for part in message["content"] if part["type"] == "image"]
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            message = {**message, "content": "\n".join(texts)}
        made.append(message)
    return [*made, {"role": "user", "content": held}] if held else made


def expanded(text: str, marker: str, shown: Sequence[str]) -> str:
    """The rendered conversation with what stands for each image in the place of its marker.

    Raises BadRequest when the conversation itself contains the marker, or the template left one out.
    """
    pieces = text.split(marker)
    if len(pieces) - 1 != len(shown):
        raise BadRequest(
            f"The prompt has {len(pieces) - 1} places for {len(shown)} images: its text must not contain {marker!r}.",
            param="messages",
        )
    return "".join(part for pair in zip(pieces, [*shown, ""], strict=True) for part in pair)
