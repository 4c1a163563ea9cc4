"""What may be said in reply to a request with tools, a format and reasoning, in every combination."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.api.test_tools import THINKING, model_with
from tests.fakes_engine import FakeEngine, FakeModel, Script, say, tokenizer
from tests.live import Live, live
from tests.output.spoken import ATEM, HARMONY, speaker
from treadle.grammar.compile import grammars_of
from treadle.types import Finish, Language, Request

ASK: Any = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
FORMAT: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
NAMED: Any = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "parameters": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CITY = {"type": "string"}
TOOLS: Any = {"tools": [tool("weather", city=CITY), tool("time", zone={"enum": ["utc", "cet"]})]}
STRICT: Any = {"tools": [tool("weather", strict=True, city=CITY), tool("time", zone={"enum": ["utc", "cet"]})]}
PARIS, UTC, JSON, PROSE = call("weather", city="Paris"), call("time", zone="utc"), '{"z": 1}', "Hello, you."
WRONG = call("weather", town="Paris")


class Planned:
    script: Script = say("hello")

    def __call__(self, request: Request) -> Script:
        return self.script


PLAN = Planned()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(PLAN, **model_with(THINKING))) as running:
        yield running


def asked(server: Live, path: str = "/v1/chat/completions", **body: Any) -> Request:
    """The engine request that comes of a chat request."""
    answer = server.post(path, body if "input" in body else {**ASK, **body})
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1]


def allows(model: Any, request: Request, text: str) -> bool:
    """Whether the whole reply may be generated, and end there."""
    assert request.constraint is not None
    grammars = grammars_of(model.tokenizer, model.caps.vocab_size, model.stop_ids)
    matcher = grammars.matcher(request.constraint, request.stop_ids)
    (end,) = model.stop_ids
    for id in [*model.tokenizer.encode(text, add_special_tokens=False), end]:
        if not matcher.mask()[id // 32] >> (id % 32) & 1:
            return False
        if id != end:
            matcher.accept(id)
    return True


def allowed(server: Live, request: Request, *texts: str) -> list[bool]:
    return [allows(server.engine.model, request, text) for text in texts]


def test_with_a_format_the_reply_is_calls_or_that_format(server: Live) -> None:
    request = asked(server, **TOOLS, **FORMAT)
    assert all(allowed(server, request, JSON, PARIS, UTC, f"{PARIS}\n{UTC}"))
    assert not any(allowed(server, request, PROSE, WRONG, f"{JSON}{PARIS}", f"{PARIS}{JSON}", '{"z": "1"}', ""))


@pytest.mark.parametrize("choice", [{"tool_choice": "required"}, NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made_leaves_no_room_for_the_format(server: Live, choice: Any) -> None:
    named = choice is NAMED
    for shape in (FORMAT, {}, {"guided_regex": "a+"}):
        request = asked(server, **TOOLS, **shape, **choice)
        assert allowed(server, request, PARIS, UTC, f"{PARIS}\n{UTC}") == [True, not named, not named]
        assert not any(allowed(server, request, JSON, PROSE, WRONG, "aa", ""))


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        ({"guided_regex": "a+/"}, "aa/", "b"),
        ({"guided_choice": ["yes", 'n"o']}, 'n"o', "no"),
        ({"guided_grammar": 'start: "(" start ")" | "x" "}"'}, "((x}))", "(x}"),
        ({"response_format": {"type": "json_object"}}, '{"any": [1]}', "[1]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_way_to_constrain_goes_together_with_tools(server: Live, shape: Any, good: str, bad: str) -> None:
    request = asked(server, **TOOLS, **shape)
    assert allowed(server, request, good, PARIS, bad, PROSE) == [True, True, False, False]
    free = asked(server, **TOOLS, **shape, tool_choice="none")
    assert allowed(server, free, good, PARIS, bad) == [True, False, False]


def test_a_strict_function_is_held_to_its_schema_amid_free_text(server: Live) -> None:
    request = asked(server, **STRICT)
    assert all(allowed(server, request, "", PROSE, PARIS, f"{PROSE}{PARIS} {PROSE}", call("time", any=[1])))
    assert not any(allowed(server, request, WRONG, f"{PROSE}{WRONG}", call("rm"), "<tool_call>x"))
    assert asked(server, **TOOLS).constraint is None


def test_calls_that_are_not_parallel_are_one_call(server: Live) -> None:
    for rest in ({**STRICT}, {**TOOLS, **FORMAT}, {**TOOLS, "tool_choice": "required"}):
        request = asked(server, **rest, parallel_tool_calls=False)
        assert allowed(server, request, PARIS, f"{PARIS}\n{UTC}") == [True, False]


def test_a_thinking_model_may_think_before_what_is_constrained(server: Live) -> None:
    for rest, good in (({**FORMAT}, JSON), ({**TOOLS, **FORMAT}, PARIS), ({**TOOLS, **NAMED}, PARIS), (STRICT, PARIS)):
        request = asked(server, **rest)
        assert all(allowed(server, request, good, f"<think>{PROSE}</think>{good}"))
        off = asked(server, **rest, reasoning_effort="none")
        assert allowed(server, off, good, f"<think>{PROSE}</think>{good}") == [True, rest is STRICT]
        off = asked(server, **rest, chat_template_kwargs={"enable_thinking": False})
        assert off.constraint is not None and off.constraint.reasoning is None
    request = asked(server, **FORMAT)
    assert not any(allowed(server, request, f"<think>{PROSE}", f"<think>{PROSE}</think>", f"<thin{JSON}"))


def test_reasoning_that_the_prompt_opened_comes_first() -> None:
    opened = THINKING.replace("<|assistant|>", "<|assistant|><think>\n")
    with live(FakeEngine(PLAN, **model_with(opened))) as server:
        request = asked(server, **FORMAT)
        assert allowed(server, request, f"{PROSE}</think>{JSON}", JSON) == [True, False]
        assert allowed(server, request, f"{JSON}</think>{JSON}") == [True]


BUDGETED = [
    ("/v1/chat/completions", {"thinking_budget": 3}),
    ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 3}}),
    ("/v1/responses", {"input": "hi", "thinking_budget": 3}),
]


@pytest.mark.parametrize(("path", "body"), BUDGETED, ids=[path for path, _ in BUDGETED])
def test_a_thinking_budget_reaches_the_engine_on_every_route(server: Live, path: str, body: Any) -> None:
    request = asked(server, path, **body)
    assert request.constraint is not None and request.constraint.kind is Language.FREE
    assert all(allowed(server, request, PROSE, PARIS, "<think>abc</think>ok", "<think>a</think>", "<think>ab"))
    assert not any(allowed(server, request, "<think>abcd</think>", "<think>abc</thi"))


def test_a_budget_goes_together_with_a_format_and_tools(server: Live) -> None:
    for rest, good in (({**FORMAT}, JSON), ({**TOOLS, **FORMAT}, PARIS), ({**TOOLS, **NAMED}, PARIS)):
        request = asked(server, **rest, thinking_budget=2)
        assert allowed(server, request, f"<think>ab</think>{good}", f"<think>abc</think>{good}") == [True, False]


def test_a_budget_that_can_have_no_effect_costs_nothing(server: Live) -> None:
    for rest in ({"thinking_budget": 50, "max_tokens": 50}, {"thinking_budget": 10**6}):
        assert asked(server, **rest).constraint is None
    assert asked(server, thinking_budget=5, reasoning_effort="none").constraint is None
    disabled = {"max_tokens": 50, "thinking": {"type": "disabled", "budget_tokens": 3}}
    assert asked(server, "/v1/messages", **disabled).constraint is None
    with live(FakeEngine()) as plain:
        assert asked(plain, thinking_budget=3).constraint is None


@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_a_budget_that_is_no_count_is_refused(server: Live, value: Any) -> None:
    answer = server.post("/v1/chat/completions", {**ASK, "thinking_budget": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_a_budget_cut_reads_as_reasoning_and_answer(server: Live, stream: bool) -> None:
    PLAN.script = say("<think>Hm, so</think>Yes.")
    answer = server.post("/v1/chat/completions", {**ASK, "thinking_budget": 4, "stream": stream})
    PLAN.script = say("hello")
    text = answer.text
    assert answer.status_code == 200
    if not stream:
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm, so")
    else:
        assert "reasoning_content" in text and "</think>" not in text


def test_a_cap_inside_reasoning_ends_cleanly(server: Live) -> None:
    PLAN.script = Script(say("<think>Hm, so</think>{}").steps[:9], finish=Finish.LENGTH)
    choice = server.post("/v1/chat/completions", {**ASK, **FORMAT, "max_tokens": 9}).json()["choices"][0]
    PLAN.script = say("hello")
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None


STRICT_ROUTES: Any = [
    (
        "/v1/messages",
        {
            "max_tokens": 50,
            "tools": [{"name": "weather", "input_schema": TOOLS["tools"][0]["function"]["parameters"], "strict": True}],
        },
    ),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **STRICT["tools"][0]["function"]}]}),
]


@pytest.mark.parametrize(("path", "body"), STRICT_ROUTES, ids=[path for path, _ in STRICT_ROUTES])
def test_strict_means_the_same_on_the_other_routes(server: Live, path: str, body: Any) -> None:
    request = asked(server, path, **body)
    assert allowed(server, request, PROSE, f"{PROSE}{PARIS}", WRONG) == [True, True, False]


CODER = "{{ tools }}<tool_call>\n<function=f>{% for m in messages %}{{ m.content }}{% endfor %}"
ODD: Any = [tool("f", strict=True, x={"type": "string", "contentEncoding": "base64"})]


def test_what_a_models_own_syntax_cannot_be_held_to_is_refused_or_made_in_words() -> None:
    with live(FakeEngine(PLAN, **model_with(CODER))) as server:
        for rest in ({}, FORMAT):
            answer = server.post("/v1/chat/completions", {**ASK, **rest, "tools": ODD})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "tools") and "contentEncoding" in error["message"]
        coder = "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"
        request = asked(server, tools=[tool("f", x=CITY)], tool_choice="required")
        assert allowed(server, request, coder, call("f", x="a")) == [True, False]
        words: Any = [tool("f", x={"type": ["string", "integer"]})]
        request = asked(server, tools=words, tool_choice="required")
        assert allowed(server, request, coder, call("f", x="a"), call("f", x=1)) == [False, True, True]
        PLAN.script = say(call("f", x=1))
        answer = server.post("/v1/chat/completions", {**ASK, "tools": words, "tool_choice": "required"})
        PLAN.script = say("hello")
        (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("f", {"x": 1})


def test_a_tool_whose_schema_cannot_be_enforced_is_refused_only_where_it_must_be(server: Live) -> None:
    odd: Any = {"tools": [tool("f", x={"not": {}})]}
    assert asked(server, **odd).constraint is None
    for rest in (FORMAT, {"tool_choice": "required"}):
        answer = server.post("/v1/chat/completions", {**ASK, **odd, **rest})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    answer = server.post("/v1/chat/completions", {**ASK, "tools": [tool("f", strict=1)]})  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


HARMONY_TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
HARMONY_PARIS = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_a_model_of_channels_thinks_and_then_answers_or_calls() -> None:
    made = speaker(HARMONY_TEMPLATE, "<|return|>", *HARMONY)
    end = frozenset({int(made.convert_tokens_to_ids("<|return|>"))})
    caps = replace(FakeModel().caps, vocab_size=len(made), context_length=8192)
    final = "<|channel|>final<|message|>"
    with live(FakeEngine(PLAN, tokenizer=made, chat_template=HARMONY_TEMPLATE, caps=caps, stop_ids=end)) as server:
        request = asked(server, **FORMAT)
        assert all(
            allowed(server, request, f"{final}{JSON}", f"{THOUGHT}{final}{JSON}", f"{THOUGHT}{THOUGHT}{final}{JSON}")
        )
        assert not any(allowed(server, request, JSON, THOUGHT, f"{THOUGHT}{final}{PROSE}", HARMONY_PARIS))
        request = asked(server, **TOOLS, **FORMAT)
        assert all(allowed(server, request, f"{final}{JSON}", f"{THOUGHT}{HARMONY_PARIS}", HARMONY_PARIS))
        request = asked(server, **TOOLS, tool_choice="required")
        assert allowed(server, request, f"{THOUGHT}{HARMONY_PARIS}", f"{THOUGHT}{final}{JSON}") == [True, False]
        request = asked(server, **STRICT)
        wrong = HARMONY_PARIS.replace("city", "town")
        assert allowed(server, request, f"{final}{PROSE}", f"{THOUGHT}{HARMONY_PARIS}", wrong) == [True, True, False]
        request = asked(server, thinking_budget=2, **FORMAT)
        assert allowed(server, request, f"{THOUGHT}{final}{JSON}", f"{THOUGHT.replace('Hm.', 'Hm')}{final}{JSON}") == [
            False,
            True,
        ]


ATEM_TEMPLATE = (
    "<atem:function_calls>{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eom|>"
    "{% endfor %}<|start|>assistant"
)
ATEM_THOUGHT = " to=self<|message|>Hm.<|eom|><|start|>assistant"
ATEM_PARIS = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Paris'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)


def test_a_call_of_muse_is_made_in_its_own_syntax() -> None:
    made = speaker(ATEM_TEMPLATE, "<|eot|>", *(token for token in ATEM if token != "<|eot|>"))
    end = frozenset({int(made.convert_tokens_to_ids("<|eot|>"))})
    caps = replace(FakeModel().caps, vocab_size=len(made), context_length=8192)
    final = " to=user<|message|>"
    with live(FakeEngine(PLAN, tokenizer=made, chat_template=ATEM_TEMPLATE, caps=caps, stop_ids=end)) as server:
        request = asked(server, **TOOLS, tool_choice="required")
        others = (f"{final}Hi", JSON, ATEM_PARIS.replace("city", "town"), ATEM_PARIS.replace("weather", "wether"))
        assert all(allowed(server, request, ATEM_PARIS, f"{ATEM_THOUGHT}{ATEM_PARIS}"))
        assert not any(allowed(server, request, *others))
        request = asked(server, **TOOLS, **FORMAT)
        assert all(allowed(server, request, f"{final}{JSON}", f"{ATEM_THOUGHT}{ATEM_PARIS}"))
        assert not any(allowed(server, request, f"{final}{PROSE}"))


def test_the_fake_tokenizer_spells_the_opener_in_several_tokens() -> None:
    assert len(tokenizer().encode("<think>", add_special_tokens=False)) > 1
