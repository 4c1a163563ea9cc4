"""What stands of a step is what plain steps would have drawn, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from treadle.speculate.accept import judge

END = 9
tokens = st.integers(0, END)


def truth(history: tuple[int, ...], seed: int) -> int:
    """What the model draws behind a history: any function of all of it."""
    return hash((history, seed)) % (END + 1)


def plain(seed: int, room: int) -> list[int]:
    """The plain loop: one token at a time, until an end or no room. The specification."""
    made: list[int] = []
    while len(made) < room and END not in made:
        made.append(truth(tuple(made), seed))
    return made


def drawn_behind(history: Sequence[int], draft: Sequence[int], seed: int) -> list[int]:
    """A step's lines: each is drawn as if the drafts before it were right."""
    return [truth((*history, *draft[:j]), seed) for j in range(len(draft) + 1)]


@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.lists(st.lists(st.sampled_from([True, True, True, False]), max_size=6)),
)
def test_any_drafts_give_the_text_of_plain_steps(seed: int, room: int, rounds: list[list[bool]]) -> None:
    """Drafts follow the truth and go wrong here and there; what stands is the plain text all the same."""
    expected, made = plain(seed, room), []
    for plan in [*rounds, *[[]] * room]:
        if len(made) == room or END in made:
            break
        draft: list[int] = []
        for right in plan:
            token = truth((*made, *draft), seed)
            draft.append(token if right else (token + 1) % (END + 1))
        found = drawn_behind(made, draft, seed)
        verdict = judge(draft, found, None, 0.0, {END}, room - len(made))
        taken = found[: verdict.taken]
        assert verdict.taken >= 1 and not verdict.tie
        assert draft[: verdict.matched] == taken[: verdict.matched]
        assert draft[: verdict.kept] == taken[: verdict.kept], "the rows that stay are those of the tokens taken"
        made += taken
    assert made == expected


@given(st.lists(tokens, max_size=6), st.data())
def test_lines_too_close_to_call_and_what_follows_them_do_not_stand(draft: list[int], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1))
    gaps = data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.2, 5.0]), min_size=len(drawn), max_size=len(drawn)))
    sure = judge(draft, drawn, None, 0.1, {END}, 99)
    found = judge(draft, drawn, gaps, 0.1, {END}, 99)
    close = next((j for j in range(sure.taken) if gaps[j] <= 0.1), None) if draft else None
    assert found.tie == (close is not None)
    assert found.taken == (sure.taken if close is None else close)
    assert found.matched == sum(draft[j] == drawn[j] for j in range(min(found.taken, len(draft))))


@given(st.lists(tokens, max_size=6), st.data())
def test_a_verdict_counts_no_more_than_was_judged(draft: list[int], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(-1, END), min_size=len(draft) + 1, max_size=len(draft) + 1))
    room = data.draw(st.integers(1, 8))
    verdict = judge(draft, drawn, None, 0.0, {END}, room)
    assert 0 <= verdict.matched <= verdict.judged <= min(len(draft), verdict.taken)
    assert 0 <= verdict.taken - verdict.matched <= 1
    assert verdict.taken <= min(room, len(draft) + 1)
    assert verdict.kept <= len(draft)


def test_an_end_inside_a_run_is_the_last_that_stands() -> None:
    verdict = judge([1, END, 3], [1, END, 3, 4], None, 0.0, {END}, 99)
    assert (verdict.taken, verdict.matched, verdict.kept) == (2, 2, 1)


def test_a_row_without_drafts_is_a_plain_step_however_close_it_is() -> None:
    verdict = judge([], [4], [0.0], 1.0, {END}, 99)
    assert (verdict.taken, verdict.tie) == (1, False)


def test_a_line_that_is_no_number_stands_only_without_drafts() -> None:
    assert judge([], [-1], None, 0.0, {END}, 99).taken == 1
    assert judge([5, 6], [-1, 6, 7], None, 0.0, {END}, 99).tie
    verdict = judge([5, 6], [5, -1, 7], None, 0.0, {END}, 99)
    assert (verdict.taken, verdict.matched, verdict.judged, verdict.tie) == (1, 1, 1, True)
    assert not judge([5, 6], [4, -1, -1], None, 0.0, {END}, 99).tie, "behind a refused draft nothing is looked at"
