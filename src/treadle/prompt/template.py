"""Messages to prompt text, through the model's own chat template in transformers' sandboxed environment.

Rules:
- A last message of the assistant (without tool calls) is continued: the prompt ends inside it. Otherwise the
  template's generation prompt is added.
- When the template refuses the messages, it is tried again: with call ids of nine letters and digits, for there
  are templates that want those; then with merged messages: first later system messages become user messages and
  neighbours of one role are joined by an empty line; if that is refused too, the leading system message is put
  in front of the first user message. If nothing helps, the error is the template's first message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2.exceptions import TemplateError

from treadle.errors import BadRequest
from treadle.prompt.tools import short_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "model",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# What a template's own code can raise while it renders.
TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
JOINT = "\n\n"
MAX_REASON = 300
PROBE: Message = {"role": "user", "content": "x"}
PROBE_NAME = "probe_of_tools"
PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "x"}},
    "required": ["x"],
}
PROBE_TOOL: Message = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "x", "parameters": PROBE_PARAMETERS},
}

_native: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, bool]] = WeakKeyDictionary()


def check_kwargs(kwargs: Mapping[str, Any], *, param: str = "chat_template_kwargs") -> dict[str, Any]:
    """A client's template variables, safe to hand to `render`. Raises BadRequest for reserved names."""
    for name in kwargs:
        if name in RESERVED:
            raise BadRequest(f"{name!r} is not a variable of the chat template.", param=f"{param}.{name}")
    return dict(kwargs)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    /,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    *,
    model: str = "This model",
    **kwargs: Any,
) -> str:
    """The prompt text of normalised messages; deterministic for one tokenizer (but for a template that asks
    the date).

    `kwargs` reach the template as variables (`enable_thinking`, ...). Raises BadRequest: no chat template,
    a reserved variable, or messages that the template refuses. Check a
    client's variables with `check_kwargs` before they become keyword arguments. `tools` are for templates that
    take them (`tools.takes_tools`).
    """
    variables = check_kwargs(kwargs)
    if not tokenizer.chat_template:
        raise BadRequest(f"{model} has no chat template; use /v1/completions.", param="messages")
    refusals: list[Exception] = []
    for attempt in attempts(messages):
        try:
            return _apply(tokenizer, attempt, tools, add_generation_prompt, variables)
        except TEMPLATE_FAULTS as fault:
            refusals.append(fault)
    reason = " ".join(str(refusals[0]).split())[:MAX_REASON]
    raise BadRequest(f"The chat template refuses these messages: {reason}", param="messages") from refusals[0]


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes tools into the prompt, told by rendering with and without; kept."""
    template = str(tokenizer.chat_template or "")
    known = _native.get(tokenizer)
    if known is None or known[0] != template:
        try:
            found = PROBE_NAME in render(tokenizer, [PROBE], [PROBE_TOOL])
        except BadRequest:
            found = False
        known = _native[tokenizer] = (template, found)
    return known[1]


def attempts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages as they are, then with short call ids, then the merging rule's two steps, where these change
    anything."""
    yield list(messages)
    first = short_ids(messages)
    leading = first[:1] if first and first[0]["role"] == "system" else []
    merged = merge(leading + [_as_user(message) for message in first[len(leading) :]])
    folded = merge([_as_user(message) for message in merged])
    if first != list(messages):
        yield first
    if merged != first:
        yield merged
    if folded != merged:
        yield folded


def merge(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role: contents by an empty line, tool calls in order; not tool results."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] != "tool":
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _joined(first: Message, second: Message) -> Message:
    both = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if key in both:
            both[key] = _contents(texts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {**both, "tool_calls": calls} if calls else both


def _contents(contents: Sequence[Any]) -> str | list[Message]:
    """One content of several: text, or the parts of all where one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return JOINT.join(contents)
    parts: list[Message] = []
    for content in contents:
        parts += [{"type": "text", "text": JOINT}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    last = messages[-1]
    continues = add_generation_prompt and last["role"] == "assistant" and not last.get("tool_calls")
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(tools) if tools else None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt and not continues,
        continue_final_message=continues,
        **variables,
    )
    return str(text)
