"""`treadle bench quality` compares formats on one text; fewer bits are never called better than they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import VOCAB, tiny
from treadle.bench import quality
from treadle.errors import TreadleError
from treadle.types import LayerKind


class Letters:
    """One id for each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]


def loaded(name: str) -> Any:
    model, caps = tiny(name)
    return SimpleNamespace(model=model, caps=caps, tokenizer=Letters(), name=name)


def test_every_format_is_measured_against_exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "HAYSTACK", 100)
    monkeypatch.setattr(quality, "STEPS", 4)
    told: list[str] = []
    found = quality.measure(loaded("wide heads"), None, 600, 400, told.append)
    assert found.tokens == 600 and found.perplexity > 1 and len(told) == 4
    assert list(found.formats) == ["8", "8/4", "4"]
    assert abs(found.formats["8"].delta_percent) < abs(found.formats["4"].delta_percent)
    assert all(one.speed > 0 and one.context == 399 and 0 <= one.needle <= 1 for one in found.formats.values())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(TreadleError, match="at least 512"):
        quality.measure(loaded("wide heads"), "short", 600, 400, print)
    foreign = loaded("wide heads")
    foreign.caps = replace(foreign.caps, layers=(LayerKind.FOREIGN,))
    with pytest.raises(TreadleError, match="exact rows only"):
        quality.measure(foreign, None, 600, 400, print)
