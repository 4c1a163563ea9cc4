"""The suite for a CPU: every benchmark that says what a user would feel, in small. Some minutes.

    python -m treadle.bench [suite] [--model smollm2] [--parts decode batch ...] [--limit-s 240]

Each part is a process of its own. A table of all figures comes last, with their ratio to what they compare with in
the same run and their share of the roofline; then one line of JSON. Exit code 1 when a part failed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from treadle.bench.parts import Part, Run, apart, chosen, end_on_sigterm


def parts_of(model: str) -> list[Part]:
    """In this order: what matters most comes first."""
    name = ("--model", model)
    return [
        Part("decode", (*name, "--prompt", "100", "1000", "--tokens", "32", "--rounds", "2")),
        Part("batch", (*name, "--streams", "1", "4", "8", "--tokens", "24")),
        Part("prefix", (*name, "--context", "1024")),
        Part("speculate", (*name, "--part", "script", "steps", "--tokens", "64", "--rounds", "1")),
        Part("sparse", (*name, "--part", "speed", "--context", "1024", "--rounds", "1")),
        Part("kv", (*name, "--context", "1024", "--steps", "16", "--bits", "16", "8", "4")),
        Part("pace", (*name, "--prompt", "2000", "--tokens", "48")),
        Part("overhead", (*name, "--tokens", "32", "--rounds", "2")),
        Part("http", ("--streams", "1", "8", "--tokens", "200")),
        Part("start", (*name, "--runs", "1")),
    ]


NAMES = [part.name for part in parts_of("")]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench suite", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", nargs="+", choices=NAMES)
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest time of one part")
    args = parser.parse_args(argv)
    end_on_sigterm()
    run = Run("suite")
    for part in chosen(parts_of(args.model), args.parts):
        run.part(part, partial(apart, limit_s=args.limit_s))
    sys.exit(run.end())
