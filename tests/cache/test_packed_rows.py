"""Packed rows: what a query reads depends on positions alone, whatever happened to the layers before."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import VOCAB, HashModel
from tests.tiny import tiny
from treadle.cache import geometry, recent_columns
from treadle.cache.layers import Layers
from treadle.cache.transfer import convert
from treadle.models.capabilities import forward, new_layers
from treadle.types import KvFormat

tokens = st.integers(1, VOCAB - 1)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers and blocks, so that everything happens within a few tokens."""
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)
    monkeypatch.setattr(recent_columns, "BLOCK", 4)
    monkeypatch.setattr(recent_columns, "SPARE", 6)


def logits_alone(model: HashModel, ids: list[int]) -> np.ndarray:
    return np.array(model(mx.array([ids]), cache=model.make_cache())[0, -1])


class Batch:
    """Some sequences in one `Layers`, and what they must be. Heads of one value cannot be packed, so nothing is lost
    and the text must be exact, although it took the way of packed rows."""

    def __init__(self, model: HashModel, kv: KvFormat) -> None:
        self.model = model
        self.kv = kv
        self.layers: Any = None
        self.tokens: list[list[int]] = []
        self.longest: list[int] = []  # that each ever was after a step

    def join(self, prompt: list[int], chunk: int) -> None:
        solo = new_layers(self.model, self.model.caps, self.kv)
        for start in range(0, len(prompt), chunk):
            forward(self.model, [prompt[start : start + chunk]], solo)
        if self.layers is None:
            self.layers = solo
        else:
            assert self.layers.join(solo) == len(self.tokens)
        self.tokens.append(list(prompt))
        self.longest.append(len(prompt))

    def spare(self, row: int) -> int:
        """How many tokens may be taken back: those within `SPARE` of the most that it ever had."""
        return max(0, len(self.tokens[row]) - max(0, self.longest[row] - recent_columns.SPARE))

    def step(self, pieces: list[list[int]]) -> None:
        logits = np.array(forward(self.model, pieces, self.layers))
        for row, piece in enumerate(pieces):
            self.tokens[row] += piece
            self.longest[row] = max(self.longest[row], len(self.tokens[row]))
            np.testing.assert_array_equal(logits[row, len(piece) - 1], logits_alone(self.model, self.tokens[row]))

    def drop(self, row: int) -> None:
        self.layers.drop(row)
        for line in (self.tokens, self.longest):
            line[row] = line[-1]
            line.pop()

    def rewind(self, row: int, n: int) -> None:
        self.layers.rewind(row, n)
        del self.tokens[row][len(self.tokens[row]) - n :]

    def check(self) -> None:
        assert self.layers.lengths == [len(t) for t in self.tokens]
        for row, ids in enumerate(self.tokens):
            alone: Layers = self.layers.take(row)
            logits = np.array(forward(self.model, [[3, 4]], alone))[0, -1]
            np.testing.assert_array_equal(logits, logits_alone(self.model, [*ids, 3, 4]))


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("rows", "window"), ("state", "rows")], ids="+".join)
@settings(max_examples=40)
@given(data=st.data())
def test_any_history_reads_like_each_sequence_alone(kinds: tuple[str, ...], data: st.DataObject) -> None:
    batch = Batch(HashModel(kinds, window=5), KvFormat(8, 8, 64, recent=data.draw(st.integers(1, 9))))
    chunks = st.integers(1, 25)
    batch.join(data.draw(st.lists(tokens, min_size=1, max_size=40)), data.draw(chunks))
    for _ in range(data.draw(st.integers(1, 12))):
        n = len(batch.tokens)
        action = data.draw(st.sampled_from(["step", "step", "join", "drop", "rewind", "check"]))
        if action == "join" and n < 5:
            batch.join(data.draw(st.lists(tokens, max_size=40)), data.draw(chunks))
        elif action == "drop" and n > 1:
            batch.drop(data.draw(st.integers(0, n - 1)))
        elif action == "rewind" and "state" not in kinds:
            row = data.draw(st.integers(0, n - 1))
            batch.rewind(row, data.draw(st.integers(0, batch.spare(row))))
        elif action == "check":
            batch.check()
        else:
            batch.step([data.draw(st.lists(tokens, min_size=1, max_size=9)) for _ in range(n)])
    batch.check()


@settings(max_examples=30)
@given(data=st.data())
def test_a_sequence_that_changes_its_format_goes_on_as_it_was(data: st.DataObject) -> None:
    """From exact rows to packed ones and back, alone or out of a batch, at any length."""
    model = HashModel(data.draw(st.sampled_from([("rows", "rows"), ("rows", "window"), ("state", "rows")])), window=5)
    formats = st.sampled_from([KvFormat(), KvFormat(8, 8, recent=5), KvFormat(4, 4, recent=5)])
    batch = Batch(model, data.draw(formats))
    for _ in range(data.draw(st.integers(1, 3))):
        batch.join(data.draw(st.lists(tokens, min_size=1, max_size=40)), data.draw(st.integers(1, 25)))
    row = data.draw(st.integers(0, len(batch.tokens) - 1))
    format = data.draw(formats)
    others = [new_layers(model, model.caps, format) for _ in batch.tokens]
    convert(batch.layers, others)
    moved = Batch(model, KvFormat())
    moved.layers, moved.tokens, moved.longest = others[row], [batch.tokens[row]], [len(batch.tokens[row])]
    for _ in range(8):
        moved.step([data.draw(st.lists(tokens, min_size=1, max_size=5))])
    moved.check()


@pytest.mark.parametrize("n", [3, 4, 17, 40])
def test_rows_of_four_bits_become_exact_ones_whole(n: int) -> None:
    """Also those behind the last whole block, and they go on at other bits from what is left of them."""
    model, caps = tiny("wide heads")
    ids = [int(x) for x in np.random.default_rng(1).integers(1, 90, n)]
    four = KvFormat(4, 4, recent=5)
    source, fresh = new_layers(model, caps, four), new_layers(model, caps)
    forward(model, [ids], source)
    keys, values = source.rows[0].keys_and_values()
    mx.eval(keys, values)
    convert(source, [fresh])
    assert fresh.rows[0].read(0, 0, n)[0].shape[2] == n
    last = np.array(fresh.rows[0].keys[:, :, n - 1])
    np.testing.assert_array_equal(last, np.array(keys[:, :, -1]))
    eight = new_layers(model, caps, KvFormat(8, 8, recent=5))
    again = new_layers(model, caps, four)
    convert(fresh, [eight])
    convert(eight, [again])
    assert again.lengths == [n] and np.isfinite(np.array(forward(model, [ids[:6]], again))).all()
