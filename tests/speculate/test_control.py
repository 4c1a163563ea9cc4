"""Drafting follows what was accepted and what steps cost, and never loses more than it may."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.speculate.control import ALLOWANCE, GRACE, PROBE_EVERY, WARM_UP, Control, Source, may_pay
from treadle.speculate.cost import LASTS, MOST_WIDTH, CostTable

LIMIT = 16
SIZES = (1, 2, 4, 8, 16)
# Seconds of verify steps by tokens, and of a plain step.
TABLES: dict[str, tuple[dict[int, float], float]] = {
    "flat": (dict.fromkeys(SIZES, 1.0), 0.95),
    "8 and 16 are cheap": ({1: 31.0, 2: 57.0, 4: 110.0, 8: 27.0, 16: 28.0}, 31.0),
    "8 and 16 are cheap, plain overlaps": ({1: 1.1, 2: 1.9, 4: 3.7, 8: 1.05, 16: 1.1}, 1.0),
    "gentle slope": ({n: 1 + 0.1 * (n - 1) for n in SIZES}, 1.0),
    "steep slope": ({n: 1 + 0.5 * (n - 1) for n in SIZES}, 1.0),
    "linear": ({n: float(n) for n in SIZES}, 1.0),
    "doubled": ({1: 1.0, 2: 1.6, 4: 1.7, 8: 1.8, 16: 2.0}, 1.0),
    "trebled": ({1: 1.0, 2: 3.0, 4: 3.0, 8: 3.0, 16: 3.2}, 1.0),
}


def table(name: str) -> CostTable:
    points, plain = TABLES[name]
    cost = CostTable()
    for num_tokens, seconds in points.items():
        cost.observe(num_tokens, seconds, warm=True)
    cost.observe_plain(1, plain)
    return cost


def expected(p: float, drafts: int) -> float:
    """Tokens of a round whose drafts are each accepted with probability p."""
    return sum(p**i for i in range(drafts + 1))


def seconds_of(cost: CostTable, drafts: int) -> float:
    seconds = cost.seconds(cost.cheapest_width(1, drafts + 1, MOST_WIDTH)) if drafts else cost.plain(1)
    assert seconds is not None
    return seconds


def best_fixed(cost: CostTable, p: float) -> float:
    """The speed of the best constant number of drafts, 0 included, relative to plain steps."""
    return max(expected(p, k) / seconds_of(cost, k) for k in range(LIMIT + 1)) * seconds_of(cost, 0)


class Text:
    """A text whose drafts are accepted with probability `p`, decoded under a cost table."""

    def __init__(self, name: str, p: float, seed: int = 0, source: Source = Source.LOOKUP) -> None:
        self.cost = table(name)
        self.control = Control()
        self.source = source
        self.p = p
        self.random = random.Random(seed)
        self.tokens = 0
        self.seconds = 0.0

    def step(self, matched: int = 8, limit: int = LIMIT) -> int:
        """The number of drafts of one more step."""
        drafts = self.control.want(self.source, matched, 1, self.cost, limit)
        self.seconds += seconds_of(self.cost, drafts)
        if not drafts:
            self.tokens += 1
            self.control.step()
            return 0
        accepted = next((i for i in range(drafts) if self.random.random() >= self.p), drafts)
        self.tokens += accepted + 1
        self.control.settled(self.source, drafts, accepted)
        return drafts

    def steps(self, count: int, matched: int = 8) -> Iterator[int]:
        for _ in range(count):
            yield self.step(matched)

    @property
    def overspent(self) -> float:
        """Plain steps lost so far."""
        return self.seconds / seconds_of(self.cost, 0) - self.tokens


curves = st.fixed_dictionaries({n: st.floats(0.5, 6.0) for n in SIZES})


@given(curves, st.integers(0, 20), st.integers(1, 4), st.integers(0, 9), st.lists(st.floats(0, 1), max_size=30))
def test_never_more_than_the_limit(points, limit, rows, matched, shares):
    cost = CostTable()
    for num_tokens, seconds in points.items():
        cost.observe(num_tokens, seconds)
    cost.observe_plain(rows, 1.0)
    control = Control()
    for share in shares:
        drafts = control.want(Source.LOOKUP, matched, rows, cost, limit, riding=rows - 1)
        assert 0 <= drafts <= limit
        if drafts:
            control.settled(Source.LOOKUP, drafts, int(share * drafts))
        else:
            control.step()


@settings(max_examples=200)
@given(curves, st.lists(st.tuples(st.sampled_from((2, 5, 8)), st.sampled_from(Source), st.floats(0, 1)), max_size=200))
def test_no_text_takes_more_time_than_the_allowance(points, rounds):
    """The bound of the module: n tokens take at most (1 + ALLOWANCE) n + GRACE plain steps, at every moment."""
    cost = CostTable()
    for num_tokens, seconds in points.items():
        cost.observe(num_tokens, seconds)
    cost.observe_plain(1, 1.0)
    control, tokens, spent = Control(), 0, 0.0
    for matched, source, share in rounds:
        drafts = control.want(source, matched, 1, cost, LIMIT)
        accepted = int(share * drafts)
        spent += seconds_of(cost, drafts) if drafts else 1.0
        tokens += accepted + 1
        if drafts:
            control.settled(source, drafts, accepted)
        else:
            control.step()
        assert spent <= (1 + ALLOWANCE) * tokens + GRACE + 1e-6


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tenths", range(11))
def test_no_slower_than_plain_and_near_the_best_constant(name, tenths):
    p = tenths / 10
    speeds = []
    for seed in range(4):
        text = Text(name, p, seed)
        while text.tokens < 3000:
            text.step(text.random.choice((2, 3, 5, 8)))
        speeds.append(text.tokens / text.seconds * seconds_of(text.cost, 0))
    assert min(speeds) >= 0.97
    if p >= 0.5:
        assert sum(speeds) / len(speeds) >= 0.9 * best_fixed(text.cost, p)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "8 and 16 are cheap"])
@pytest.mark.parametrize("matched", [2, 4, 8])
def test_drafts_that_are_never_accepted_end_but_for_a_few_probes(name, matched):
    """After 200 steps: at most one probe in PROBE_EVERY steps, and at most 3 % of the time lost."""
    text = Text(name, p=0.0)
    list(text.steps(200, matched))
    before = text.overspent
    drafts = list(text.steps(1000, matched))
    assert sum(map(bool, drafts)) <= 1000 // PROBE_EVERY + 2
    assert text.overspent - before <= 30


def test_a_step_that_seems_cheaper_than_a_plain_one_is_not_taken_for_nothing():
    """What makes a wide step cheap for a model makes the padding of plain steps cheap too; the rest is noise."""
    text = Text("8 and 16 are cheap", p=0.0)
    list(text.steps(200))
    assert sum(1 for drafts in text.steps(200) if drafts) <= 2


@pytest.mark.parametrize("source", Source)
def test_drafts_that_are_always_accepted_go_to_the_limit(source):
    text = Text("flat", p=1.0, source=source)
    drafts = [text.step(limit=15) for _ in range(40)]
    assert drafts[-20:] == [15] * 20


@pytest.mark.parametrize("name", ["8 and 16 are cheap", "8 and 16 are cheap, plain overlaps"])
@given(p=st.floats(0, 1), seed=st.integers(0, 99), matched=st.sampled_from((2, 5, 8)))
@settings(max_examples=20)
def test_dear_sizes_between_cheap_ones_are_never_chosen(name, p, seed, matched):
    text = Text(name, p, seed)
    assert {text.step(matched, limit=15) for _ in range(60)} <= {0, 7, 15}
    assert {text.step(matched, limit=7) for _ in range(60)} <= {0, 7}


def test_few_tokens_are_padded_to_a_cheap_size_rather_than_left():
    text = Text("8 and 16 are cheap, plain overlaps", p=0.9)
    assert {text.step(8, limit=3) for _ in range(20)} == {3}


def test_acceptance_lengthens_and_refusal_shortens():
    lengths = {}
    for p in (0.3, 0.5, 0.65, 0.8, 0.95):
        text = Text("gentle slope", p)
        list(text.steps(200))
        lengths[p] = sum(text.steps(100)) / 100
    assert list(lengths.values()) == sorted(lengths.values())
    assert lengths[0.3] < 2 < lengths[0.65] < 5 < lengths[0.8] < 10 < lengths[0.95]


def test_a_long_match_is_trusted_before_anything_was_seen():
    cost = table("gentle slope")
    first = [Control().want(Source.LOOKUP, matched, 1, cost, LIMIT) for matched in (2, 4, 8)]
    assert first == sorted(first)
    assert first[0] < first[2]


def test_lengths_of_match_are_learnt_apart():
    text = Text("gentle slope", p=0.0)
    list(text.steps(60, matched=2))
    assert text.step(matched=2) == 0
    assert text.step(matched=8) > 0


def test_survival_falls_with_the_position_and_follows_what_was_seen():
    text = Text("flat", p=1.0)
    control, cost = text.control, text.cost
    for _ in range(60):
        control.want(Source.DRAFT, 0, 1, cost, 6)
        control.settled(Source.DRAFT, 6, 3)
    survival = control.survival(Source.DRAFT, 0, 6)
    assert list(survival) == sorted(survival, reverse=True)
    assert survival[2] > 0.85
    assert survival[3] < 0.25


def test_a_text_that_begins_to_repeat_is_found_by_a_probe():
    text = Text("gentle slope", p=0.0)
    list(text.steps(600))
    text.p = 1.0
    drafts = list(text.steps(PROBE_EVERY + 30))
    assert drafts[-1] >= LIMIT - 1


def test_a_text_that_ends_to_repeat_loses_little():
    text = Text("gentle slope", p=1.0)
    list(text.steps(300))
    text.p, before = 0.0, text.overspent
    list(text.steps(1000))
    assert text.overspent - before <= 20 + 0.02 * 1000
    assert text.control.cooldowns >= 1


def test_the_first_cool_down_is_short_and_later_ones_are_longer():
    text = Text("flat", p=0.0)
    rounds = [i for i, drafts in enumerate(text.steps(1500)) if drafts]
    pauses = [b - a - 1 for a, b in pairwise(rounds) if b > a + 1]
    assert pauses == sorted(pauses)
    assert pauses[0] == WARM_UP
    assert pauses[-1] == PROBE_EVERY


def test_nothing_is_drafted_where_full_acceptance_would_not_pay():
    text = Text("linear", p=1.0)
    assert set(text.steps(1000)) == {0}


def test_nothing_is_drafted_before_plain_steps_were_measured():
    cost = CostTable()
    cost.observe(8, 1.0)
    control = Control()
    assert control.want(Source.FORCED, 0, 1, cost, LIMIT) == 0
    cost.observe_plain(1, 1.0)
    assert control.want(Source.FORCED, 0, 1, cost, LIMIT) > 0


def test_unmeasured_verify_steps_are_tried():
    cost = CostTable()
    cost.observe_plain(1, 1.0)
    assert Control().want(Source.LOOKUP, 8, 1, cost, LIMIT) > 0


def test_each_draft_has_its_price():
    cost = table("flat")
    wants = [Control().want(Source.DRAFT, 0, 1, cost, LIMIT, draft_s=seconds) for seconds in (0.0, 0.05, 0.2, 2.0)]
    assert wants == sorted(wants, reverse=True)
    assert wants[-1] == 0


def test_rows_that_ride_along_count():
    cost = CostTable()
    for num_tokens in (1, 64):
        cost.observe(num_tokens, 1.5)
    cost.observe_plain(4, 1.0)
    assert Control().want(Source.LOOKUP, 8, 4, cost, LIMIT) > 0
    assert Control().want(Source.LOOKUP, 2, 4, cost, LIMIT, riding=3) == 0


def test_a_round_that_a_tie_left_without_a_token_is_a_loss():
    cost = table("flat")
    rounds = dict.fromkeys((0, 1), 0)
    for more in rounds:
        control = Control()
        while rounds[more] < 50 and control.want(Source.LOOKUP, 8, 1, cost, LIMIT):
            control.settled(Source.LOOKUP, 0, 0, more)
            rounds[more] += 1
    assert rounds == {0: 2, 1: 50}


def test_a_round_that_was_not_asked_for_is_refused():
    control = Control()
    with pytest.raises(ValueError, match="lookup"):
        control.settled(Source.LOOKUP, 4, 2)
    control.want(Source.LOOKUP, 8, 1, table("flat"), 4)
    with pytest.raises(ValueError, match="cannot be accepted"):
        control.settled(Source.LOOKUP, 4, 5)


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, True), (15.0, True), (17.0, False)])
def test_drafts_may_pay_unless_steps_cost_more_than_all_they_could_make(seconds: float, expected: bool) -> None:
    cost = CostTable.of(dict.fromkeys((2, 64, 256), seconds), {4: 1.0})
    assert may_pay(4, cost, 15, True) is expected
    assert not may_pay(5, cost, 15, True), "plain steps of so many rows are not known"
    for _ in range(LASTS):
        assert may_pay(4, cost, 15, True) is expected, "not at once, because medians move all the time"
        cost.observe(64, 1.0)
    assert may_pay(4, cost, 15, True), "but in the end"
    cost.observe_plain(5, 1.0)
    assert may_pay(5, cost, 15, True), "at once where nothing was known"
