"""The result of a load: percentiles over all requests, as a table and as JSON. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.bench.serve_load import Sample

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (50, 95, 99)
TIMES = {
    "ttft_s": "time to first token",
    "inter_chunk_s": "between chunks",
    "per_token_s": "time per token after the first",
    "duration_s": "whole request",
}


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Counts, throughput and times. Failed requests count as such and nowhere else; `null` is not told or no value."""
    good = [sample for sample in samples if sample.error is None]
    tokens = sum(sample.num_tokens for sample in good)
    prompt = added(sample.prompt_tokens for sample in good)
    cached = added(sample.cached_tokens for sample in good)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None).most_common(20)),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": tokens,
        "requests_per_s": len(good) / seconds,
        "completion_tokens_per_s": tokens / seconds,
        "ttft_s": spread([s.ttft_s for s in good if s.ttft_s is not None]),
        "inter_chunk_s": spread([gap for s in good for gap in s.gaps]),
        "per_token_s": spread([pace for s in good if (pace := per_token(s)) is not None]),
        "duration_s": spread([s.duration_s for s in good]),
    }


def per_token(sample: Sample) -> float | None:
    """Mean time of a token after the first; None for fewer than two chunks."""
    if len(sample.chunk_times) < 2 or sample.num_tokens < 2:
        return None
    return (sample.chunk_times[-1] - sample.chunk_times[0]) / (sample.num_tokens - 1)


def added(counts: Iterable[int | None]) -> int | None:
    """Their sum, over those that are known; None when none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles: the value at or below which that share of the values lies (nearest rank)."""
    ranked = sorted(values)
    shares = {f"p{p}": ranked[-(-len(ranked) * p // 100) - 1] if ranked else None for p in PERCENTILES}
    return {"mean": sum(ranked) / len(ranked) if ranked else None, **shares}


def table(title: str, result: dict[str, Any]) -> Table:
    """Times in milliseconds."""
    from rich.table import Table

    drawn = Table(title=title)
    for heading in ("ms", "mean", *(f"p{p}" for p in PERCENTILES)):
        drawn.add_column(heading, justify="left" if heading == "ms" else "right")
    for key, name in TIMES.items():
        drawn.add_row(name, *("-" if value is None else f"{1e3 * value:.1f}" for value in result[key].values()))
    return drawn


def sentence(result: dict[str, Any]) -> str:
    """The counts in a line."""
    told = result["prompt_tokens"] is not None
    prompt = f"{result['prompt_tokens']} prompt tokens ({result['cached_tokens'] or 0} cached), " if told else ""
    return (
        f"{result['requests']} requests in {result['seconds']:.1f} s, {result['failed']} failed; {prompt}"
        f"{result['completion_tokens']} generated, {result['completion_tokens_per_s']:.1f} tokens/s, "
        f"{result['requests_per_s']:.2f} requests/s"
    )
