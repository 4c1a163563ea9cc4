"""Reasoning and calls are found in what each family writes, however the tokens come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.output.spoken import HERMES, NOW, PARIS, SAID, THINK, TOOLS, Heard, Said, hear
from treadle.output.form import form_of
from treadle.types import Finish

BY_NAME = {said.name: said for said in SAID}
WITH_CALLS = [said for said in SAID if said.calls]
every = pytest.mark.parametrize("said", SAID, ids=lambda said: said.name)


@every
def test_a_reply_means_what_was_recorded(said: Said) -> None:
    heard = hear(said, [])
    assert (heard.text, heard.reasoning) == (said.text, said.reasoning)
    assert heard.parsed == list(said.calls)
    assert len(set(heard.call_ids)) == len(said.calls)


@every
def test_it_means_the_same_cut_at_any_place(said: Said) -> None:
    whole = without_fragments(hear(said, []))
    assert without_fragments(hear(said)) == whole
    for cut in range(1, len(said.ids)):
        assert without_fragments(hear(said, [cut])) == whole


@settings(max_examples=60)
@given(st.sampled_from(SAID), st.sets(st.integers(0, 400)), st.sampled_from(list(Finish)[:2]), st.integers(0, 400))
def test_a_reply_cut_off_anywhere_means_the_same_in_any_grouping(
    said: Said, cuts: set[int], finish: Finish, end: int
) -> None:
    ids = said.ids[: len(said.ids) - end % (len(said.ids) + 1)]
    assert without_fragments(hear(said, cuts, ids=ids, finish=finish)) == without_fragments(
        hear(said, [], ids=ids, finish=finish)
    )


@settings(max_examples=60)
@given(st.data(), st.text(max_size=12), st.text(max_size=12))
def test_any_noise_around_and_inside_is_read_the_same_in_any_grouping(data: st.DataObject, a: str, b: str) -> None:
    said = data.draw(st.sampled_from(SAID))
    at = data.draw(st.integers(0, len(said.said)))
    noisy = said.said[:at] + a + said.said[at:] + b
    ids = said.tokenizer.encode(noisy, add_special_tokens=False)
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    assert without_fragments(hear(said, cuts, ids=ids)) == without_fragments(hear(said, [], ids=ids))


@pytest.mark.parametrize("said", WITH_CALLS, ids=lambda said: said.name)
def test_a_call_that_is_cut_off_never_looks_complete(said: Said) -> None:
    """Arguments of a reply cut at its length are those of the whole, or not JSON at all."""
    whole = [json.loads(arguments) for _, arguments in hear(said, []).calls]
    for end in range(len(said.ids)):
        heard = hear(said, [], ids=said.ids[:end], finish=Finish.LENGTH)
        for made, (_, arguments) in zip(whole, heard.calls, strict=False):
            assert not is_json(arguments) or json.loads(arguments) == made
        assert heard.finish is Finish.LENGTH


@pytest.mark.parametrize("said", WITH_CALLS, ids=lambda said: said.name)
def test_an_end_of_calls_that_is_cut_off_is_no_text(said: Said) -> None:
    whole = hear(said, [])
    for end in range(len(said.ids)):
        heard = hear(said, [], ids=said.ids[:end], finish=Finish.LENGTH)
        if heard.calls == whole.calls and "\ufffd" not in heard.text:
            assert whole.text.startswith(heard.text)


@pytest.mark.parametrize("name", ["kimi k3", "kimi k3, an object", "kimi k3, no closer of reasoning"])
def test_a_frame_that_is_cut_off_is_no_text(name: str) -> None:
    """Cut after any token, in one piece or in many: no token of a frame is in the text or in the reasoning."""
    said = BY_NAME[name]
    whole = hear(said)
    for end in range(len(said.ids)):
        for cuts in ([], range(end)):
            heard = hear(said, cuts, ids=said.ids[:end], finish=Finish.LENGTH)
            text, section, _ = heard.text.partition("<|open|>tools<|sep|>")
            assert not (section and heard.calls)  # calls of which none has a name yet are shown as they are
            assert "<|" not in text + heard.reasoning
            if section:
                continue
            assert whole.text.startswith(heard.text.rstrip("\ufffd"))
            assert whole.reasoning.startswith(heard.reasoning.rstrip("\ufffd"))


def test_a_frame_that_is_cut_off_in_code_is_text() -> None:
    said = BY_NAME["kimi k3, in code"]
    ids = said.ids[: said.ids.index(said.tokenizer.convert_tokens_to_ids("<|open|>")) + 1]
    assert hear(said, ids=ids, finish=Finish.LENGTH).text == "Write `<|open|>"


@pytest.mark.parametrize(
    "name",
    [
        *("hermes", "qwen3 coder", "glm", "mistral, headers", "llama", "deepseek v3", "lfm2", "gemma4", "kimi k2"),
        *("deepseek dsml", "kimi k3", "kimi k3, an object", "llama 4", "muse, all channels", "cohere", "olmo"),
    ],
)
def test_long_arguments_are_streamed(name: str) -> None:
    said = BY_NAME[name]
    ids = said.tokenizer.encode(long_call(name), add_special_tokens=False)
    heard = hear(said, range(0, len(ids), 40), ids=ids)
    assert heard.parsed == [("write_file", {"text": "word " * 400})]
    assert heard.fragments >= 10


def long_call(name: str) -> str:
    text = "word " * 400
    arguments = json.dumps({"text": text})
    return {
        "hermes": f'<tool_call>{{"name": "write_file", "arguments": {arguments}}}</tool_call>',
        "qwen3 coder": f"<tool_call><function=write_file><parameter=text>\n{text}\n</parameter></function></tool_call>",
        "glm": f"<tool_call>write_file\n<arg_key>text</arg_key><arg_value>{text}</arg_value></tool_call>",
        "mistral, headers": f"[TOOL_CALLS]write_file[ARGS]{arguments}",
        "llama": f'{{"name": "write_file", "parameters": {arguments}}}',
        "deepseek v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file\n"
        f"```json\n{arguments}\n```",
        "lfm2": f'<|tool_call_start|>[write_file(text="{text}")]<|tool_call_end|>',
        "gemma4": f'<|tool_call>call:write_file{{text:<|"|>{text}<|"|>}}<tool_call|>',
        "kimi k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
        f"<|tool_call_argument_begin|>{arguments}",
        "deepseek dsml": '<｜DSML｜function_calls><｜DSML｜invoke name="write_file"><｜DSML｜parameter name="text">'
        f"{text}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        "kimi k3": '<|open|>tools<|sep|><|open|>call tool="write_file"<|sep|><|open|>argument key="text"<|sep|>'
        f"{text}<|close|>argument<|sep|><|close|>call<|sep|>",
        "kimi k3, an object": '<|open|>tools<|sep|><|open|>call tool="write_file"<|sep|><|open|>json<|sep|>'
        f"{arguments}<|close|>json<|sep|><|close|>call<|sep|>",
        "llama 4": f'[write_file(text="{text}")]',
        "muse, all channels": ' to=f<|message|><atem:function_calls><atem:invoke name="write_file">'
        f'<atem:parameter name="text">{text}</atem:parameter></atem:invoke></atem:function_calls>',
        "cohere": f'<|START_ACTION|>[{{"tool_name": "write_file", "parameters": {arguments}}}]',
        "olmo": f'<function_calls>write_file(text="{text}")</function_calls>',
    }[name]


def test_reasoning_tokens_are_those_of_the_reasoning() -> None:
    assert hear(BY_NAME["reasoning, then text"]).reasoning_tokens == len("\nHm, 2 < 3.\n")
    assert hear(BY_NAME["a closer too many"]).reasoning_tokens == 0
    assert hear(BY_NAME["plain text"]).reasoning_tokens == 0
    assert hear(Said("empty", THINK, "<think>\n\n</think>\n\nYes")).reasoning_tokens == 0


def test_log_probabilities_are_those_of_the_text() -> None:
    said = BY_NAME["reasoning, then text"]
    heard = hear(said)
    tokens = [logprob.token for logprob in heard.logprobs]
    assert said.tokenizer.decode(tokens).strip() == said.text.strip()
    plain = BY_NAME["plain text"]
    assert [logprob.token for logprob in hear(plain).logprobs] == plain.ids


MARKED = [said for said in WITH_CALLS if not said.reasoning and said.form.format and not said.form.frames]


@pytest.mark.parametrize("said", MARKED, ids=lambda said: said.name)
def test_calls_inside_reasoning_that_never_ends_are_found(said: Said) -> None:
    started = any(start in said.said for start in said.form.format.starts)  # type: ignore[union-attr]
    thinking = replace(said, template=said.template + "<think></think>", said="<think>Hm.\n" + said.said)
    assert hear(thinking).parsed == (list(said.calls) if started else [])


@pytest.mark.parametrize("said", [s for s in MARKED if "```" not in s.said], ids=lambda said: said.name)
def test_calls_in_a_block_of_code_are_shown(said: Said) -> None:
    shown = f"So:\n```\n{said.said}\n```\nOk"
    heard = hear(replace(said, said=shown))
    assert (heard.text, heard.calls) == (shown, [])


def test_one_call_only_where_the_client_wants_one() -> None:
    said = BY_NAME["hermes, twice behind text"]
    form = form_of(said.tokenizer, said.prompt, TOOLS, single=True)
    heard = hear(said, form=form)
    assert heard.parsed == list(said.calls[:1]) and heard.text == said.text


def test_without_tools_nothing_is_a_call_but_reasoning_is_reasoning() -> None:
    said = BY_NAME["reasoning, then a call"]
    heard = hear(said, form=form_of(said.tokenizer, said.prompt))
    assert heard.calls == [] and heard.reasoning == "Hm."
    assert heard.text.startswith("<tool_call>")


def test_the_prose_about_markers_in_a_prompt_opens_nothing() -> None:
    said = Said("x", THINK, "Yes", prompt="<|user|>What is <think>?<|assistant|>")
    assert hear(said).text == "Yes"


def test_a_broken_call_reaches_the_client_as_the_model_wrote_it() -> None:
    said = Said("x", HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Paris", oops}}</tool_call> Sorry')
    heard = hear(said)
    assert heard.calls == [("weather", '{"city": "Paris"oops}}')]
    assert heard.text == "Sorry"


def test_a_stop_string_ends_reasoning_and_calls_too() -> None:
    heard = hear(BY_NAME["reasoning, then text"], stops=["2 <"])
    assert (heard.text, heard.reasoning, heard.finish) == ("", "Hm,", Finish.STOP)


def test_other_models_formats_are_not_read() -> None:
    said = Said("x", "[TOOL_CALLS]", f"<tool_call>{json.dumps({'name': 'now', 'arguments': {}})}</tool_call>")
    assert hear(said).calls == [] and hear(said).text == said.said


def test_a_template_without_a_known_format_gets_the_one_it_is_told() -> None:
    said = Said(
        "x", "{{ messages }}", f"<tool_call>{json.dumps({'name': PARIS[0], 'arguments': PARIS[1]})}</tool_call>"
    )
    assert hear(said, form=form_of(said.tokenizer, "", TOOLS, native=False)).parsed == [PARIS]
    assert NOW[0] in form_of(said.tokenizer, "", TOOLS, native=False).tools  # type: ignore[operator]


def without_fragments(heard: Heard) -> dict[str, Any]:
    """What the client has in the end; how often it was told does not count."""
    return {key: value for key, value in vars(heard).items() if key != "fragments"}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
