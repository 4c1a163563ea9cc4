"""A model gets packed rows only where they work, and says what each kind of layer has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import tiny
from treadle.cache import packed_rows
from treadle.cache.formats import Measured
from treadle.models import quality
from treadle.models.kv import with_kv
from treadle.models.quality import Quality
from treadle.types import EXACT, KvFormat, LayerKind

KV = KvFormat(8, 4)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("wide heads", {"rows": "8/4"}), ("attention", {"rows": "16"}), ("window", {"windowed": "16", "rows": "16"})],
)
def test_each_kind_of_layer_tells_the_bits_that_it_has(name: str, bits: dict[str, str]) -> None:
    """Heads of 8 values cannot be packed; windowed layers stay exact."""
    caps = with_kv(*tiny(name), KV, "as set")
    assert (caps.kv, caps.kv_why, caps.kv_layers) == (KV, "as set", bits)


@pytest.mark.parametrize("name", ["delta", "mamba", "pair", "mla", "moe", "sinks", "window"])
def test_every_kind_of_cache_passes_the_trial(name: str) -> None:
    assert with_kv(*tiny(name), KV, "").kv == KV


def test_the_footprint_is_that_of_packed_rows_and_a_bounded_part_of_exact_ones() -> None:
    model, caps = tiny("wide heads")
    packed = with_kv(model, caps, KvFormat(8, 8), "").footprint
    assert packed.row_bytes / (caps.footprint.row_bytes / 2) == pytest.approx(0.53, abs=0.01)
    assert packed.rows(10**6) < 0.28 * caps.footprint.rows(10**6)
    assert packed.rows(10) >= caps.footprint.rows(10)


def test_four_bits_cost_the_means_of_blocks_and_one_more_exact_block() -> None:
    model, caps = tiny("wide heads")
    four, mixed = (with_kv(model, caps, kv, "").footprint for kv in (KvFormat(4, 4), KvFormat(8, 4)))
    assert four.row_bytes / (caps.footprint.row_bytes / 2) == pytest.approx((4.75 + 4.5) / 32, abs=0.001)
    assert mixed.row_bytes / (caps.footprint.row_bytes / 2) == pytest.approx((8.5 + 4.5) / 32, abs=0.001)
    eight = with_kv(model, caps, KvFormat(8, 8), "").footprint
    assert four.windows[0][0] == mixed.windows[0][0] == eight.windows[0][0] + 64


def test_a_model_with_a_cache_of_its_own_stays_exact_and_says_why() -> None:
    model, caps = tiny("attention")
    foreign = replace(caps, layers=tuple(LayerKind.FOREIGN for _ in caps.layers))
    found = with_kv(model, foreign, KV, "as set")
    assert found.kv == EXACT and "cache class of its own" in found.kv_why and found.kv_layers == {"foreign": "16"}


def test_attention_that_goes_wrong_with_packed_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_rows.PackedBuffer, "form", lambda buffer, rows, start: rows * 0.5)
    found = with_kv(*tiny("moe"), KV, "as set")
    assert found.kv == EXACT and "goes wrong with packed rows" in found.kv_why


def test_quality_is_kept_for_each_device_and_a_damaged_file_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    found = Quality("2026-11-28", "documentation", 20_000, 7.5, {"8": Measured(0.01, 0.98, 4096, 1.0)})
    assert quality.stored("rev", "a") is None
    path = quality.store("rev", "a", found)
    assert quality.stored("rev", "a") == found and quality.stored("rev", "b") is None
    other = replace(found, perplexity=8.0)
    quality.store("rev", "b", other)
    assert quality.stored("rev", "a") == found and quality.stored("rev", "b") == other
    path.write_text("{")
    assert quality.stored("rev", "a") is None
    quality.store("rev", "a", found)
    assert quality.stored("rev", "a") == found
