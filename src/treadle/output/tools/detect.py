"""Which format of tool calls a model writes, told by its chat template and its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.output.tools.base import Format
from treadle.output.tools.json_calls import HeadedFormat, JsonFormat
from treadle.output.tools.literals import GemmaFormat, PythonFormat
from treadle.output.tools.tagged import TagFormat, Tags, ToolCallTag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FALLBACK = ToolCallTag()
"""What a model is told to write whose template knows nothing of tools."""


def _tags(prefix: str, parameter: str) -> Tags:
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>` and its like."""
    name, key = prefix.split()[0], parameter.split()[0]
    return Tags(f"<{prefix}", (">",), f"<{parameter}", ">", "", f"</{key}>", f"</{name}>")


LONGCAT = Tags(
    "", ("<longcat_arg_key>", "</longcat_tool_call>", "\n"), "<longcat_arg_key>", "</longcat_arg_key>",
    "<longcat_arg_value>", "</longcat_arg_value>", "</longcat_tool_call>",
)  # fmt: skip
DEEPSEEK = HeadedFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    r"(?:function\s*<｜tool▁sep｜>)?\s*(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>|```json)?",
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁sep｜>",),
)
KIMI = HeadedFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_argument_begin|>",),
)
MISTRAL = HeadedFormat(
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    r"(?P<name>[^\s\[]+?)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?",
    (),
    ("[ARGS]", "[CALL_ID]"),
)

MINIMAX = TagFormat("<minimax:tool_call>", "</minimax:tool_call>", _tags("invoke name=", "parameter name="))
MINICPM = TagFormat("", "", _tags("function name=", "param name="))
MUSE = TagFormat(
    "<atem:function_calls>", "</atem:function_calls>", _tags("atem:invoke name=", "atem:parameter name=")
)  # fmt: skip
LFM = PythonFormat("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA = JsonFormat("<|python_tag|>", "<|eom_id|>", bare=True)

# (strings that a chat template has all of, format); the first that fits.
FORMATS: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call>", "<tool_call|>"), GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')),
    (("<start_function_call>",), GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")),
    (("<longcat_tool_call>",), TagFormat("<longcat_tool_call>", "", LONGCAT)),
    (("<|tool_call_start|>",), LFM),
    (("<|tool_list_start|>",), LFM),
    (("<|tool_call_begin|>",), KIMI),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK),
    (('<function name="', '<param name="'), MINICPM),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<atem:function_calls>",), MUSE),
    (("<tool_call>",), ToolCallTag()),
    (("<|tool_call|>", "<|/tool_call|>"), JsonFormat("<|tool_call|>", "<|/tool_call|>")),
    (("<|python_tag|>",), LLAMA),
    (('"parameters":', '"name":'), LLAMA),
)
VOCABULARY: tuple[tuple[str, Format], ...] = (("<|tool_call_start|>", LFM),)


def format_of(tokenizer: PreTrainedTokenizerBase) -> Format | None:
    """The format of the model's own template; None where it shows none that is known."""
    template = str(tokenizer.chat_template or "")
    found = (kind for strings, kind in FORMATS if all(string in template for string in strings))
    known = tokenizer.get_added_vocab()
    written = (kind for token, kind in VOCABULARY if token in known)
    return next(found, None) or next(written, None)
