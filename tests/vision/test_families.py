"""Every family that sees, at tiny size with seeded weights, through the one loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.scripted import ScriptedSpeculation
from tests.engine.test_loop import Clock, Run
from tests.vision.families import CONFIGS, VOCAB, Tiny, copied, shown, tiny
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.models.kv import with_kv
from treadle.models.vlm_check import Peaks, judged, our_logits, own_logits
from treadle.types import Caps, Finish, KvFormat, Request, Sampling
from treadle.vision.families import FAMILIES
from treadle.vision.sight import Sight

TAIL = (100, 120, 140)
families = pytest.mark.parametrize("family", CONFIGS)


def test_there_is_a_tiny_model_of_every_family() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def run_of(one: Tiny, caps: Caps | None = None, truths: dict[str, list[int]] | None = None, **config: Any) -> Run:
    clock, caps = Clock(), caps or one.caps
    store = Store(Settings(Budget(10**9), 10**12), now=clock, active_memory=lambda: 0)
    speculation = None
    if truths is not None:
        speculation = ScriptedSpeculation(caps, clock)
        speculation.truths = truths
    layers = partial(new_layers, one.model, caps)
    reuse = Reuse(store, caps, 16)
    sight = Sight(one.model, 10**8)
    loop = Loop(one.model, caps, Config(**config), layers, None, reuse, clock, speculation=speculation, sight=sight)
    return Run(loop)


def ask(id: str, one: Tiny, *parts: Any, **more: Any) -> Request:
    prompt, spans = one.prompt(*parts)
    return replace(Request(id, prompt, Sampling(temperature=0), max_tokens=10), spans=spans, **more)


def answers(run: Run, *requests: Request) -> list[list[int]]:
    for request in requests:
        run.loop.submit(request)
    run.until_idle()
    for request in requests:
        assert run.finish(request.id) is not Finish.ERROR, run.outputs[request.id][-1].error
    return [run.text(request.id) for request in requests]


def cached(run: Run, id: str) -> int:
    usage = run.outputs[id][-1].usage
    assert usage is not None
    return usage.cached_tokens


def together(one: Tiny, *pictures: Any) -> dict[str, Any]:
    """Inputs of several pictures as mlx-vlm takes them at once; of the same size, where the family wants that."""
    axis = 1 if one.family in ("idefics3", "smolvlm") else 0
    inputs = [one.model.inputs(picture.picture) for picture in pictures]
    return {name: mx.concatenate([each[name] for each in inputs], axis) for name in inputs[0]}


@families
def test_the_check_at_load_finds_that_it_sees(family: str) -> None:
    one = tiny(family)
    prompt, spans = one.prompt("Here is ", shown(one, 1), " and it shows")
    found = judged(one.model, one.caps, family, prompt, spans, TAIL, Peaks())
    assert found.works, found.why


@families
def test_logits_behind_several_pictures_equal_those_of_mlx_vlm(family: str) -> None:
    one = tiny(family)
    first, second, third = (shown(one, seed) for seed in (1, 2, 3))
    prompt, spans = one.prompt("a ", first, " then ", second, third, " and what now?")
    own = own_logits(one.model, prompt, together(one, first, second, third), TAIL)
    ours = our_logits(one.model, one.caps, prompt, spans, TAIL, Peaks())
    np.testing.assert_allclose(np.array(ours), np.array(own), atol=2e-4, rtol=1e-3)


@families
def test_a_model_that_sees_another_picture_is_found_out(family: str) -> None:
    """The check can fail: another picture than the one that mlx-vlm saw."""
    one = tiny(family)
    right, wrong = shown(one, 1), shown(one, 2)
    prompt, _ = one.prompt("Here is ", right, " and it shows")
    own = own_logits(one.model, prompt, one.model.inputs(right.picture), TAIL)
    _, other = one.prompt("Here is ", wrong, " and it shows")
    ours = our_logits(one.model, one.caps, prompt, other, TAIL, Peaks())
    assert float(np.abs(np.array(own) - np.array(ours)).max()) > 0.05


@families
def test_warm_equals_cold_and_a_known_picture_is_never_encoded_again(family: str) -> None:
    one = tiny(family)
    run = run_of(one, prefill_chunk=24)
    sight = run.loop.sight
    assert sight is not None
    picture, other = shown(one, 1), shown(one, 2)
    (cold,) = answers(run, ask("cold", one, "Who is ", picture, " here, and why?"))
    assert sight.encoder.encoded == 1
    (warm,) = answers(run, ask("warm", one, "Who is ", copied(picture), " here, and why?"))
    assert warm == cold and cached(run, "warm") == len(ask("", one, "Who is ", picture, " here, and why?").prompt) - 1
    assert sight.encoder.encoded == 1
    (changed,) = answers(run, ask("changed", one, "Who is ", other, " here, and why?"))
    assert changed != cold and sight.encoder.encoded == 2
    (fresh,) = answers(run_of(one), ask("fresh", one, "Who is ", other, " here, and why?"))
    assert changed == fresh


@families
def test_a_turn_of_text_behind_a_turn_with_pictures_reuses_everything(family: str) -> None:
    one = tiny(family)
    parts = ["See ", shown(one, 1), " and ", shown(one, 2), " please."]
    run = run_of(one)
    first = ask("first", one, *parts)
    (reply,) = answers(run, first)
    prompt = np.concatenate([first.prompt, np.array([*reply, *TAIL])])
    later = replace(first, id="later", prompt=prompt)
    (warm,) = answers(run, later)
    assert cached(run, "later") == len(first.prompt) + len(reply) - 1
    assert run.loop.sight is not None and run.loop.sight.encoder.encoded == 2
    assert answers(run_of(one), later) == [warm]


@families
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_a_batch_with_and_without_pictures_says_what_each_says_alone(family: str, drafts: bool) -> None:
    one = tiny(family)
    requests = [
        ask("one", one, "a ", shown(one, 1), " b"),
        ask("text", one, "nothing to be seen here at all"),
        ask("two", one, shown(one, 2), " and ", shown(one, 3), " what?"),
        ask("late", one, "a ", shown(one, 1), " c"),
    ]
    alone = {request.id: answers(run_of(one), request)[0] for request in requests}
    run = run_of(one, truths=alone if drafts else None, max_rows=4, prefill_chunk=16)
    assert dict(zip(alone, answers(run, *requests), strict=True)) == alone


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
def test_packed_rows_give_one_text_whatever_is_cached_batched_or_drafted(family: str) -> None:
    one = tiny(family)
    caps = with_kv(one.model, one.caps, KvFormat(8, 8, recent=8), "asked")
    assert not caps.kv.exact, caps.kv_why
    requests = [ask("one", one, "a ", shown(one, 1), " b"), ask("two", one, shown(one, 2), " and ", shown(one, 3), "?")]
    alone = {request.id: answers(run_of(one, caps), request)[0] for request in requests}
    truths = alone | {f"{id} again": text for id, text in alone.items()}
    run = run_of(one, caps, truths=truths, max_rows=4, prefill_chunk=16)
    assert dict(zip(alone, answers(run, *requests), strict=True)) == alone
    again = [replace(request, id=f"{request.id} again") for request in requests]
    assert dict(zip(alone, answers(run, *again), strict=True)) == alone
    assert cached(run, "one again") > 0


@families
def test_text_alone_leaves_nothing_of_a_picture_on_the_model(family: str) -> None:
    """A picture shifts what follows it in its own sequence only."""
    one = tiny(family)
    text = ask("text", one, "just words and nothing else")
    (before,) = answers(run_of(one), text)
    answers(run_of(one), ask("seen", one, "a ", shown(one, 4, width=60, height=20), " b"))
    assert answers(run_of(one), text) == [before]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "pixtral", "idefics3"])
def test_pictures_of_other_shapes_take_another_number_of_tokens(family: str) -> None:
    one = tiny(family)
    sizes = {(40, 28), (28, 40), (60, 20), (8, 8), (16, 48)}
    counts = set()
    for width, height in sizes:
        picture = shown(one, 1, width=width, height=height)
        prompt, spans = one.prompt("a ", picture, " b")
        counts.add(picture.picture.num_rows)
        assert judged(one.model, one.caps, family, prompt, spans, TAIL, Peaks()).works
    assert len(counts) > 1


def test_the_vocabulary_of_the_tests_holds_all_special_tokens() -> None:
    assert max(tiny("llava").prompt("\x00\xff end")[0]) < VOCAB
