"""Grammars of calls: each format's own syntax, with the arguments held to the parameters' schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treadle.api.call_values import (
    COMMA,
    NO_GRAMMAR,
    Schema,
    Unwritable,
    call_object,
    gemma_object,
    plain_name,
    python_arguments,
    tag_arguments,
)
from treadle.grammar.lark import ANY_TEXT, LINE, Lark, escaped, sequence
from treadle.output.tools.base import Format
from treadle.output.tools.detect import DEEPSEEK, KIMI, MISTRAL
from treadle.output.tools.json_calls import HeadedFormat, JsonFormat
from treadle.output.tools.literals import GemmaFormat, PythonFormat
from treadle.output.tools.llama import LlamaFormat
from treadle.output.tools.tagged import GLM, QWEN, TagFormat, Tags, ToolCallTag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_ID = {"type": "string", "pattern": "^[0-9]{1,3}$"}
CallOf = Callable[[str, Schema], str]


@dataclass(frozen=True, slots=True)
class Block:
    """Calls that stand together: `start`, a text, and then `rest`, an expression.

    bare: an expression of calls without a start, if the model writes those. last: no further block follows.
    """

    start: str
    rest: str
    bare: str = ""
    last: bool = False


class CallGrammar:
    """The grammar of calls in a format. `schemas`: of the arguments, by the functions' names.

    `single`: one call at most. `template`: the model's own, if it shows calls. `frames`: special tokens that may
    stand around text. Raises Unwritable, GrammarError.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format: Format,
        schemas: Mapping[str, Schema],
        *,
        single: bool,
        template: str = "",
        frames: Sequence[str] = (),
    ) -> None:
        self.lark = Lark(tokenizer)
        self._template = template
        if any(map(self.lark.is_plain, frames)):
            raise Unwritable(NO_GRAMMAR)
        self._frames = [f"({self.lark.literal(frame)})?" for frame in frames]
        self._schemas = schemas
        self._single = single
        self._format = format
        self._block = self._written(format)

    def only(self) -> str:
        """An expression: calls and nothing else."""
        block = self._block
        one = self.lark.rule(sequence(self.lark.literal(block.start), block.rest))
        blocks = one if self._single or block.last else self.lark.some(one, LINE)
        return self.lark.rule(blocks, *([block.bare] if block.bare else []))

    def amid_text(self) -> str:
        """An expression: text in which every call that begins is one of these."""
        block = self._block
        others = [start for start in self._format.starts if start != block.start]
        before = self.lark.until(block.start, self._prose(others))
        if self._frames:
            before = sequence(self.framed(self._prose(others)), self.lark.literal(block.start))
        one = self.lark.rule(sequence(before, block.rest))
        if self._single or block.last:
            mixed = f"{one}? {self.framed(self._prose([*others, block.start]))}"
        else:
            mixed = f"{one}* {self.framed(self._prose(others))}"
        return self.lark.rule(mixed, *([block.bare] if block.bare else []))

    def framed(self, text: str) -> str:
        """The expression of a text with its frames, of which a model may forget any."""
        return self.lark.rule(sequence(*self._frames[:1], text, *self._frames[1:]))

    def _prose(self, unwanted: Sequence[str]) -> str:
        """Text in which none of these starts comes, and which does not begin like calls without one."""
        parts = [f"~/(?s:.*){escaped(start)}(?s:.*)/" for start in unwanted if self.lark.is_plain(start)]
        bare = escaped(self._format.bare)
        return self.lark.terminal(" & ".join((f"/\\s*([^\\s{bare}](?s:.*))?/" if bare else ANY_TEXT, *parts)))

    def _written(self, format: Format) -> Block:
        template, literal = self._template, self.lark.literal
        match format:
            case ToolCallTag() if GLM.key_open in template:
                return Block(format.start, self._each(partial(self._tagged, GLM)))
            case ToolCallTag() if QWEN.name_open in template:
                call = sequence(literal(QWEN.name_open), self._each(partial(self._tagged, QWEN)))
                return Block(format.start, sequence(LINE, call, LINE, literal(format.end)))
            case ToolCallTag():
                return Block(format.start, sequence(LINE, self._object(), LINE, literal(format.end)))
            case TagFormat():
                return self._tags(format)
            case JsonFormat():
                end = literal(format.end) if self.lark.is_plain(format.end) else f"({literal(format.end)})?"
                return Block(format.start, sequence(LINE, self.lark.rule(self._list(), self._object()), end), last=True)
            case LlamaFormat():
                calls = self._python_list() if "[func_name1(" in template else self._objects()
                return Block(format.start, calls, bare=calls, last=True)
            case HeadedFormat():
                return self._headed(format)
            case PythonFormat():
                calls = self._python_lines() if format.lines else self._python_list()
                return Block(format.start, sequence(calls, literal(format.end)), last=True)
            case GemmaFormat():
                call = self._each(partial(self._gemma_call, format.quote))
                return Block(format.start, sequence(call, literal(format.end)))
        raise Unwritable(NO_GRAMMAR)

    def _each(self, call: CallOf) -> str:
        """A call to one of the functions, as `call` writes it for a name and a schema."""
        return self.lark.rule(*(call(name, schema) for name, schema in self._schemas.items()))

    def _several(self, call: str, between: str) -> str:
        return call if self._single else self.lark.some(call, between)

    def _object(self) -> str:
        """`{"name": ..., "arguments": {...}}`, with the keys that the template shows."""
        hosted = '"tool_name"' in self._template
        names = "tool_name" if hosted else "name"
        values = (
            "parameters" if '"parameters"' in self._template and '"arguments"' not in self._template else "arguments"
        )
        before = {"tool_call_id": CALL_ID} if hosted else {}
        return self._each(lambda name, schema: self.lark.json(call_object(name, schema, names, values, before)))

    def _objects(self) -> str:
        return self._several(self._object(), "/; ?/")

    def _list(self) -> str:
        return sequence('"["', self._several(self._object(), COMMA), '"]"')

    def _python_list(self) -> str:
        return sequence('"["', self._several(self._each(self._python_call), COMMA), '"]"')

    def _python_lines(self) -> str:
        return sequence(LINE, self._several(self._each(self._python_call), '"\\n"'), LINE)

    def _python_call(self, name: str, schema: Schema) -> str:
        return sequence(self.lark.literal(f"{plain_name(name)}("), python_arguments(self.lark, schema), '")"')

    def _gemma_call(self, quote: str, name: str, schema: Schema) -> str:
        written = gemma_object(self.lark, schema, schema, quote)
        return sequence(self.lark.literal(f"call:{plain_name(name)}"), written)

    def _tags(self, format: TagFormat) -> Block:
        tags = format.tags
        call = self._each(partial(self._tagged, tags) if tags.whole is None else partial(self._xtml, tags, tags.whole))
        if not format.start:
            return Block(tags.name_open, call)
        opened = self.lark.rule(sequence(self.lark.literal(tags.name_open), call))
        if not format.end:
            return Block(format.start, opened)
        return Block(
            format.start, sequence(LINE, self._several(opened, LINE), LINE, self.lark.literal(format.end)), last=True
        )

    def _tagged(self, tags: Tags, name: str, schema: Schema) -> str:
        """A call from behind `name_open` on."""
        plain = plain_name(name)
        head = f'"{plain}"' if tags.quoted else plain
        head += tags.key_end if tags.key_end in tags.name_ends else ""
        return sequence(
            self.lark.literal(head), LINE, tag_arguments(self.lark, tags, schema), self.lark.literal(tags.close)
        )

    def _xtml(self, tags: Tags, whole: tuple[str, str], name: str, schema: Schema) -> str:
        """The same for Kimi K3: an argument in each tag where its syntax can say that, or all as one object."""
        literal = self.lark.literal
        index = sequence(literal(' index="'), "/[0-9]{1,3}/", literal('"'))
        head = sequence(literal(f'"{plain_name(name)}"'), f"({index})?", literal(tags.key_end))
        one = sequence(literal(f'{whole[0]} type="object"{tags.key_end}'), self.lark.json(schema), literal(whole[1]))
        ways = [one]
        with suppress(Unwritable):
            ways.insert(0, tag_arguments(self.lark, tags, schema))
        return sequence(head, self.lark.rule(*ways), literal(tags.close))

    def _headed(self, format: HeadedFormat) -> Block:
        if format == MISTRAL and "[ARGS]" not in self._template:
            return Block(format.start, sequence('" "?', self._list()), last=True)
        call = self._each(partial(self._headed_call, format))
        if format.call == format.start:
            return Block(format.start, call)
        several = self._several(sequence(self.lark.literal(format.call), call), LINE)
        return Block(format.start, sequence(several, self.lark.literal(format.end)), last=True)

    def _headed_call(self, format: HeadedFormat, name: str, schema: Schema) -> str:
        """A call from behind `call` on, as the model's template writes it."""
        literal, body = self.lark.literal, self.lark.json(schema)
        name = plain_name(name)
        if format == MISTRAL:
            id = f"({literal('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?" if "[CALL_ID]" in self._template else ""
            return sequence(literal(name), id, literal("[ARGS]"), body)
        if format == KIMI:
            head = sequence(literal(f"functions.{name}:"), "/[0-9]{1,3}/", literal("<|tool_call_argument_begin|>"))
            return sequence(head, body, literal("<|tool_call_end|>"))
        if format != DEEPSEEK:
            raise Unwritable(NO_GRAMMAR)
        if "```json" in self._template:
            head, tail = f"function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>"
        else:
            head, tail = f"{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        return sequence(literal(head), body, literal(tail))
