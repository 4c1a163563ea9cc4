"""Images keep their place through every kind of chat template."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes_engine import TEMPLATE, tokenizer
from treadle.errors import BadRequest
from treadle.prompt.conversation import ImageRef, normalise
from treadle.prompt.pictures import Ways, behind_results, expanded, for_template, image_refs, ways_of
from treadle.prompt.template import merge, render
from treadle.prompt.tools import in_words

HEAD = "{% for m in messages %}<|{{ m.role }}|>"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PARTS = "{% for p in m.content %}{% if p.type == 'image' %}<IMG>{% else %}{{ p.text }}{% endif %}{% endfor %}"
BOTH = HEAD + "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}" + TAIL
LISTS = HEAD + PARTS + TAIL
NOT_IN_RESULTS = (
    HEAD
    + "{% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}{{ raise_exception('no') }}{% else %}"
    + PARTS
    + "{% endif %}"
    + TAIL
)


def ref(name: str, place: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": ImageRef(name, f"messages[0].content[{place}]")}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def written(template: str, *messages: dict[str, Any], marker: str | None = "<IMG>") -> str:
    made = tokenizer(template)
    return render(made, for_template(made, messages, marker))


@pytest.mark.parametrize(
    ("template", "ways"),
    [
        (TEMPLATE, Ways(text=True, lists=True, parts=False, results=False)),
        (BOTH, Ways(text=True, lists=True, parts=True, results=True)),
        (LISTS, Ways(text=False, lists=True, parts=True, results=True)),
        (NOT_IN_RESULTS, Ways(text=True, lists=True, parts=True, results=False)),
    ],
    ids=["text", "both", "lists", "not in results"],
)
def test_what_a_template_reads_is_found_by_asking_it(template: str, ways: Ways) -> None:
    assert ways_of(tokenizer(template), "<IMG>") == ways


@pytest.mark.parametrize("template", [BOTH, LISTS, NOT_IN_RESULTS], ids=["both", "lists", "not in results"])
def test_images_stand_between_the_texts_where_the_client_put_them(template: str) -> None:
    content = [text("a"), ref("1"), ref("2"), text("b")]
    made = written(template, {"role": "user", "content": content}, {"role": "assistant", "content": "c"},
                   {"role": "user", "content": "d"})  # fmt: skip
    assert made == "<|user|>a<IMG><IMG>b<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"


def test_a_template_of_text_alone_gets_the_marker_in_the_text() -> None:
    made = written(TEMPLATE, {"role": "user", "content": [text("a"), ref("1"), text("b")]})
    assert made == "<|user|>a\n<IMG>\nb<|end|><|assistant|>"


@pytest.mark.parametrize("marker", ["<IMG>", None])
def test_a_template_of_lists_alone_gets_texts_as_lists(marker: str | None) -> None:
    assert written(LISTS, {"role": "user", "content": "a"}, marker=marker) == "<|user|>a<|end|><|assistant|>"


def test_text_alone_is_what_it_was() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert for_template(tokenizer(), messages, None) == messages


RESULTS = [
    {"role": "user", "content": "go"},
    {"role": "tool", "content": [text("one"), ref("1")]},
    {"role": "tool", "content": [ref("2"), text("two"), text("three")]},
]


def test_images_of_results_go_behind_them_where_the_template_has_no_place_for_them() -> None:
    made = written(NOT_IN_RESULTS, *RESULTS, {"role": "user", "content": "so?"})
    results = "<|tool|>one<|end|><|tool|>two\nthree<|end|>"
    assert made == f"<|user|>go<|end|>{results}<|user|><IMG><IMG>so?<|end|><|assistant|>"
    assert written(BOTH, *RESULTS).count("<IMG>") == 2


def test_images_behind_results_become_a_message_of_their_own_before_others() -> None:
    made = behind_results([*RESULTS, {"role": "assistant", "content": "x"}])
    assert [m["role"] for m in made] == ["user", "tool", "tool", "user", "assistant"]
    assert [m["role"] for m in behind_results(RESULTS)] == ["user", "tool", "tool", "user"]
    assert [r.url for r in image_refs(made)] == ["1", "2"]


def test_results_in_words_keep_their_images() -> None:
    (made,) = in_words([RESULTS[1]], [])
    assert made["content"] == [text("<tool_response>\n"), text("one"), ref("1"), text("\n</tool_response>")]


def test_merged_messages_keep_their_images() -> None:
    (made,) = merge([{"role": "user", "content": "a"}, {"role": "user", "content": [ref("1"), text("b")]}])
    assert made["content"] == [text("a"), text("\n\n"), ref("1"), text("b")]


def test_what_stands_for_images_takes_the_place_of_the_markers() -> None:
    assert expanded("a<i>b<i>c", "<i>", ["[1]", "[2]"]) == "a[1]b[2]c"
    for shown in ([], ["1"], ["1", "2", "3"]):
        with pytest.raises(BadRequest, match="2 places for"):
            expanded("a<i>b<i>c", "<i>", shown)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:x"}},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "input_image", "image_url": "data:x"},
        {"type": "image", "image": "data:x"},
        {"type": "image", "url": "data:x"},
    ],
)
def test_all_shapes_of_image_parts_are_read(part: dict[str, Any]) -> None:
    (made,) = normalise([{"role": "user", "content": [text("a"), text("b"), part]}], blind=None)
    assert made["content"] == [
        text("a\nb"),
        {"type": "image", "image": ImageRef("data:x", "messages[0].content[2]")},
    ]


@pytest.mark.parametrize("detail", [None, "auto", "high", "original", "low"])
def test_detail_is_read(detail: str | None) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:x", "detail": detail}}
    (made,) = normalise([{"role": "user", "content": [part]}], blind=None)
    assert made["content"][0]["image"].low == (detail == "low")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "messages[0].content[0].image_url.detail"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": [1]}}, "messages[0].content[0].image_url.detail"),
    ],
)
def test_a_bad_image_part_names_its_field(part: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        normalise([{"role": "user", "content": [part]}], blind=None)
    assert caught.value.param == param


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_of_other_roles_are_refused(role: str) -> None:
    with pytest.raises(BadRequest, match="Images belong to messages of user and tool"):
        normalise([{"role": role, "content": [{"type": "image", "image": "data:x"}]}], blind=None)


def test_why_a_model_is_blind_is_what_the_client_is_told() -> None:
    with pytest.raises(BadRequest, match="The lens cap is on"):
        normalise([{"role": "user", "content": [{"type": "image", "image": "x"}]}], blind="The lens cap is on.")
