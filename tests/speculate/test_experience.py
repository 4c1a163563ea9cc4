"""Requests begin with what others of the same model saw, and go by what they see themselves."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.speculate.test_control import LIMIT, seconds_of, table
from treadle.speculate.control import ALLOWANCE, GRACE, PROBE_EVERY, WARM_UP, Control, Source
from treadle.speculate.experience import MOST_WEIGHT, Experience


class Server:
    """Requests one after the other, whose drafts are accepted with probability `p`."""

    def __init__(self, name: str, p: float) -> None:
        self.cost = table(name)
        self.experience = Experience(WARM_UP, PROBE_EVERY)
        self.random = random.Random(1)
        self.p = p

    def request(self, tokens: int, matched: int = 8) -> tuple[list[int], float]:
        """The drafts of each step, and the plain steps that were lost."""
        control = Control(experience=self.experience)
        drafts, made, seconds = [], 0, 0.0
        while made < tokens:
            k = control.want(Source.LOOKUP, matched, 1, self.cost, LIMIT)
            accepted = next((i for i in range(k) if self.random.random() >= self.p), k)
            if k:
                control.settled(Source.LOOKUP, k, accepted)
            else:
                control.step()
            drafts.append(k)
            made += accepted + 1
            seconds += seconds_of(self.cost, k)
        return drafts, seconds / seconds_of(self.cost, 0) - made


@pytest.mark.parametrize("name", ["gentle slope", "doubled", "flat"])
@pytest.mark.parametrize("matched", [2, 4, 8])
def test_where_nothing_repeats_requests_stop_trying_after_the_first(name, matched):
    server = Server(name, 0.0)
    for _ in range(5):
        server.request(100, matched)
    requests = [server.request(100, matched) for _ in range(20)]
    rounds = [sum(map(bool, drafts)) for drafts, _ in requests]
    assert sum(rounds) <= 20 * 100 // PROBE_EVERY + 1
    assert rounds.count(0) >= 9
    assert sum(lost for _, lost in requests) <= 0.02 * 20 * 100


def test_where_texts_repeat_requests_start_at_once():
    server = Server("gentle slope", 1.0)
    assert server.request(100, 2)[0][0] < LIMIT // 2
    assert server.request(100, 2)[0][0] >= LIMIT // 2


def test_a_server_whose_texts_begin_to_repeat_is_found_by_a_probe():
    server = Server("gentle slope", 0.0)
    for _ in range(20):
        server.request(50)
    server.p = 1.0
    probed = next(i for i in range(20) if any(server.request(50)[0]))
    assert probed <= PROBE_EVERY // 50 + 1
    for _ in range(10):
        server.request(50)
    assert server.request(50)[0][0] > 0


def test_one_request_of_a_kind_that_fails_does_not_stop_another_that_succeeds():
    experience, cost = Experience(WARM_UP, PROBE_EVERY), table("gentle slope")
    good, bad = Control(experience=experience), Control(experience=experience)
    wanted = []
    for _ in range(60):
        for control, share in ((good, 1.0), (bad, 0.0)):
            k = control.want(Source.LOOKUP, 8, 1, cost, LIMIT)
            if k:
                control.settled(Source.LOOKUP, k, int(share * k))
            else:
                control.step()
            if control is good:
                wanted.append(k)
    assert min(wanted[3:]) > 0


def test_what_was_seen_long_ago_is_forgotten():
    lane = Experience(WARM_UP, PROBE_EVERY).of("x", 0.5)
    for _ in range(1000):
        lane.see(10, 0)
    assert lane.weight <= MOST_WEIGHT
    assert lane.mean < 0.05
    for _ in range(3 * int(MOST_WEIGHT)):
        lane.see(10, 10)
    assert lane.mean > 0.9


def test_probes_become_rarer_up_to_the_limit_and_soon_again_after_success():
    lane = Experience(WARM_UP, PROBE_EVERY).of("x", 0.5)
    pauses = [lane.pause]
    for _ in range(6):
        lane.see(5, 0)
        lane.cool()
        pauses.append(lane.pause)
    assert pauses[0] == WARM_UP
    assert pauses[-1] == PROBE_EVERY
    assert all(a <= b for a, b in pairwise(pauses))
    for _ in range(60):
        lane.see(5, 5)
    assert lane.pause == WARM_UP


def test_steps_that_were_read_too_early_are_paid_from_the_allowance():
    control, cost = Control(), table("gentle slope")
    assert control.want(Source.LOOKUP, 8, 1, cost, LIMIT) > 0
    control.lost(GRACE)
    assert control.want(Source.LOOKUP, 8, 1, cost, LIMIT) == 0
    for _ in range(round(GRACE / ALLOWANCE)):
        control.step()
    assert control.want(Source.LOOKUP, 8, 1, cost, LIMIT) > 0


def test_drafts_that_were_waited_for_in_vain_count_as_refused():
    control, cost = Control(), table("doubled")
    before = control.survival(Source.LOOKUP, 8, 1)[0]
    for _ in range(8):
        control.missed(Source.LOOKUP, 8)
    assert control.survival(Source.LOOKUP, 8, 1)[0] < before / 2
    assert control.want(Source.LOOKUP, 8, 1, cost, LIMIT) == 0
    assert control.cooldowns == 1


def test_steps_that_may_not_be_padded_are_priced_as_they_are():
    cost = table("8 and 16 are cheap, plain overlaps")
    assert Control().want(Source.LOOKUP, 8, 1, cost, 3) == 3
    assert Control().want(Source.LOOKUP, 8, 1, cost, 3, padded=False) == 1
