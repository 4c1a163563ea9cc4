"""A tiny trained model says what colour and shape is in which picture, whatever the loop does around it.

`train_shapes.py` makes the model.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live import Live, live, until
from tests.vision.shapes import COLOURS, NAMES, QUESTIONS, SHAPES, Thing, any_thing, draw
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import load_model
from treadle.models.sources import resolve

FOLDER = Path(__file__).parents[1] / "assets" / "shapes"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    config = Config(cache_gb=0.1)
    engine = Engine(lambda: load_model(resolve(str(FOLDER)), None), config)
    with live(engine) as running:  # type: ignore[arg-type]
        until(lambda: engine.state != "loading", 60)
        assert engine.state == "ready", engine.failure
        yield running


def image(thing: Thing, rng: np.random.Generator) -> dict[str, Any]:
    buffer = BytesIO()
    draw(thing, rng).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def named(things: list[Thing], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Each picture behind its name."""
    return [part for name, thing in zip(NAMES, things, strict=False) for part in (text(f" {name}"), image(thing, rng))]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ask(server: Live, *messages: dict[str, Any], **more: Any) -> tuple[str, int]:
    """(reply, cached tokens)."""
    response = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 4, **more})
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"], made["usage"]["prompt_tokens_details"]["cached_tokens"]


def question(kind: str, name: str) -> dict[str, Any]:
    return text(QUESTIONS[kind].format(name))


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_picture_is_told(server: Live, colour: str, shape: str) -> None:
    thing, rng = Thing(colour, shape), np.random.default_rng(len(colour) * 7 + len(shape))
    parts = named([thing], rng)
    for kind in QUESTIONS:
        assert ask(server, user(*parts, question(kind, "one")))[0] == thing.answer(kind, "one")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_each_of_several_pictures_is_told_apart(server: Live, seed: int, count: int) -> None:
    rng = np.random.default_rng(100 + seed)
    things = [any_thing(rng) for _ in range(count)]
    parts = named(things, rng)
    for name, thing in zip(NAMES, things, strict=False):
        assert ask(server, user(*parts, question("both", name)))[0] == thing.answer("both", name)


def test_pictures_of_earlier_turns_are_remembered_and_not_computed_again(server: Live) -> None:
    rng = np.random.default_rng(7)
    things = [Thing("red", "circle"), Thing("blue", "square"), Thing("yellow", "cross")]
    parts = named(things, rng)
    history = [user(*parts[:2], question("both", "one"))]
    asked = [
        ("two", things[1], parts[2:4]),
        ("three", things[2], parts[4:6]),
        ("one", things[0], []),
        ("two", things[1], []),
    ]
    reply, _ = ask(server, *history)
    assert reply == " one red circle"
    for name, thing, new in asked:
        history += [{"role": "assistant", "content": reply}, user(*new, question("both", name))]
        reply, cached = ask(server, *history)
        assert reply == thing.answer("both", name)
        assert cached > 20


def test_a_picture_that_is_replaced_is_seen_anew(server: Live) -> None:
    rng = np.random.default_rng(8)
    old, new = [Thing("red", "circle"), Thing("green", "cross")], [Thing("red", "circle"), Thing("purple", "square")]
    parts = named(old, rng)
    assert ask(server, user(*parts, question("both", "two")))[0] == " two green cross"
    changed = [*parts[:3], image(new[1], rng)]
    assert ask(server, user(*changed, question("both", "two")))[0] == " two purple square"
    swapped = [parts[0], changed[3], parts[2], parts[1]]
    assert ask(server, user(*swapped, question("both", "one")))[0] == " one purple square"
    assert ask(server, user(*swapped, question("both", "two")))[0] == " two red circle"
    reply, cached = ask(server, user(*parts, question("both", "two")))
    assert reply == " two green cross" and cached > 20


def test_conversations_about_different_pictures_run_together(server: Live) -> None:
    rng = np.random.default_rng(9)
    things = [[any_thing(rng) for _ in range(1 + n % 3)] for n in range(8)]
    last = [NAMES[len(line) - 1] for line in things]
    asked = [
        (user(*named(line, rng), question("both", name)), line[-1], name)
        for line, name in zip(things, last, strict=True)
    ]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda one: ask(server, one[0], cache_salt="together")[0], asked))
    assert replies == [thing.answer("both", name) for _, thing, name in asked]
