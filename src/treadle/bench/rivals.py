"""Treadle beside other servers, over HTTP: the same model and the same requests, one server after the other.

    python -m treadle.bench rivals [--model smollm2] [--only NAME ...] [--python NAME=/path/to/python ...]

Each server is started on a free port, answers a first chat, is asked what all are asked, and is ended. Those are
`mlx_lm.server`, `vllm-mlx` and llama-cpp-python's, where they are installed; `--python` names the interpreter of
another environment for one of them. A GGUF file is written as a folder for those that take no such file: the same
packed weights. All run as they are started without further options, but for those in `rival_servers.py`.

Decode: one stream after its first token. Cold and cached: time to the first token of a prompt whose long system message
is new, and of another question behind the same one. Streams: tokens per second of so many requests at once, with their
prefills. Exit code 1 when a server failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from treadle.bench.parts import end_on_sigterm
from treadle.bench.report import report
from treadle.bench.rival_servers import RIVALS, START_S, Rival, started, versions
from treadle.bench.serve_load import Sample, Target, measure
from treadle.bench.serve_report import per_token
from treadle.bench.serve_workloads import Conversation, conversations
from treadle.bench.values import positive
from treadle.errors import TreadleError
from treadle.models.sources import ResolvedSource, resolve

QUESTION = 20  # words
CACHED = 3  # questions behind a system message that is known


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench rivals", description=__doc__)
    names = [rival.name for rival in RIVALS]
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a server")
    parser.add_argument("--tokens", type=positive, default=64, help="of a reply")
    parser.add_argument("--words", type=int, default=400, help="of the long system message")
    parser.add_argument("--streams", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--start-s", type=float, default=START_S, help="longest time until a server answers")
    args = parser.parse_args(argv)
    pythons = dict(pair.partition("=")[::2] for pair in args.python)
    if unknown := [name for name, path in pythons.items() if name not in names or not path]:
        parser.error(f"--python takes NAME=/path/to/python with {', '.join(names)}, not {unknown[0]!r}")
    end_on_sigterm()
    chosen = tuple(rival for rival in RIVALS if rival.name in args.only)
    asked = partial(ask, tokens=args.tokens, words=args.words, streams=args.streams, rounds=args.rounds)
    sys.exit(compare(chosen, pythons, resolve(args.model, None), asked, args.start_s))


def compare(
    rivals: Sequence[Rival],
    pythons: Mapping[str, str],
    source: ResolvedSource,
    asked: Callable[[Rival, str], dict[str, Any]],
    start_s: float = START_S,
) -> int:
    """Measure them one after the other by `asked`, which is given a rival and its address; returns the exit code.

    `pythons`: interpreters by name, for those that are not in this one. Ratios are the first rival's figure over
    the row's own.
    """
    found = versions(rivals, pythons, sys.executable)
    left_out = [name for name, version in found.items() if version is None]
    failed: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder: Path | None = None
        for rival in rivals:
            if (version := found[rival.name]) is None:
                continue
            print(f"{rival.name} {version} ...", flush=True)
            try:
                path = source.path
                if source.kind not in rival.takes:
                    if source.kind != "gguf":
                        raise TreadleError(f"{rival.name} takes a GGUF file, and {source.name} is a folder.")
                    folder = folder or as_folder(source.path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
                    path = folder
                with started(rival, pythons.get(rival.name, sys.executable), path, start_s) as url:
                    row = asked(rival, url)
                rows.append({"server": rival.name, "version": version, **row})
            except TreadleError as error:
                failed[rival.name] = str(error)
    first = next((row for row in rows if row["server"] == rivals[0].name), None)
    for row in rows:
        for what in ("decode", "streams"):
            row[f"{what} ratio"] = None if first is None else first[f"{what} tok/s"] / row[f"{what} tok/s"]
    if left_out:
        print(f"Not installed: {', '.join(left_out)} (--python NAME=/path/to/python names another environment).")
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    report("rivals", rows or [{"server": "none"}], model=source.name, not_installed=left_out, failed=failed)
    return 1 if failed else 0


def as_folder(file: Path, folder: Path) -> Path:
    """Write a GGUF file's model to `folder` in Hugging Face layout, with the weights as they are packed."""
    from treadle.models import gguf, gguf_model, gguf_tokenizer
    from treadle.runtime import device_facts, mlx_lm_module

    opened = gguf.read(file)
    tokenizer = gguf_tokenizer.load_tokenizer(opened)
    model, config = gguf_model.build(opened, device_facts().backend, dense=False)
    utils = mlx_lm_module("utils")
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    tokenizer.save_pretrained(folder)
    return folder


def ask(rival: Rival, url: str, *, tokens: int, words: int, streams: int, rounds: int) -> dict[str, Any]:
    """What every server is asked, in the same order. Raises TreadleError when a request failed."""
    decode: list[float] = []
    cold: list[float] = []
    cached: list[float] = []
    together: list[float] = []
    hits: list[int] = []
    for seed in range(rounds):
        single, _ = _load(rival, url, conversations("chat", 2, QUESTION, 10 * seed), 1, tokens)
        decode += [1 / pace for sample in single if (pace := per_token(sample))]
        first, *rest = _load(rival, url, conversations("shared-prefix", 1 + CACHED, words, 10 * seed + 1), 1, 4)[0]
        cold += [first.ttft_s] if first.ttft_s is not None else []
        cached += [sample.ttft_s for sample in rest if sample.ttft_s is not None]
        hits += [sample.cached_tokens for sample in rest if sample.cached_tokens is not None]
        made, seconds = _load(rival, url, conversations("chat", streams, QUESTION, 10 * seed + 2), streams, tokens)
        together.append(sum(sample.num_tokens for sample in made) / seconds)
    if not (decode and cold and cached):
        raise TreadleError(f"{rival.name} streamed too few tokens to be timed.")
    return {
        "decode tok/s": median(decode),
        "cold ms": 1e3 * median(cold),
        "cached ms": 1e3 * median(cached),
        "cached tokens": median(hits) if hits else None,
        "streams tok/s": median(together),
    }


def _load(
    rival: Rival, url: str, asked: Sequence[Conversation], concurrency: int, tokens: int
) -> tuple[list[Sample], float]:
    target = Target(url, rival.model, max_tokens=tokens)
    _, samples, seconds = asyncio.run(measure(target, asked, concurrency))
    if failed := [sample.error for sample in samples if sample.error is not None]:
        raise TreadleError(f"{rival.name} failed {len(failed)} of {len(samples)} requests: {failed[0]}")
    return samples, seconds
