"""The suite for a machine with CUDA or Metal: one process that makes each model once for all parts.

    python -m treadle.bench gpu [--models random:8b random:8b:4] [--parts decode batch ...] [--limit-s 600]

The models have random weights, so nothing is downloaded. Parts are not begun once the time is over, and the last line
names them. A table of all figures comes last, with their ratio to what they compare with in the same run and their
share of the roofline; then one line of JSON. Exit code 1 when a part failed.
"""

from __future__ import annotations

import argparse
import sys
import time

from treadle.bench.parts import Part, Run, chosen, inside

# Both ends of what speculation can do: drafts that are mostly right, and a text in which nothing is ever found.
SCRIPT = ("--part", "script", "--accept", "0.8", "--no-repeats")
SMALL = "random:0.6b"  # reads long prompts for the model under measurement


def parts_of(model: str, small: str = SMALL) -> list[Part]:
    """In this order: what matters most comes first, and what changes the model last."""
    name = ("--model", model)
    return [
        Part("decode", (*name, "--prompt", "128", "2048", "--tokens", "64", "--rounds", "2")),
        Part("overhead", (*name, "--tokens", "96", "--rounds", "2")),
        Part("batch", (*name, "--streams", "1", "4", "16", "--tokens", "48")),
        Part("prefix", (*name, "--context", "4096")),
        Part("http", (*name, "--streams", "1", "16", "--tokens", "400")),
        Part("speculate", (*name, *SCRIPT, "--rows", "1", "8", "--tokens", "128", "--rounds", "2")),
        Part("sparse", (*name, "--part", "speed", "--small", small, "--context", "8192", "--rounds", "1")),
        Part("kv", (*name, "--context", "4096", "--steps", "24", "--bits", "16", "8", "4")),
    ]


NAMES = [part.name for part in parts_of("")]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench gpu", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["random:8b", "random:8b:4"])
    parser.add_argument("--small", default=SMALL, help="the model that skims in sparse prefill")
    parser.add_argument("--parts", nargs="+", choices=NAMES)
    parser.add_argument("--limit-s", type=float, default=600.0, help="no part is begun after so long")
    args = parser.parse_args(argv)
    from treadle.bench.shapes import forget

    run = Run("gpu")
    began = time.perf_counter()
    for model in args.models:
        for part in chosen(parts_of(model, args.small), args.parts):
            if time.perf_counter() - began > args.limit_s:
                run.left_out.append(part.title)
            else:
                run.part(part, inside)
        forget()
    sys.exit(run.end())
