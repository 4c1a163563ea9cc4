"""Outputs in, events out: the same answer for any grouping of tokens, one done event, honest counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.output.families import family
from tests.output.test_stops import first_cut
from treadle.output.stream import Collected, Event, Kind, TextStream, collect, events, gather
from treadle.types import Finish, Output, TokenLogprob, Usage

TOKENIZER = family("byte_level")
USAGE = Usage(prompt_tokens=7, completion_tokens=99, cached_tokens=3)
texts = st.lists(
    st.sampled_from(["the of", " capital", "日本", "🙂", "\n\n", "STOP", "<|im_end|>", "S", "a"]), max_size=8
).map("".join)
stop_lists = st.lists(st.sampled_from(["STOP", "日", "of c", "\n\n", "a"]), max_size=2, unique=True)
cut_sets = st.lists(st.integers(0, 40), max_size=6)


def ids_of(text: str) -> list[int]:
    return [int(i) for i in TOKENIZER.encode(text, add_special_tokens=False)]


def outputs_of(ids: Sequence[int], cuts: Sequence[int] = (), finish: Finish = Finish.LENGTH) -> list[Output]:
    """The ids in groups, and a last output without tokens."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    groups = [tuple(ids[a:b]) for a, b in pairwise(bounds)]
    made = [Output("r", group, tuple(TokenLogprob(i, -0.5) for i in group)) for group in groups]
    return [*made, Output("r", finish=finish, usage=USAGE)]


def run(outputs: Sequence[Output], stops: Sequence[str] = ()) -> list[Event]:
    pipeline = TextStream(TOKENIZER, stops)
    return [event for output in outputs for event in pipeline.push(output)]


def answer(outputs: Sequence[Output], stops: Sequence[str] = ()) -> Collected:
    return gather(run(outputs, stops))


@given(texts, stop_lists, cut_sets)
def test_the_answer_does_not_depend_on_how_tokens_are_grouped(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = ids_of(text)
    assert answer(outputs_of(ids, cuts), stops) == answer(outputs_of(ids, range(len(ids))), stops)


@given(texts, stop_lists, cut_sets)
def test_the_text_is_cut_at_the_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    plain = TOKENIZER.decode(ids_of(text), skip_special_tokens=True)
    made = answer(outputs_of(ids_of(text), cuts), stops)
    assert (made.text, made.stop_string) == first_cut(plain, stops)
    assert made.finish is (Finish.STOP if made.stop_string else Finish.LENGTH)


@given(texts, cut_sets)
def test_without_a_stop_string_every_token_is_reported_once_in_order(text: str, cuts: list[int]) -> None:
    made = answer(outputs_of(ids_of(text), cuts))
    assert list(made.ids) == ids_of(text)
    assert [logprob.token for logprob in made.logprobs] == ids_of(text)


@given(texts, stop_lists, cut_sets)
def test_a_token_comes_with_the_event_in_which_its_text_ends(text: str, stops: list[str], cuts: list[int]) -> None:
    shown = 0
    for event in run(outputs_of(ids_of(text), cuts), stops):
        before, shown = shown, shown + len(event.text)
        assert list(event.offsets) == sorted(event.offsets)
        assert all(offset <= shown for offset in event.offsets)
        if event.ids and event.text:
            last = TOKENIZER.decode(event.ids[-1:], skip_special_tokens=True)
            assert event.offsets[-1] + (len(last) if "\ufffd" not in last else 1) >= before


@given(texts, stop_lists, cut_sets)
def test_exactly_one_done_event_comes_last_and_text_is_empty_only_just_before(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    made = run(outputs_of(ids_of(text), cuts), stops)
    assert [event.kind for event in made[:-1]] == [Kind.TEXT] * (len(made) - 1)
    assert made[-1].kind is Kind.DONE and not made[-1].text and not made[-1].ids
    assert all(event.text for event in made[:-2])


def test_held_tokens_wait_for_their_text() -> None:
    letters = [ids_of(char)[0] for char in "aSTaSTOPb"]
    pipeline = TextStream(TOKENIZER, ["STOP"])
    made = [pipeline.push(Output("r", (i,))) for i in letters]
    assert [[(e.text, e.ids) for e in step] for step in made] == [
        [("a", (letters[0],))], [], [], [("STa", tuple(letters[1:4]))], [], [], [], [], [],
    ]  # fmt: skip
    done = pipeline.push(Output("r", finish=Finish.ABORT, usage=USAGE))
    assert [(e.kind, e.finish, e.stop_string) for e in done] == [(Kind.DONE, Finish.STOP, "STOP")]
    assert done[0].usage == Usage(prompt_tokens=7, completion_tokens=8, cached_tokens=3)


def test_a_token_split_by_the_cut_is_reported_and_later_ones_are_not() -> None:
    ids = ids_of(" capital of")
    made = answer(outputs_of(ids), ["tal o"])
    spans = [(i, TOKENIZER.decode([i])) for i in ids]
    starts = [sum(len(t) for _, t in spans[:k]) for k in range(len(spans))]
    assert made.text == " capi"
    assert list(made.ids) == [i for (i, _), start in zip(spans, starts, strict=True) if start < len(" capi")]


def test_half_a_character_is_reported_with_the_character() -> None:
    ids = ids_of("日")
    assert len(ids) > 1
    pipeline = TextStream(TOKENIZER)
    steps = [pipeline.push(Output("r", (i,))) for i in ids]
    assert steps[:-1] == [[]] * (len(ids) - 1)
    assert [(e.text, e.ids) for e in steps[-1]] == [("日", tuple(ids))]


def test_tokens_without_text_come_before_done() -> None:
    ids = ids_of("<|im_start|>")
    assert [(e.kind, e.text, e.ids) for e in run(outputs_of(ids))] == [
        (Kind.TEXT, "", tuple(ids)),
        (Kind.DONE, "", ()),
    ]


def test_progress_is_an_event_of_its_own() -> None:
    assert run([Output("r", prefilled=512)]) == [Event(Kind.PROGRESS, prefilled=512)]
    assert run([Output("r", skimmed=512)]) == [Event(Kind.PROGRESS, skimmed=512)]


def test_an_error_ends_the_answer_with_its_sentence_and_keeps_the_text() -> None:
    ids = ids_of("the S")
    outputs = [Output("r", tuple(ids)), Output("r", finish=Finish.ERROR, error="Bad luck.", usage=USAGE)]
    made = answer(outputs, ["STOP"])
    assert (made.text, made.finish, made.error, made.usage) == ("the S", Finish.ERROR, "Bad luck.", USAGE)


def test_drafts_behind_a_stop_string_are_not_counted() -> None:
    ids = ids_of("the STOP capital")
    usage = replace(USAGE, completion_tokens=len(ids), drafted_tokens=50, accepted_tokens=45)
    made = answer([Output("r", tuple(ids)), Output("r", finish=Finish.ABORT, usage=usage)], ["STOP"])
    assert made.usage is not None and made.usage.completion_tokens < len(ids)
    counts = made.usage.completion_tokens, made.usage.accepted_tokens, made.usage.drafted_tokens
    assert counts == (counts[0], counts[0], 5 + counts[0]), "five were wrong"


class Engine:
    """Outputs as an engine gives them: after `abort` one more token, then the end."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self.outputs = list(outputs)
        self.aborts = 0
        self.finish: Finish | None = None  # as it was told

    def abort(self, finish: Finish = Finish.ABORT) -> None:
        self.aborts += 1
        self.finish = finish

    async def __aiter__(self) -> AsyncIterator[Output]:
        for output in self.outputs:
            if self.aborts:
                break
            yield output
        if self.aborts:
            yield Output("r", (ids_of("late")[0],))
            yield Output("r", finish=self.finish, usage=USAGE)


def listen(engine: Engine, stops: Sequence[str]) -> Collected:
    return asyncio.run(collect(events(aiter(engine), TextStream(TOKENIZER, stops), engine.abort)))


@given(texts, stop_lists, cut_sets)
def test_streamed_equals_collected_and_a_stop_string_aborts_once(text: str, stops: list[str], cuts: list[int]) -> None:
    engine = Engine(outputs_of(ids_of(text), cuts))
    made = listen(engine, stops)
    assert made == answer(engine.outputs, stops)
    assert engine.aborts == (made.stop_string is not None)
    assert engine.finish == (None if made.stop_string is None else Finish.STOP), "no abort, for those who count"


def test_a_consumer_that_leaves_aborts() -> None:
    async def leave(engine: Engine) -> None:
        made = events(aiter(engine), TextStream(TOKENIZER), engine.abort)
        assert (await anext(made)).kind is Kind.TEXT
        await made.aclose()  # type: ignore[attr-defined]

    engine = Engine(outputs_of(ids_of("the capital of"), range(9)))
    asyncio.run(leave(engine))
    assert (engine.aborts, engine.finish) == (1, Finish.ABORT)


def test_outputs_that_end_without_a_result_end_in_an_error() -> None:
    engine = Engine(outputs_of(ids_of("the"))[:-1])
    made = listen(engine, [])
    assert (made.text, made.finish, engine.aborts) == ("the", Finish.ERROR, 1)
    assert made.error
