"""Rows of shared buffers behave like sequences alone: after any joins, leaves, ragged steps and rewinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import VOCAB, HashModel
from treadle.cache import batch_columns, geometry
from treadle.cache.batch_columns import BatchColumns
from treadle.cache.layers import Layers, State
from treadle.cache.transfer import snapshot
from treadle.models.capabilities import forward, new_layers


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers, so that growing, trimming and squeezing happen within a few tokens."""
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)


def logits_alone(model: HashModel, tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens]), cache=model.make_cache())[0, -1])


class Rows:
    """Some sequences in one `Layers`, and what they must be."""

    def __init__(self, model: HashModel) -> None:
        self.model = model
        self.layers: Layers | None = None
        self.tokens: list[list[int]] = []

    def join(self, prompt: list[int]) -> None:
        solo = new_layers(self.model, self.model.caps)
        for start in range(0, len(prompt), 5):
            forward(self.model, [prompt[start : start + 5]], solo)
        if self.layers is None:
            self.layers = solo
        else:
            assert self.layers.join(solo) == len(self.tokens)
        self.tokens.append(list(prompt))

    def step(self, pieces: list[list[int]]) -> None:
        logits = np.array(forward(self.model, pieces, self.layers))
        for row, piece in enumerate(pieces):
            self.tokens[row] += piece
            np.testing.assert_array_equal(logits[row, len(piece) - 1], logits_alone(self.model, self.tokens[row]))

    def drop(self, row: int) -> None:
        self.layers.drop(row)
        self.tokens[row] = self.tokens[-1]
        self.tokens.pop()

    def rewind(self, row: int, n: int) -> None:
        self.layers.rewind(row, n)
        del self.tokens[row][len(self.tokens[row]) - n :]

    def check(self) -> None:
        assert self.layers.lengths == [len(t) for t in self.tokens]
        for row in range(len(self.tokens)):
            alone = self.layers.take(row)
            logits = np.array(forward(self.model, [[3, 4]], alone))[0, -1]
            np.testing.assert_array_equal(logits, logits_alone(self.model, [*self.tokens[row], 3, 4]))


tokens = st.integers(1, VOCAB - 1)


@pytest.mark.parametrize("kinds", [("rows", "window"), ("window", "window"), ("state", "rows")], ids="+".join)
@settings(max_examples=25)
@given(data=st.data())
def test_any_history_of_a_batch_reads_like_each_sequence_alone(kinds: tuple[str, ...], data: st.DataObject) -> None:
    rows = Rows(HashModel(kinds, window=5))
    rows.join(data.draw(st.lists(tokens, min_size=1, max_size=30)))
    rewinds = "state" not in kinds
    for _ in range(data.draw(st.integers(1, 12))):
        n = len(rows.tokens)
        action = data.draw(st.sampled_from(["step", "step", "join", "drop", "rewind", "check"]))
        if action == "join" and n < 5:
            rows.join(data.draw(st.lists(tokens, min_size=0, max_size=40)))
        elif action == "drop" and n > 1:
            rows.drop(data.draw(st.integers(0, n - 1)))
        elif action == "rewind" and rewinds:
            row = data.draw(st.integers(0, n - 1))
            rows.rewind(row, data.draw(st.integers(0, min(4, len(rows.tokens[row])))))
        elif action == "check":
            rows.check()
        else:
            rows.step([data.draw(st.lists(tokens, min_size=1, max_size=4)) for _ in range(n)])
    rows.check()


def test_a_window_holds_a_bounded_number_of_rows() -> None:
    model = HashModel(("window",), window=5)
    rows = Rows(model)
    rows.join([1])
    for i in range(100):
        rows.step([[1 + i % 90]])
    assert rows.layers.rows[0].keys.shape[2] <= 2 * (5 + 6) + 8
    rows.join([2, 3])
    for i in range(100):
        rows.step([[1 + i % 90], [5]])
    assert rows.layers.rows[0].keys.shape[2] <= 4 * (5 + 6) + 8


def test_refused_tokens_give_their_columns_back() -> None:
    rows = Rows(HashModel(("rows",)))
    rows.join([1, 2])
    rows.join([3])
    before = rows.layers.columns[None].index
    for _ in range(20):
        rows.step([[5, 6, 7], [8, 9, 10]])
        rows.rewind(0, 3)
        rows.rewind(1, 3)
    assert rows.layers.columns[None].index == before


def test_the_table_travels_once_a_step_and_has_all_that_the_step_reads(tmp_path: Path) -> None:
    rows = Rows(HashModel(("rows",)))
    rows.join([1, 2])
    rows.join([3])
    own = rows.layers.columns[None]
    for step in ([[5], [6]], [[7, 8], [9]], [[4], [4]]):
        own.begin([len(tokens) for tokens in step])
        views = [own.view_of(own.make_mask(1, True, None)) for _ in range(3)]
        mx.export_to_dot(str(tmp_path / "graph"), views[-1][0])
        assert (tmp_path / "graph").read_text().count("SliceUpdate") <= 1, "every layer asks, one is answered anew"
        np.testing.assert_array_equal(np.array(views[0][0]), own.table)
        own.end()
        own.rewind(0, 1)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 16), min_size=2, max_size=2), st.integers(0, 16), st.booleans()), max_size=12
    )
)
def test_the_table_on_the_device_is_the_host_s_whatever_was_taken_back(
    steps: list[tuple[list[int], int, bool]],
) -> None:
    """All of its columns: a step that is compiled as a whole reads some that no token has yet."""
    own = BatchColumns(None)
    own.place(3, 3)
    own.place(1, 1)
    for counts, back, asked in steps:
        own.begin(counts)
        if asked:
            np.testing.assert_array_equal(np.array(own.shown()), own.table)
        own.end()
        for row, count in enumerate(counts):
            own.rewind(row, min(back, count))


def test_a_plain_step_sends_a_number_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, ...]] = []

    def noted(values: Any, dtype: Any) -> Any:
        sent.append(np.shape(values))
        return mx.array(values, dtype)

    own = BatchColumns(None)
    own.place(300, 300)
    own.place(200, 200)
    own.begin([1, 1])
    own.shown()
    own.end()
    monkeypatch.setattr(batch_columns, "on_device", noted)
    own.begin([1, 1])
    own.shown()
    assert sent == [(2, 1)]


def test_recurrent_layers_refuse_to_rewind() -> None:
    rows = Rows(HashModel(("state",)))
    rows.join([1, 2])
    with pytest.raises(ValueError, match="checkpoint"):
        rows.layers.rewind(0, 1)


def test_a_window_refuses_to_rewind_past_what_it_holds() -> None:
    rows = Rows(HashModel(("window",), window=5))
    rows.join([1])
    for _ in range(60):
        rows.step([[2]])
    with pytest.raises(ValueError, match="held"):
        rows.layers.rewind(0, 50)


def test_a_reservation_makes_room_once() -> None:
    layers = new_layers(HashModel(("rows",)), HashModel(("rows",)).caps)
    layers.reserve(50)
    forward(HashModel(("rows",)), [[1, 2]], layers)
    assert layers.rows[0].keys.shape[2] == 56


def test_a_snapshot_of_a_state_that_is_a_view_keeps_no_whole_chunk() -> None:
    state = State(1)
    layers = Layers([state], {})
    mx.clear_cache()
    before = mx.get_active_memory()
    state[0] = mx.random.normal((1, 4096, 64))[:, -3:]
    held = snapshot(layers, 0)
    mx.eval(held.arrays())
    assert held.nbytes == 3 * 64 * 4
    assert mx.get_active_memory() - before < 100_000
