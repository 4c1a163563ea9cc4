"""Which format of tool calls a model writes, told by its chat template and its vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.output.tools.base import Format
from treadle.output.tools.json_calls import HeadedFormat, JsonFormat
from treadle.output.tools.literals import GemmaFormat, PythonFormat
from treadle.output.tools.llama import LlamaFormat
from treadle.output.tools.tagged import QWEN, TagFormat, Tags, ToolCallTag

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
XTML = Tags(
    "<|open|>call tool=", ("<|sep|>",), "<|open|>argument key=", "<|sep|>", "", "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>", whole=("<|open|>json", "<|close|>json<|sep|>"),
)  # fmt: skip
DSML = _tags("｜DSML｜invoke name=", "｜DSML｜parameter name=")

DEEPSEEK = HeadedFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    r"(?:function\s*<｜tool▁sep｜>)?\s*(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>|```json)?",
    ("```", "<｜tool▁call▁end｜>"),
    ("<｜tool▁sep｜>",),
)
DEEPSEEK_DSML = TagFormat("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", DSML)
DEEPSEEK_TOOL_CALLS = TagFormat("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", DSML)
KIMI = HeadedFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    ("<|tool_call_end|>",),
    ("<|tool_call_argument_begin|>",),
)
KIMI_XTML = TagFormat("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", XTML)
MISTRAL = HeadedFormat(
    "[TOOL_CALLS]",
    "",
    "[TOOL_CALLS]",
    r"(?P<name>[^\s\[]+?)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?",
    inner=("[ARGS]", "[CALL_ID]"),
)

MINIMAX = TagFormat("<minimax:tool_call>", "</minimax:tool_call>", _tags("invoke name=", "parameter name="))
MINICPM = TagFormat("", "", _tags("function name=", "param name="))
MUSE = TagFormat(
    "<atem:function_calls>", "</atem:function_calls>", _tags("atem:invoke name=", "atem:parameter name=")
)  # fmt: skip
SEED = TagFormat("<seed:tool_call>", "</seed:tool_call>", QWEN)
LFM = PythonFormat("<|tool_call_start|>", "<|tool_call_end|>")
OLMO = PythonFormat("<function_calls>", "</function_calls>", lines=True)
LLAMA = LlamaFormat("<|python_tag|>", "<|eom_id|>", bare="{[")
LLAMA4 = LlamaFormat("<|python_start|>", "<|python_end|>", bare="{[")
COHERE = JsonFormat("<|START_ACTION|>", "<|END_ACTION|>")

# (strings that a chat template has all of, format); the first that fits.
FORMATS: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call>", "<tool_call|>"), GemmaFormat("<|tool_call>", "<tool_call|>", '<|"|>')),
    (("<start_function_call>",), GemmaFormat("<start_function_call>", "<end_function_call>", "<escape>")),
    (("<longcat_tool_call>",), TagFormat("<longcat_tool_call>", "", LONGCAT)),
    (("<|tool_call_start|>",), LFM),
    (("<|tool_list_start|>",), LFM),
    (("<|tool_call_begin|>",), KIMI),
    (("<|open|>", "<|close|>", "<|sep|>"), KIMI_XTML),
    (("<｜tool▁call▁begin｜>",), DEEPSEEK),
    (("｜DSML｜", "function_calls>"), DEEPSEEK_DSML),
    (("｜DSML｜", "tool_calls>"), DEEPSEEK_TOOL_CALLS),
    (("<seed:tool_call>",), SEED),
    (("<|START_ACTION|>",), COHERE),
    (('<function name="', '<param name="'), MINICPM),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<atem:function_calls>",), MUSE),
    (("<tool_call>",), ToolCallTag()),
    (("<|tool_call|>", "<|/tool_call|>"), JsonFormat("<|tool_call|>", "<|/tool_call|>")),
    (("<TOOLCALL>",), JsonFormat("<TOOLCALL>", "</TOOLCALL>")),
    (("<tool_calls>",), JsonFormat("<tool_calls>", "</tool_calls>")),
    (("<function_calls>",), OLMO),
    (("<|action_start|>", "<|plugin|>"), JsonFormat("<|action_start|><|plugin|>", "<|action_end|>")),
    (("<|python_start|>",), LLAMA4),
    (("<|python_tag|>",), LLAMA),
    (("[func_name1(",), LLAMA),
    (('"parameters":', '"name":'), LLAMA),
)
VOCABULARY: tuple[tuple[frozenset[str], Format], ...] = (
    (frozenset({"<|open|>", "<|close|>", "<|sep|>"}), KIMI_XTML),
    (frozenset({"<|tool_call_start|>"}), LFM),
    (frozenset({"｜DSML｜"}), DEEPSEEK_DSML),
    (frozenset({"<|python_start|>", "<|python_end|>"}), LLAMA4),
)


def format_of(tokenizer: PreTrainedTokenizerBase) -> Format | None:
    """The format of the model's own template; None where it shows none that is known."""
    template = str(tokenizer.chat_template or "")
    found = (kind for strings, kind in FORMATS if all(string in template for string in strings))
    known = tokenizer.get_added_vocab().keys()
    written = (kind for tokens, kind in VOCABULARY if tokens <= known)
    return next(found, None) or next(written, None)
