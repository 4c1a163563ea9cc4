"""Workloads are repeatable, as many as asked for, and share what they say they share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.bench.serve_workloads import TURNS, WORKLOADS, Conversation, after, conversations
from treadle.errors import BadRequest


@given(st.sampled_from(WORKLOADS), st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**31))
def test_every_workload_has_exactly_the_requests_asked_for(workload: str, requests: int, words: int, seed: int) -> None:
    made = conversations(workload, requests, words, seed)
    assert sum(conversation.num_turns for conversation in made) == requests
    assert made == conversations(workload, requests, words, seed)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_another_seed_asks_something_else(workload: str) -> None:
    assert conversations(workload, 4, 50, 1) != conversations(workload, 4, 50, 2)


def shared(made: list[Conversation]) -> bool:
    return len({conversation.opening[0]["content"] for conversation in made}) == 1


def test_only_shared_prefix_has_one_long_system_message() -> None:
    made = conversations("shared-prefix", 5, 300, 0)
    assert shared(made) and len(made[0].opening[0]["content"].split()) == 300
    assert len({conversation.opening[1]["content"] for conversation in made}) == 5
    assert not shared(conversations("agent", 2 * TURNS, 300, 0))


def test_an_agent_s_conversation_grows_by_the_reply_and_a_result() -> None:
    [conversation] = conversations("agent", 3, 40, 0)
    first = list(conversation.opening)
    second = after(first, "I look.", conversation.later[0])
    assert second[: len(first)] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[-1]["content"].startswith("Result of read_file(1):\n")
    assert after(first, "", conversation.later[0])[2]["content"] == "."


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match=r"chat, agent, shared-prefix, not 'burst'"):
        conversations("burst", 1, 1, 0)
