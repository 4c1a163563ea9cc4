"""Budgets of reasoning in the loop: kept to, in any company, and resumed after a preempted row comes back."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import request_of
from tests.engine.test_loop_grammar import run_of
from tests.fakes import STOP, HashModel
from tests.grammar.letters import LETTERS, ids_of
from treadle.types import Constraint, Finish, Language, Reasoning, Request

CLOSER, OPENER = tuple(ids_of("</t>")), tuple(ids_of("<t>"))
NEVER = ((STOP, -100.0), (CLOSER[2], -100.0))  # no end and no closer of the model's own


def text_of(ids: list[int]) -> str:
    """One character for each id; a question mark for padding, which the model may draw while it thinks."""
    return "".join(LETTERS[id - 1] if 0 < id <= len(LETTERS) else "?" for id in ids)


def thinking(seed: int, kind: Language, budget: int, opener: tuple[int, ...] = ()) -> Request:
    source = {Language.FREE: "", Language.REGEX: "[0-9]{3}"}[kind]
    constraint = Constraint(kind, source, Reasoning(CLOSER, opener, budget))
    plain = request_of(f"r{seed}", [1, 2 + seed % 90], 40, temperature=1.5, seed=seed, logit_bias=NEVER)
    return replace(plain, constraint=constraint)


@settings(max_examples=10)
@given(st.integers(0, 2**40), st.integers(0, 12), st.sampled_from([Language.FREE, Language.REGEX]))
def test_after_the_budget_comes_the_closer_and_then_the_answer(seed: int, budget: int, kind: Language) -> None:
    run = run_of(HashModel())
    request = thinking(seed, kind, budget)
    run.loop.submit(request)
    run.until_idle()
    text = text_of(run.text(request.id))
    assert "</t>" in (text[budget : budget + 4], text[budget - 1 : budget + 3])
    if kind is Language.REGEX:
        assert len(text) in (budget + 6, budget + 7) and text[-3:].isdecimal() and run.finish(request.id) is Finish.STOP
    else:
        assert len(text) == 40


@settings(max_examples=5)
@given(st.integers(0, 2**40), st.integers(2, 4))
def test_rows_beside_each_other_keep_their_own_budgets(seed: int, rows: int) -> None:
    requests = [thinking(seed + i, [Language.FREE, Language.REGEX][i % 2], 3 * i + 1) for i in range(rows)] + [
        request_of("plain", [5, 6], 40, seed=seed)
    ]
    together = run_of(HashModel(), max_rows=len(requests))
    for request in requests:
        together.loop.submit(request)
    together.until_idle()
    for request in requests:
        alone = run_of(HashModel())
        alone.loop.submit(request)
        alone.until_idle()
        assert together.text(request.id) == alone.text(request.id)


def test_a_reply_that_opens_reasoning_by_itself_is_held_to_the_budget_from_there() -> None:
    opening = tuple((id, 100.0) for id in OPENER[:1])
    request = thinking(7, Language.REGEX, 5, OPENER)
    request = replace(request, sampling=replace(request.sampling, logit_bias=(*NEVER, *opening)))
    run = run_of(HashModel())
    run.loop.submit(request)
    run.until_idle()
    # The last token of the budget may be one that begins the closer.
    assert re.fullmatch(r"<t>.{4,5}</t>[0-9]{3}", text_of(run.text(request.id)))


def test_a_cap_inside_reasoning_is_the_length_and_not_an_error() -> None:
    request = replace(thinking(3, Language.REGEX, 30), max_tokens=10)
    run = run_of(HashModel())
    run.loop.submit(request)
    run.until_idle()
    assert run.finish(request.id) is Finish.LENGTH and len(np.asarray(run.text(request.id))) == 10
