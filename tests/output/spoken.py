# ruff: noqa: E501
"""What models of each family write when they reason and call tools, and what it means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.output.form import Form, form_of
from treadle.output.reply import ReplyStream
from treadle.output.stream import Event, Kind
from treadle.types import Finish, Output, TokenLogprob, Usage


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS = [
    tool("weather", city=STRING, days=INTEGER, metric={"type": "boolean"}, tags={"type": "array"}, extra={"type": "object"}),
    tool("write_file", path=STRING, text=STRING),
    tool("now"),
]  # fmt: skip
PARIS = ("weather", {"city": 'Paris, "the" city\n{é}', "days": 3})
HAIRY = ("weather", {"city": "a</b>", "metric": True, "tags": ["x", {"y": None}], "extra": {"k": "v]"}})
NOW: tuple[str, dict[str, Any]] = ("now", {})


@cache
def speaker(template: str, *specials: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", *alphabet]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    made.chat_template = template
    return made


@dataclass(frozen=True)
class Said:
    """One recorded reply: `template` and `specials` make the tokenizer, the rest is what must come out."""

    name: str
    template: str
    said: str
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    text: str = ""
    reasoning: str = ""
    specials: tuple[str, ...] = ()
    prompt: str = "<|assistant|>"

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return speaker(self.template, *self.specials)

    @property
    def form(self) -> Form:
        return form_of(self.tokenizer, self.prompt, TOOLS)

    @property
    def ids(self) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(self.said, add_special_tokens=False)]


@dataclass
class Heard:
    """The events of a reply, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    fragments: int = 0
    finish: Finish | None = None
    reasoning_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if event.kind is Kind.TEXT:
            self.text += event.text
            self.logprobs += event.logprobs
        elif event.kind is Kind.REASONING:
            self.reasoning += event.text
        elif event.tool is not None:
            self._call(event.tool.index, event.tool.id, event.tool.name, event.tool.arguments)
        elif event.kind is Kind.DONE:
            self.finish, self.reasoning_tokens = event.finish, event.reasoning_tokens

    def _call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        if id is not None:
            assert index == len(self.calls) and name
            self.call_ids.append(id)
            self.calls.append((name, ""))
        assert index == len(self.calls) - 1
        self.calls[index] = (self.calls[index][0], self.calls[index][1] + arguments)
        self.fragments += bool(arguments)

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def hear(
    said: Said | None = None,
    cuts: Iterable[int] | None = None,
    *,
    ids: Sequence[int] | None = None,
    form: Form | None = None,
    finish: Finish = Finish.STOP,
    stops: Sequence[str] = (),
) -> Heard:
    """The reply in groups of tokens cut at `cuts` (None: one token each)."""
    said = said or SAID[0]
    ids = said.ids if ids is None else ids
    numbers = count()
    stream = ReplyStream(said.tokenizer, stops, form or said.form, new_id=lambda: f"call_{next(numbers)}")
    bounds = [0, *sorted(min(cut, len(ids)) for cut in (range(len(ids)) if cuts is None else cuts)), len(ids)]
    heard = Heard()
    for a, b in pairwise(bounds):
        group = tuple(ids[a:b])
        for event in stream.push(Output("r", group, tuple(TokenLogprob(i, -0.5) for i in group))):
            heard.add(event)
    for event in stream.push(Output("r", finish=finish, usage=Usage(1, len(ids)))):
        heard.add(event)
    return heard


def _json(call: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _arguments(call: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(call[1], ensure_ascii=False)


HERMES = "{{ tools }}<tool_call>{{ tool_call.name }}</tool_call>"
THINK = HERMES + "<think></think>"
CODER = "<tool_call>\n<function=f>"
MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)  # fmt: skip
KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
LLAMA4 = ("<|python_start|>", "<|python_end|>")
DSML = ("｜DSML｜",)
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
ATEM = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
COHERE = tuple(f"<|{edge}_{part}|>" for part in ("THINKING", "RESPONSE", "ACTION") for edge in ("START", "END"))
HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")
QWEN_PARIS = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis, \"the\" city\n{é}\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
GLM_PARIS = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, \"the\" city\n{é}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)  # fmt: skip
PYTHON_PARIS = "[weather(city='Paris, \"the\" city\\n{é}', days=3)"


def dsml(section: str) -> str:
    """Two calls as DeepSeek writes them; the type that the schema leaves open is in the tag."""
    return (
        f'<｜DSML｜{section}>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">a</b>'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="zip" string="true">75001</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{section}>'
    )


def xtml(part: str, text: str, attributes: str = "") -> str:
    return f"<|open|>{part}{attributes}<|sep|>{text}<|close|>{part}<|sep|>"


DSML_CALLS = [("weather", {"city": "a</b>", "days": 3, "zip": "75001"}), NOW]
XTML_CALLS = xtml(
    "tools",
    xtml(
        "call",
        xtml("argument", 'Paris, "the" city\n{é}', ' key="city" type="string"')
        + xtml("argument", "3", ' key="days" type="number"'),
        ' tool="weather" index="1"',
    )
    + xtml("call", "", ' tool="now" index="2"'),
)
XML_HAIRY = (
    "<invoke name=\"weather\">\n<parameter name=\"city\">a</b></parameter>\n<parameter name=\"metric\">true</parameter>\n"
    "<parameter name=\"tags\">[\"x\", {\"y\": null}]</parameter>\n<parameter name=\"extra\">{'k': 'v]'}</parameter>\n</invoke>"
)  # fmt: skip

SAID = (
    Said("hermes", HERMES, f"<tool_call>\n{_json(PARIS)}\n</tool_call>", [PARIS]),
    Said(
        "hermes, twice behind text",
        HERMES,
        f"Let me look. \n\n<tool_call>\n{_json(HAIRY)}\n</tool_call>\n<tool_call>\n{_json(NOW)}\n</tool_call>",
        [HAIRY, NOW],
        "Let me look.",
    ),
    Said("hermes, no end tag", HERMES, f"<tool_call>{_json(PARIS)}", [PARIS]),
    Said("hermes, arguments first", HERMES, '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', [("weather", {"days": 1})]),
    Said("hermes, wrong types", HERMES, '<tool_call>{"name": "weather", "arguments": {"city": 5, "days": "3", "metric": "True", "tags": "[1]"}}</tool_call>', [("weather", {"city": "5", "days": 3, "metric": True, "tags": [1]})]),
    Said("hermes, arguments as text", HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 3}"}</tool_call>', [("weather", {"days": 3})]),
    Said("hermes, raw line breaks", HERMES, '<tool_call>{"name": "write_file", "arguments": {"text": "a\n\tb\\d"}}</tool_call>', [("write_file", {"text": "a\n\tb\\d"})]),
    Said("hermes, special tokens", HERMES, f"<tool_call>{_json(PARIS)}</tool_call>", [PARIS], specials=("<tool_call>", "</tool_call>")),
    Said("reasoning, then text", THINK, "<think>\nHm, 2 < 3.\n</think>\n\nYes \u00e9. ", (), "Yes \u00e9. ", "Hm, 2 < 3."),
    Said("reasoning that the prompt opened", THINK, "Hm.\n</think>\n\nYes", (), "Yes", "Hm.", prompt="<|assistant|><think>\n"),
    Said("reasoning opened twice", THINK, "\n<think>Hm.</think>Yes", (), "Yes", "Hm.", prompt="<|assistant|><think>"),
    Said("reasoning never closed", THINK, "<think>Hm, well", (), "", "Hm, well"),
    Said("reasoning without an opener", "{{ x.split('</think>') }}", "Hm.</think>\nYes", (), "Yes", "Hm."),
    Said("a closer too many", THINK, "</think>\n\nYes", (), "Yes", prompt="<|assistant|><think>\n\n</think>\n\n"),
    Said("reasoning, then a call", THINK, f"<think>Hm.</think>\n\n<tool_call>{_json(PARIS)}</tool_call>\n", [PARIS], "", "Hm."),
    Said("a call inside reasoning", THINK, f"<think>I should check.\n<tool_call>{_json(PARIS)}</tool_call>\n</think>\nDone", [PARIS], "Done", "I should check."),
    Said("thinking tags", HERMES + "</thinking>", "<thinking>a</thinking>b", (), "b", "a"),
    Said("magistral", "x", "[THINK]a[/THINK]b", (), "b", "a", specials=("[THINK]", "[/THINK]")),
    Said("gemma channel", "x", "<|channel>thought\na<channel|>b", (), "b", "a", specials=("<|channel>", "<channel|>")),
    Said("qwen3 coder", CODER, f"I will.\n{QWEN_PARIS}\n{QWEN_PARIS}", [PARIS, PARIS], "I will."),
    Said("qwen3 coder, no outer tag", CODER, "<function=weather><parameter=days>\n3\n</parameter></function></tool_call>", [("weather", {"days": 3})]),
    Said("qwen3 coder, last tags forgotten", CODER, "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>", [("weather", {"days": 3})]),
    Said("qwen3 coder, nothing given", CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    Said("glm", "<arg_key><tool_call>", f"{GLM_PARIS}\n{GLM_PARIS}", [PARIS, PARIS]),
    Said("glm, nothing given", "<arg_key><tool_call>", "<tool_call>now</tool_call>", [NOW]),
    Said("minimax", "<minimax:tool_call>", f"Ok<minimax:tool_call>\n{XML_HAIRY}\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>", [HAIRY, NOW], "Ok"),
    Said("minicpm", '<function name="<param name="', '<function name="weather"><param name="city"><![CDATA[a</b>]]></param><param name="days">2</param></function>\n<function name="now"></function>', [("weather", {"city": "a</b>", "days": 2}), NOW]),
    Said("muse", "<atem:function_calls>", '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city" string="true">a b</atem:parameter>\n</atem:invoke>\n</atem:function_calls>', [("weather", {"city": "a b"})]),
    Said("longcat", "<longcat_tool_call>", "<longcat_tool_call>weather\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>", [("weather", {"days": 3})]),
    Said("mistral, list", "[TOOL_CALLS]", f"[TOOL_CALLS] [{_json(PARIS)}, {_json(NOW)}]", [PARIS, NOW], specials=MISTRAL),
    Said("mistral, headers", "[TOOL_CALLS]", f"Ok[TOOL_CALLS]weather[ARGS]{_arguments(PARIS)}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", [PARIS, NOW], "Ok", specials=MISTRAL),
    Said("mistral, names alone", "[TOOL_CALLS]", f"[TOOL_CALLS]weather{_arguments(PARIS)}", [PARIS], specials=MISTRAL[:1]),
    Said("llama", "<|python_tag|>", _json(PARIS, "parameters"), [PARIS], specials=("<|python_tag|>",)),
    Said("llama, tag, twice", "<|python_tag|>", f"<|python_tag|>{_json(PARIS, 'parameters')}; {_json(NOW, 'parameters')}", [PARIS, NOW], specials=("<|python_tag|>",)),
    Said("llama, typed", "<|python_tag|>", '{"type": "function", "name": "weather", "parameters": {"days": "3"}}', [("weather", {"days": 3})]),
    Said("llama, nested", "<|python_tag|>", '{"type": "function", "function": {"name": "weather", "parameters": {"days": 3}}}', [("weather", {"days": 3})]),
    Said("deepseek v3", "<｜tool▁call▁begin｜>", f"Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{_arguments(PARIS)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [PARIS, NOW], "Ok", specials=DEEPSEEK),
    Said("deepseek v3.1", "<｜tool▁call▁begin｜>", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_arguments(HAIRY)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [HAIRY], specials=DEEPSEEK),
    Said("kimi k2", "<|tool_call_begin|>", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_arguments(PARIS)}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>", [PARIS, NOW], specials=KIMI),
    Said("lfm2", "<|tool_list_start|>", "<|tool_call_start|>[weather(city=\"a, 'b' \\n\\u00e9\", days=3, metric=True, tags=['x', {'y': null}]), now()]<|tool_call_end|>Sure", [("weather", {"city": "a, 'b' \né", "days": 3, "metric": True, "tags": ["x", {"y": None}]}), NOW], "Sure", specials=LFM),
    Said("gemma4", "<|tool_call><tool_call|>", 'Ok<|tool_call>call:weather{city:<|"|>a {b}, c:<|"|>,days:3,tags:[<|"|>x<|"|>,{y:null}],extra:{k:<|"|>v]<|"|>}}<tool_call|>', [("weather", {"city": "a {b}, c:", "days": 3, "tags": ["x", {"y": None}], "extra": {"k": "v]"}})], "Ok", specials=("<|tool_call>", "<tool_call|>", '<|"|>')),
    Said("function gemma", "<start_function_call>", "<start_function_call>call:weather{city:<escape>a,b<escape>,days:3}<end_function_call>", [("weather", {"city": "a,b", "days": 3})], specials=("<start_function_call>", "<end_function_call>", "<escape>")),
    Said("granite", "<|tool_call|><|/tool_call|>", f"<|tool_call|>[{_json(PARIS)}]<|/tool_call|>", [PARIS], specials=("<|tool_call|>", "<|/tool_call|>")),
    Said("harmony, text", "x", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes", (), "Yes", "Hm.", HARMONY),
    Said("harmony, call", "x", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_arguments(PARIS)}", [PARIS], "", "Hm.", HARMONY),
    Said("harmony, preamble and recipient first", "x", f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{_arguments(PARIS)}<|call|>", [PARIS], "First.", "", HARMONY),
    Said("deepseek dsml", "｜DSML｜function_calls>", "Ok\n\n" + dsml("function_calls"), DSML_CALLS, "Ok", specials=DSML),
    Said("deepseek dsml, tool_calls", "｜DSML｜tool_calls>", dsml("tool_calls"), DSML_CALLS),
    Said("deepseek dsml, vocabulary, inside reasoning", "<think></think>", f"<think>Hm.\n\n{dsml('function_calls')}", DSML_CALLS, "", "Hm.", specials=DSML),
    Said("deepseek dsml, prose", "｜DSML｜function_calls>", "Begin with <｜DSML｜function_calls> and <｜DSML｜invoke name=\"f\">.", (), "Begin with <｜DSML｜function_calls> and <｜DSML｜invoke name=\"f\">."),
    Said("kimi k3", "x", xtml("think", "Hm.") + xtml("response", "Let me look.") + XTML_CALLS + "<|close|>message<|sep|>", [PARIS, NOW], "Let me look.", "Hm.", XTML),
    Said("kimi k3, an object", "x", xtml("tools", xtml("call", xtml("json", _arguments(HAIRY), ' type="object"'), ' tool="weather" index="1"')), [HAIRY], specials=XTML),
    Said("kimi k3, inside reasoning", "x", f"Hm.{XTML_CALLS}", [PARIS, NOW], "", "Hm.", XTML, prompt="<|open|>think<|sep|>"),
    Said("kimi k3, no closer of reasoning", "x", f"<|open|>think<|sep|>Hm.{xtml('response', 'Yes')}", (), "Yes", "Hm.", XTML),
    Said("kimi k3, in code", "x", f"Write `{XTML_CALLS}`.", (), f"Write `{XTML_CALLS}`.", specials=XTML),
    Said("kimi k2, inside reasoning", "<|tool_call_begin|><think></think>", f"<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_arguments(PARIS)}<|tool_call_end|><|tool_calls_section_end|>", [PARIS], "", "Hm.", KIMI),
    Said("llama 4", "<|python_start|>", f"{PYTHON_PARIS}, now()]", [PARIS, NOW], specials=LLAMA4),
    Said("llama 4, markers", "<|python_start|>", f"Ok<|python_start|>{PYTHON_PARIS}]<|python_end|>", [PARIS], "Ok", specials=LLAMA4),
    Said("llama 4, JSON", "<|python_start|>", _json(PARIS, "parameters") + _json(NOW, "parameters"), [PARIS, NOW], specials=LLAMA4),
    Said("llama 4, vocabulary", "x", f"<|python_start|>[{_json(PARIS, 'parameters')}]<|python_end|>", [PARIS], specials=LLAMA4),
    Said("llama 4, a list that is no call", "<|python_start|>", "[1] Smith (2001), [weather] Jones", (), "[1] Smith (2001), [weather] Jones", specials=LLAMA4),
    Said("llama 3.2, python", "[func_name1(", "[now()]", [NOW]),
    Said("muse, all channels", "<atem:function_calls>", ' to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Ok.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>', [("weather", {"days": 3})], "Ok.", "Hm.", ATEM),
    Said("muse, a call without a message", "<atem:function_calls>", ' to=now<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>', [NOW], specials=ATEM),
    Said("muse, reasoning that the prompt opened", "x", "Hm.<|eom|><|start|>assistant to=user<|message|>Yes", (), "Yes", "Hm.", ATEM, "<|start|>assistant to=self<|message|>"),
    Said("muse, a call inside reasoning", "x", ' to=self<|message|>Hm.<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>', [NOW], "", "Hm.", ATEM),
    Said("muse, no header", "x", "It goes to=you and <atem:function_calls> is a tag.", (), "It goes to=you and <atem:function_calls> is a tag.", specials=ATEM),
    Said("seed", "<seed:tool_call>", "<seed:think>Hm.</seed:think>" + QWEN_PARIS.replace("tool_call>", "seed:tool_call>"), [PARIS], "", "Hm.", specials=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")),
    Said("cohere", "<|START_ACTION|>", '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"days": 3}}\n]<|END_ACTION|>', [("weather", {"days": 3})], "", "Hm.", COHERE),
    Said("cohere, text", "<|START_ACTION|>", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", (), "Yes", "Hm.", COHERE),
    Said("olmo", "<function_calls>", f"Ok\n<function_calls>{PYTHON_PARIS[1:]}\nnow()\n</function_calls>", [PARIS, NOW], "Ok"),
    Said("nemotron", "<TOOLCALL>", f"<TOOLCALL>[{_json(PARIS)}, {_json(NOW)}]</TOOLCALL>", [PARIS, NOW]),
    Said("jamba", "<tool_calls>", f"<tool_calls>[\n{_json(PARIS)}\n]</tool_calls>", [PARIS]),
    Said("internlm", "<|action_start|><|plugin|>", f"Ok<|action_start|><|plugin|>\n{_json(PARIS, 'parameters')}<|action_end|>", [PARIS], "Ok", specials=("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    Said("prose in code", HERMES, f"Write `<tool_call>{_json(NOW)}</tool_call>` to call.", (), f"Write `<tool_call>{_json(NOW)}</tool_call>` to call."),
    Said("prose in a fence", HERMES, f"So:\n```xml\n<tool_call>{_json(NOW)}</tool_call>\n```\nOk", (), f"So:\n```xml\n<tool_call>{_json(NOW)}</tool_call>\n```\nOk"),
    Said("prose about the tag", HERMES, "Use the <tool_call> tag, or <function=name>.", (), "Use the <tool_call> tag, or <function=name>."),
    Said("an unknown function", HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', (), '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
    Said("no JSON", HERMES, '<tool_call>{"name": "now", "arguments": {...}}</tool_call>', (), '<tool_call>{"name": "now", "arguments": {...}}</tool_call>'),
    Said("JSON that is no call", "<|python_tag|>", ' {"city": "Paris"}\n', (), ' {"city": "Paris"}\n'),
    Said("markers in the answer's code", THINK, "Close with `</think>`, open with <think>.", (), "Close with `</think>`, open with <think>."),
    Said("white space only", THINK, " \n", (), " \n"),
    Said("plain text", THINK, "  a < b [c] ", (), "  a < b [c] "),
)  # fmt: skip
