"""`kv_bits`: what may be written, and what `auto` makes of what was measured."""

from __future__ import annotations

import pytest

from treadle.cache.formats import Measured, choose, parse
from treadle.config import KV_BITS, Config
from treadle.errors import ConfigError
from treadle.types import EXACT, KvFormat

GOOD = Measured(delta_percent=0.02, speed=1.1, context=4096, needle=1.0)


@pytest.mark.parametrize(
    ("text", "format"),
    [("16", EXACT), ("8", KvFormat(8, 8)), ("4", KvFormat(4, 4)), ("8/4", KvFormat(8, 4)), ("16/8", KvFormat(16, 8))],
)
def test_a_format_is_read_as_it_is_written(text: str, format: KvFormat) -> None:
    assert parse(text) == format
    assert str(format) == text
    assert KV_BITS.fullmatch(text)


@pytest.mark.parametrize("text", ["", "2", "8/", "/8", "8/3", "8/4/4", "eight", "08"])
def test_other_formats_are_refused_by_the_configuration_and_by_the_parser(text: str) -> None:
    for refused in (lambda: parse(text), lambda: Config(kv_bits=text)):
        with pytest.raises(ConfigError, match="kv_bits"):
            refused()


def test_numbers_will_do_in_a_file() -> None:
    assert Config(kv_bits=8).kv_bits == 8
    assert choose("8", {}, 32, 100) == (KvFormat(8, 8, 32, 100), "as set")


@pytest.mark.parametrize(
    ("measured", "bits", "why"),
    [
        ({}, "16", "not measured"),
        ({"4": GOOD}, "16", "not measured"),
        ({"8": GOOD}, "8", "1.10 of the exact speed"),
        ({"8": Measured(0.02, 0.9, 4096, 1.0)}, "16", "0.90 of the exact speed at 4096 tokens"),
        ({"8": Measured(0.2, 1.1, 4096, 1.0)}, "16", "0.20 % of perplexity"),
    ],
)
def test_auto_takes_eight_bits_only_where_they_cost_nothing(measured: dict, bits: str, why: str) -> None:
    kv, reason = choose("auto", measured)
    assert str(kv) == bits and why in reason
