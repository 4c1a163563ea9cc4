"""The planner keeps running streams at their pace, lets short prompts pass, and starves nobody."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.scheduler import Pacer, Prefilling, fits_together, pick


@given(st.floats(0.002, 0.4), st.floats(20, 20000), st.floats(0.1, 0.9), st.floats(0.02, 1.0))
def test_a_long_prefill_leaves_the_median_gap_of_a_stream_as_it_was(
    step_s: float, speed: float, share: float, stall_s: float
) -> None:
    pacer = Pacer(2048, share, stall_s)
    left, gaps, gap = 60_000, [], 0.0
    for _ in range(400):
        gap += step_s
        pacer.decoded(step_s)
        gaps.append(gap)
        gap = 0.0
        n = min(left, pacer.allowance(decoding=True))
        if n:
            pacer.prefilled(n, n / speed, decoding=True)
            left -= n
            gap = n / speed
    assert left < 60_000
    assert median(gaps) <= 1.01 * step_s


@given(st.floats(0.002, 0.4), st.floats(100, 20000), st.floats(0.05, 1.0))
def test_a_chunk_beside_streams_lasts_no_longer_than_the_stall_allows(
    step_s: float, speed: float, stall_s: float
) -> None:
    pacer = Pacer(4096, 0.5, stall_s)
    longest = 0.0
    for i in range(300):
        pacer.decoded(step_s)
        n = pacer.allowance(decoding=True)
        if n:
            pacer.prefilled(n, n / speed, decoding=True)
            longest = max(longest, n / speed) if i > 5 else longest
    assert longest <= max(stall_s, 64 / speed) * 1.01


def test_alone_a_prefill_gets_whole_chunks() -> None:
    pacer = Pacer(512, 0.5, 0.25)
    assert pacer.allowance(decoding=False) == 512
    pacer.prefilled(512, 0.5, decoding=False)
    assert pacer.allowance(decoding=False) == 512


def test_on_a_slow_device_a_chunk_alone_takes_about_a_second() -> None:
    """Nothing that comes meanwhile, a cancellation included, is looked at before it ends."""
    pacer = Pacer(512, 0.5, 0.25)
    for _ in range(20):
        n = pacer.allowance(decoding=False)
        pacer.prefilled(n, n / 100, decoding=False)
    assert 80 <= n <= 100


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=8))
def test_the_shortest_goes_first_and_the_oldest_always_moves(lefts: list[int]) -> None:
    candidates = [Prefilling(left, i) for i, left in enumerate(lefts)]
    assert lefts[pick(candidates, 0)] == min(lefts)
    assert pick(candidates, 1) == 0


def test_rows_of_very_different_length_do_not_share_a_buffer() -> None:
    assert fits_together([100, 900], 5)
    assert fits_together([3000], 5900)
    assert not fits_together([3000], 6100)
    assert not fits_together([8000, 5000], 1200)
