"""One screen of `treadle top`: a snapshot of `/v1/stats` as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # seconds that a line of bars shows
MOST_ROWS = 12  # live requests that are listed

Stats = Mapping[str, Any]


def frame(stats: Stats) -> RenderableType:
    """Server, speeds with a minute's history, memory and cache, live requests."""
    return Group(head(stats), speeds(stats), holdings(stats), requests(stats))


def head(stats: Stats) -> RenderableType:
    """What runs where, and how much it has done."""
    server, device, totals = stats["server"], stats["device"], stats["totals"]
    where = "-" if device is None else f"{device['name']} ({device['backend']})"
    ends = ", ".join(f"{count} {reason}" for reason, count in totals["finished"].items() if count) or "none"
    models = ", ".join(f"{m['id']} ({m['state']})" for m in stats["models"])
    failures = {server["failure"], *(m["failure"] for m in stats["models"])} - {None}
    lines = (
        f"{server['state']}, up {duration(server['uptime_s'])}, on {where}",
        f"models: {models}",
        f"requests: {stats['running']} running, {stats['waiting']} waiting; ended: {ends}; "
        f"{totals['disconnects']} clients left",
        *sorted(failures),
    )
    return Panel(Text("\n".join(lines)), title=f"Treadle {server['version']}", title_align="left")


def speeds(stats: Stats) -> RenderableType:
    """The newest value of each series and its bars."""
    series = stats["history"]["series"]
    shown: Sequence[tuple[str, str, Callable[[float], str]]] = (
        ("time to first token", "ttft_s", seconds),
        ("between tokens, median", "inter_token_p50_s", seconds),
        ("between tokens, 95 %", "inter_token_p95_s", seconds),
        ("prefill tokens/s", "prefill_tokens_per_s", number),
        ("decode tokens/s", "decode_tokens_per_s", number),
        ("batch", "batch", number),
        ("from cache", "cached_share", share),
        ("drafts accepted", "acceptance", share),
    )
    table = Table.grid(padding=(0, 2))
    for title, key, form in shown:
        values = series[key][-WIDTH:]
        known = [value for value in values if value is not None]
        table.add_row(title, Text(form(known[-1]) if known else "-", justify="right"), bars(values))
    return table


def holdings(stats: Stats) -> RenderableType:
    """Memory, cache and tokens in three lines."""
    memory, cache, tokens = stats["memory"], stats["cache"], stats["totals"]["tokens"]
    lines = [
        f"tokens: {tokens['cached']} cached + {tokens['computed']} computed, {tokens['generated']} generated",
    ]
    if memory is not None:
        lines.append(
            f"memory: {size(memory['active_bytes'])} of {size(memory['limit_bytes'])}, "
            f"at most {size(memory['peak_bytes'])}"
        )
    if cache is not None:
        hits = ", ".join(f"{count} {kind}" for kind, count in cache["hits"].items() if count) or "no look-ups"
        lines.append(f"cache: {size(cache['used_bytes'])} of {size(cache['budget_bytes'])}; {hits}")
    lines += [speculation(model, counts) for model, counts in (stats["speculation"] or {}).items()]
    return Text("\n".join(lines))


def speculation(model: str, counts: Stats) -> str:
    """Drafts of one model, and what they were good for."""
    rate, speed_up = counts["rate"], counts["speed_up"]
    accepted = "no drafts yet" if rate is None else f"{share(rate)} of the drafts accepted"
    faster = "" if speed_up is None else f", {speed_up:.2f} times the speed of plain steps"
    return f"speculation of {model}: {accepted}{faster}"


def requests(stats: Stats) -> RenderableType:
    """Who waits and runs; the oldest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ID", "MODEL", "STATE"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=16)
    for heading in ("PROMPT", "CACHED", "OUT", "TOKENS/S", "AGE"):
        table.add_column(heading, justify="right", no_wrap=True)
    live = stats["live"]
    for r in live[:MOST_ROWS]:
        speed = "-" if r["tokens_per_s"] is None else number(r["tokens_per_s"])
        prompt = f"{r['prompt_computed']}/{r['prompt_tokens']}"
        counts = (prompt, str(r["cached_tokens"]), str(r["generated_tokens"]))
        table.add_row(Text(r["id"]), Text(r["model"]), r["state"], *counts, speed, duration(r["age_s"]))
    if len(live) > MOST_ROWS:
        table.add_row(f"and {len(live) - MOST_ROWS} more")
    return table


def bars(values: Sequence[float | None]) -> str:
    """A character per value, scaled to the largest; a blank where nothing was measured."""
    top = max((value for value in values if value is not None), default=0.0)
    return "".join(" " if value is None else bar(value / top if top else 0.0) for value in values)


def bar(height: float) -> str:
    return BARS[min(int(height * len(BARS)), len(BARS) - 1)]


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def duration(value: float) -> str:
    """The two largest units."""
    whole = int(value)
    if whole < 60:
        return f"{value:.1f}s" if value < 10 else f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60}s"
    return f"{whole // 3600}h {whole % 3600 // 60}m"
