"""A tiny trained model says what colour and shape is in a picture, whatever the loop does around it.

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
from tests.vision.shapes import COLOURS, QUESTIONS, SHAPES, Thing, any_thing, draw
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


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ask(server: Live, *messages: dict[str, Any], **more: Any) -> tuple[str, int]:
    """(reply, cached tokens)."""
    response = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 4, **more})
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"], made["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_in_a_picture_is_told_also_from_the_cache(server: Live, colour: str, shape: str) -> None:
    thing = Thing(colour, shape)
    picture = image(thing, np.random.default_rng(len(colour) * 7 + len(shape)))
    for kind, question in QUESTIONS.items():
        assert ask(server, user(picture, text(question)))[0] == thing.answer(kind)
    reply, cached = ask(server, user(picture, text(QUESTIONS["both"])))
    assert reply == thing.answer("both") and cached > 10


def test_the_picture_of_an_earlier_turn_is_remembered_and_not_computed_again(server: Live) -> None:
    thing = Thing("red", "circle")
    history = [user(image(thing, np.random.default_rng(7)), text(QUESTIONS["both"]))]
    reply, _ = ask(server, *history)
    assert reply == " red circle"
    for kind in ("shape", "colour", "both"):
        history += [{"role": "assistant", "content": reply}, user(text(QUESTIONS[kind]))]
        reply, cached = ask(server, *history)
        assert reply == thing.answer(kind) and cached > 20


def test_a_picture_that_is_replaced_is_seen_anew(server: Live) -> None:
    rng = np.random.default_rng(8)
    green, purple = (image(thing, rng) for thing in (Thing("green", "cross"), Thing("purple", "square")))
    question = text(QUESTIONS["both"])
    for picture, told in ((green, " green cross"), (purple, " purple square"), (green, " green cross")):
        assert ask(server, user(picture, question))[0] == told


def test_conversations_about_different_pictures_run_together(server: Live) -> None:
    rng = np.random.default_rng(9)
    things = [any_thing(rng) for _ in range(8)]
    asked = [user(image(thing, rng), text(QUESTIONS["both"])) for thing in things]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda one: ask(server, one, cache_salt="together")[0], asked))
    assert replies == [thing.answer("both") for thing in things]
