"""Markers come from the template and the vocabulary; the prompt's end says whether reasoning is open."""

from __future__ import annotations

import pytest

from tests.output.spoken import speaker
from treadle.output.reasoning import Markers, find_markers, markers_of, template_effort

THINK = Markers("<think>", "</think>")


def test_markers_are_found_in_the_template_or_the_vocabulary() -> None:
    assert find_markers("{{ '<think>' }}...</think>", {}) == THINK
    assert find_markers("", {"<think>": 1, "</think>": 2}) == THINK
    assert find_markers("", {"<|channel>": 1, "<channel|>": 2}) == Markers("<|channel>thought", "<channel|>")
    assert find_markers("{{ messages }}", {"<think>": 1}) is None


def test_a_changed_template_is_read_anew() -> None:
    tokenizer = speaker("first", "<x>")
    assert markers_of(tokenizer) is None
    tokenizer.chat_template = "<think></think>"
    assert markers_of(tokenizer) == THINK


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("<|assistant|>", False),
        ("<|user|>what is <think><|assistant|>", False),
    ],
)
def test_the_end_of_the_prompt_opens_reasoning(prompt: str, opened: bool) -> None:
    assert THINK.opened_by(prompt) is opened


def test_a_template_that_only_cuts_at_the_closer_leaves_the_opener_out() -> None:
    found = find_markers("{{ content.split('</think>')[-1] }}", {})
    assert found is not None and found.assumed
    assert found.opened_by("<|assistant|>") and not found.opened_by("<|assistant|></think>")


def test_effort_reaches_the_switch_that_the_template_reads() -> None:
    assert template_effort("{% if enable_thinking %}", "none") == {"enable_thinking": False}
    assert template_effort("{% if enable_thinking %}", "low") == {"enable_thinking": True}
    assert template_effort("{% if thinking %}", "none") == {"thinking": False}
    assert template_effort("{{ reasoning_effort }}", "minimal") == {"reasoning_effort": "low"}
    assert template_effort("{{ messages }}", "none") == template_effort("{% if enable_thinking %}", None) == {}
