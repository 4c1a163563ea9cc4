"""What a chat reply must look like: its format, its calls, and the reasoning that may come before them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.api.call_grammar import CallGrammar
from treadle.api.call_values import Schema, Unwritable, arguments
from treadle.api.channel_grammar import channels
from treadle.api.fields import ChatBody
from treadle.api.grammar import check_constraint, constraint_of
from treadle.api.ports import ModelPort
from treadle.errors import BadRequest
from treadle.grammar.fault import GrammarError
from treadle.grammar.lark import ANY_TEXT, Lark, expression
from treadle.output.form import Form, in_words
from treadle.prompt.tokenise import encode
from treadle.types import Constraint, Language, Reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FREE = Constraint(Language.FREE)


def shaped(model: ModelPort, body: ChatBody, text: str, form: Form, *, native: bool) -> tuple[Form, Constraint | None]:
    """The form of replies to the prompt `text`, and what they must look like, checked; None: they are free.

    `native`: the template wrote the tools. Calls that must be made but whose own syntax has no grammar are made in
    the syntax that tools in words have, which changes the form. Raises BadRequest.
    """
    template = str(model.tokenizer.chat_template or "") if native else ""
    answer = constraint_of(body) or FREE
    field = body.shape or "thinking_budget"
    if body.forced_tools or (body.callable_tools and (answer is not FREE or body.strict_names)):
        field = "tools"
        try:
            answer, form = with_calls(model.tokenizer, body, form, answer, template)
        except (Unwritable, GrammarError) as fault:
            raise BadRequest(f"tools: {fault}.", param="tools") from fault
    elif form.dialect is not None and answer is not FREE:
        answer = in_channels(model.tokenizer, body, form, answer, {})
    reasoning = reasoning_of(model, body, text, form)
    if answer is FREE and (reasoning is None or reasoning.budget is None):
        return form, None
    constraint = replace(answer, reasoning=reasoning)
    check_constraint(model, constraint, field)
    return form, constraint


def with_calls(
    tokenizer: PreTrainedTokenizerBase, body: ChatBody, form: Form, answer: Constraint, template: str
) -> tuple[Constraint, Form]:
    """Calls of the request's tools, or `answer` if there need not be any. Raises Unwritable, GrammarError."""
    schemas = schemas_of(body, answer)
    try:
        if form.dialect is not None:
            return in_channels(tokenizer, body, form, answer, schemas), form
        return in_format(tokenizer, body, form, answer, schemas, template), form
    except Unwritable:
        if not body.forced_tools:
            raise
    form = in_words(tokenizer, form)
    return in_format(tokenizer, body, form, answer, schemas, ""), form


def schemas_of(body: ChatBody, answer: Constraint) -> dict[str, Schema]:
    """The schemas that arguments are held to, by function: only of strict ones where nothing else is constrained."""
    functions = [tool["function"] for tool in body.forced_tools or body.callable_tools]
    all_held = bool(body.forced_tools) or answer is not FREE
    return {
        function["name"]: arguments(function.get("parameters"), held=all_held or function["name"] in body.strict_names)
        for function in functions
    }


def in_channels(
    tokenizer: PreTrainedTokenizerBase, body: ChatBody, form: Form, answer: Constraint, schemas: dict[str, Schema]
) -> Constraint:
    """For a model whose replies are messages with headers. After a used up budget it may not think again."""
    assert form.dialect is not None
    lark = Lark(tokenizer)
    text = "" if body.forced_tools else expression(answer) or ANY_TEXT
    inside = channels(lark, form.dialect, text, schemas, thinks=body.thinking_budget is None)
    return Constraint(Language.LARK, lark.text(inside))


def in_format(
    tokenizer: PreTrainedTokenizerBase,
    body: ChatBody,
    form: Form,
    answer: Constraint,
    schemas: dict[str, Schema],
    template: str,
) -> Constraint:
    """For all other models."""
    assert form.format is not None
    single = form.single or isinstance(body.tool_choice, dict)
    grammar = CallGrammar(tokenizer, form.format, schemas, single=single, template=template, frames=form.frames)
    if body.forced_tools:
        starts = [grammar.only()]
    elif answer is FREE:
        starts = [grammar.amid_text()]
    else:
        starts = [grammar.framed(expression(answer)), grammar.only()]
    return Constraint(Language.LARK, grammar.lark.text(*starts))


def reasoning_of(model: ModelPort, body: ChatBody, text: str, form: Form) -> Reasoning | None:
    """The reasoning that a reply to the prompt `text` may begin with; None if it is off or the model has none."""
    if form.dialect is not None:
        opener, closer = form.dialect.thinks + form.dialect.message, form.dialect.openings[0]
    elif form.markers is not None:
        opener, closer = form.markers.opener, form.markers.closer
    else:
        return None
    if not form.opened and (body.thinking_off or text.rstrip().endswith(closer)):
        return None

    def ids(marker: str) -> tuple[int, ...]:
        return tuple(int(id) for id in encode(model.tokenizer, marker, add_special_tokens=False))

    most = min(body.limit or model.caps.context_length, model.caps.context_length)
    budget = None if body.thinking_budget is None or body.thinking_budget >= most else body.thinking_budget
    return Reasoning(ids(closer), () if form.opened else ids(opener), budget)
