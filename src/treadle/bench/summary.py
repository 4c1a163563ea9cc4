"""One table of all that was measured: a line for each figure, from the JSON that the benchmarks print. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Which figure of each row of a benchmark belongs into the table."""

    name: str  # with columns in braces
    figure: str  # a column
    unit: str
    ratio: str | None = None  # a column; more than 1 is better
    against: str = ""  # what the ratio compares with
    share: str | None = None  # a column; of the roofline


RULES: dict[str, tuple[Rule, ...]] = {
    "decode": (
        Rule("decode, {prompt} tokens", "decode tok/s", "tok/s", "decode ratio", "mlx_lm", "decode of roofline"),
        Rule("prefill, {prompt} tokens", "prefill tok/s", "tok/s", "prefill ratio", "mlx_lm", "prefill of roofline"),
    ),
    "batch": (Rule("batch, {streams} streams", "tok/s", "tok/s", "ratio", "mlx_lm", "of roofline"),),
    "pace": (Rule("pace, {stream}", "median ms", "ms between tokens"),),
    "prefix: look-up": (Rule("look-up, {tokens} tokens", "treadle us", "us", "times faster", "mlx_lm"),),
    "prefix: cached turn": (Rule("turn on {context} tokens", "turn ms", "ms", "ratio", "mlx_lm", "of roofline"),),
    "prefix: bytes": (Rule("{branches} branches on {context}", "treadle MB", "MB", "ratio", "mlx_lm"),),
    "speculate: real text": (
        Rule("speculate, {prompt}, {rows} rows, {mode}", "tok/s", "tok/s", "ratio to off", "no drafts"),
    ),
    "speculate: drafts by script": (
        Rule("speculate, {rows} rows, right {accept}", "on tok/s", "tok/s", "ratio", "no drafts"),
    ),
    "speculate: milliseconds a step": (Rule("checked step, {rows} rows", "overhead host ms", "ms of the host"),),
    "sparse: speed": (Rule("sparse, {tokens} tokens", "sparse ttft s", "s", "times faster", "whole prompt"),),
    "kv": (Rule("KV, {format} bits", "step ms", "ms a step", "of exact speed", "exact rows", "of roofline"),),
    "overhead": (Rule("loop, {prompt} tokens", "loop tok/s", "tok/s", "ratio", "bare loop", "of roofline"),),
    "http": (Rule("HTTP, {streams} streams", "tok/s", "tok/s", "ratio", "loop alone", "of roofline"),),
    "start": (Rule("start, {start}", "first chat s", "s to the first reply"),),
}


def lines(reports: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the table, of those reports that have a rule.

    Raises KeyError for a row that lacks a column of its rule.
    """
    found = []
    for told in reports:
        for rule in RULES.get(told["bench"], ()):
            found += [_line(rule, row, told.get("model", "")) for row in told["rows"]]
    return found


def _line(rule: Rule, row: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        "what": rule.name.format_map(row),
        "model": model,
        "figure": row[rule.figure],
        "unit": rule.unit,
        "ratio": None if rule.ratio is None else row[rule.ratio],
        "to": rule.against,
        "of roofline": None if rule.share is None else row[rule.share],
    }
