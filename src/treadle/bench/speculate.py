"""Speculation: drafts from the text, drafts by script, and what the host adds to a checked step.

python -m treadle.bench speculate [--part text script steps] [--model smollm2 | random:8b:4] [--accept 0.8 0]
"""

from __future__ import annotations

import argparse

from treadle.bench.report import report
from treadle.bench.shapes import subject_of
from treadle.bench.speculate_script import Stage, scripted_case
from treadle.bench.speculate_steps import step_case
from treadle.bench.speculate_text import LENGTHS, Bench
from treadle.bench.values import positive, share

PARTS = ("text", "script", "steps")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench speculate", description=__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--model", default=None, help="of text (smollm2) and script (random:tiny)")
    parser.add_argument("--accept", type=share, nargs="+", default=[0.8, 0.0], help="script: share of right drafts")
    parser.add_argument("--context", type=positive, nargs="+", default=[1024], help="script: tokens of the prompt")
    parser.add_argument("--rows", type=positive, nargs="+", default=[1], help="rows that decode together")
    parser.add_argument("--tokens", type=positive, default=192, help="per row and run")
    parser.add_argument("--rounds", type=positive, default=3, help="by turns; steps are short: twice as many")
    parser.add_argument("--draft", choices=("none", "self"), default="none", help="text: the model as its own draft")
    parser.add_argument("--length", choices=LENGTHS, nargs="+", default=list(LENGTHS), help="text: of the prompts")
    parser.add_argument("--noise", type=float, default=None, help="script: logits this close are a tie; 0: none are")
    parser.add_argument("--no-repeats", action="store_true", help="script: lookup alone, in a text that never repeats")
    parser.add_argument("--own-text", action="store_true", help="script: random weights decide the text too")
    args = parser.parse_args(argv)
    if args.no_repeats and args.own_text:
        parser.error("a text that never repeats is not the model's own: leave out --own-text")
    if args.tokens < 2:
        parser.error("--tokens must be at least 2: speed is from one token to another")
    if "text" in args.part:
        _text(args)
    if "script" in args.part:
        _script(args)
    if "steps" in args.part:
        _steps(args)


def _text(args: argparse.Namespace) -> None:
    from treadle.models.load import load_model
    from treadle.models.sources import resolve

    loaded = load_model(resolve(args.model or "smollm2", None), None)
    modes = ["off", "lookup", *(["draft"] if args.draft == "self" or loaded.draft else [])]
    if "draft" not in modes:
        print(f"draft: not run, because {loaded.name} has no smaller model of its kind; --draft self takes itself.")
    bench = Bench(loaded, modes, args.tokens, max(args.rows))
    lines = [line for rows in args.rows for line in bench.cases(args.length, rows, args.rounds)]
    report("speculate: real text", lines, model=loaded.name, draft=args.draft)


def _script(args: argparse.Namespace) -> None:
    name = args.model or "random:tiny"
    subject = subject_of(name)
    rights = [*args.accept, *([None] if args.no_repeats else [])]
    settled = name.startswith("random:") and not args.own_text
    stage = Stage(subject, settled, args.noise)
    for case in [(context, rows) for context in args.context for rows in args.rows]:
        lines = scripted_case(stage, *case, args.tokens, args.rounds, rights)
        report(
            "speculate: drafts by script",
            lines,
            model=subject.name,
            noise=stage.calibration.noise,
            noise_set_by_hand=args.noise is not None,
            text="settled by the token before" if settled else "the model's own",
        )


def _steps(args: argparse.Namespace) -> None:
    subject = subject_of("random:instant")
    report(
        "speculate: milliseconds a step",
        [step_case(subject, rows, 2 * args.rounds) for rows in (1, 4)],
        model=subject.name,
    )
