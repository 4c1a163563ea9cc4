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
from tests.vision.shapes import KINDS, NAMES, Thing, any_thing, draw, every_thing, question
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import load_model
from treadle.models.sources import resolve

FOLDER = Path(__file__).parents[1] / "assets" / "shapes"
Part = dict[str, Any]


@pytest.fixture(scope="module", params=["auto", "off"], ids=["with drafts", "without drafts"])
def server(request: pytest.FixtureRequest) -> Iterator[Live]:
    engine = Engine(lambda: load_model(resolve(str(FOLDER)), None), Config(cache_gb=0.1, speculation=request.param))
    with live(engine) as running:  # type: ignore[arg-type]
        until(lambda: engine.state != "loading", 60)
        assert engine.state == "ready", engine.failure
        yield running


class Scene:
    """Things by the names that they are shown under, each drawn once."""

    def __init__(self, seed: int, **things: Thing) -> None:
        self.things = things
        rng = np.random.default_rng(seed)
        self.parts = {name: picture(thing, rng) for name, thing in things.items()}

    def show(self, *names: str) -> list[Part]:
        return [part for name in names or self.things for part in (self.parts[name], text(f" {name}"))]

    def answer(self, kind: str, name: str) -> str:
        return self.things[name].answer(kind)


def scene(seed: int, count: int) -> Scene:
    """`count` different things under different names."""
    rng = np.random.default_rng(seed)
    names, things = rng.permutation(NAMES)[:count], rng.permutation(len(every_thing()))[:count]
    return Scene(seed, **{str(name): every_thing()[i] for name, i in zip(names, things, strict=True)})


def picture(thing: Thing, rng: np.random.Generator) -> Part:
    buffer = BytesIO()
    draw(thing, rng).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def user(*parts: Part) -> dict[str, Any]:
    """Texts that follow one another become one: a line break would come between them, which the model never saw."""
    joined: list[Part] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = text(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    return {"role": "user", "content": joined}


def said(reply: str) -> dict[str, Any]:
    return {"role": "assistant", "content": reply}


def ask(server: Live, *messages: dict[str, Any], **more: Any) -> tuple[str, int]:
    """(reply, cached tokens)."""
    response = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 4, **more})
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"], made["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("thing", every_thing(), ids=lambda thing: f"{thing.colour} {thing.shape}")
def test_what_is_in_a_picture_is_told_also_from_the_cache(server: Live, thing: Thing) -> None:
    one = Scene(every_thing().index(thing), B=thing)
    for kind in KINDS:
        assert ask(server, user(*one.show(), text(question(kind, "B"))))[0] == thing.answer(kind)
    reply, cached = ask(server, user(*one.show(), text(question("both", "B"))))
    assert reply == thing.answer("both") and cached > 8


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_of_several_pictures_the_one_that_is_asked_for_is_told(server: Live, count: int, seed: int) -> None:
    several = scene(100 * count + seed, count)
    for number, name in enumerate(several.things):
        for kind in KINDS:
            reply, cached = ask(server, user(*several.show(), text(question(kind, name))))
            assert reply == several.answer(kind, name)
            assert cached >= 7 * count or (number, kind) == (0, KINDS[0])


def test_the_same_pictures_in_another_order_and_under_other_names_are_not_encoded_again(server: Live) -> None:
    several = scene(7, 3)
    one, two, three = several.things
    ask(server, user(*several.show(), text(question("both", one))))
    for names in ((three, one, two), (two, three, one)):
        for name in names:
            assert ask(server, user(*several.show(*names), text(question("both", name))))[0] == several.answer(
                "both", name
            )
    swapped = [several.parts[one], text(f" {two}"), several.parts[two], text(f" {one}")]
    assert ask(server, user(*swapped, text(question("both", one))))[0] == several.answer("both", two)
    times = [record["vision_s"] for record in server.get("/v1/stats").json()["finished"][-7:]]
    assert times == [0] * 7


def test_pictures_of_earlier_turns_are_remembered_and_not_computed_again(server: Live) -> None:
    several = scene(11, 3)
    history: list[dict[str, Any]] = []
    known: list[str] = []
    length = 0
    for name in several.things:
        known.append(name)
        shown = several.show(name)
        for asked in known:
            history.append(user(*shown, text(question("both", asked))))
            reply, cached = ask(server, *history)
            assert reply == several.answer("both", asked)
            assert cached >= length, "all of the turns before"
            history.append(said(reply))
            shown, length = [], cached


def test_a_picture_that_is_replaced_is_seen_anew_and_the_others_stay(server: Live) -> None:
    before = Scene(21, C=Thing("green", "cross"), A=Thing("blue", "circle"), D=Thing("red", "square"))
    after = Scene(21, **{**before.things, "A": Thing("yellow", "triangle")})
    after.parts = {**before.parts, "A": after.parts["A"]}
    for now in (before, after, before):
        for name in now.things:
            reply, cached = ask(server, user(*now.show(), text(question("both", name))))
            assert reply == now.answer("both", name)
            if now is after and name == "C":
                assert 7 <= cached <= 10, "up to the picture that was replaced"


def test_conversations_about_different_pictures_run_together(server: Live) -> None:
    scenes = [scene(40 + n, 1 + n % 3) for n in range(9)]
    asked = [(one, list(one.things)[n % len(one.things)]) for n, one in enumerate(scenes)]
    bodies = [user(*one.show(), text(question("both", name))) for one, name in asked]
    with ThreadPoolExecutor(9) as pool:
        replies = list(pool.map(lambda body: ask(server, body, cache_salt="together")[0], bodies))
    assert replies == [one.answer("both", name) for one, name in asked]


def test_choices_of_one_request_see_the_same_pictures(server: Live) -> None:
    one = Scene(60, A=any_thing(np.random.default_rng(60)))
    body = {"messages": [user(*one.show(), text(question("both", "A")))], "temperature": 0, "max_tokens": 4, "n": 3}
    made = server.post("/v1/chat/completions", body).json()
    assert [choice["message"]["content"] for choice in made["choices"]] == [one.answer("both", "A")] * 3
