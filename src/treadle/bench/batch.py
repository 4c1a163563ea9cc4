"""Many streams: throughput of 1, 4, 16 rows in the one loop, against one stream and against `mlx_lm`'s batches.

python -m treadle.bench batch [--model smollm2 | random:8b:4] [--streams 1 4 16] [--prompt 64] [--tokens 64]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from treadle.bench import rival, roofline
from treadle.bench.drive import loop_of, random_request
from treadle.bench.report import report
from treadle.bench.roofline import Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive
from treadle.types import Request

WARM = 4  # steps of all rows before the clock starts
SPARE = 16  # tokens that each row may make per prompt that is prefilled beside it


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench batch", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=2)
    args = parser.parse_args(argv)
    subject, plain = subject_of(args.model), plain_of(args.model)
    limit, work = roofline.measured(), Work.of(subject, plain)
    rows: list[dict[str, Any]] = []
    for streams in args.streams:
        requests = _requests(subject, streams, args.prompt, args.tokens)
        ours, theirs = [], []
        for _ in range(args.rounds):  # the best of them, so that what is built in the first does not count
            ours.append(_speed(subject, requests, args.tokens))
            theirs.append(rival.batch(plain, [request.prompt for request in requests], args.tokens, WARM))
        speed, told = max(ours), [one for one in theirs if one is not None]
        their_speed = max(told) if told else None
        one = rows[0]["tok/s"] / rows[0]["streams"] if rows else speed / streams
        num_bytes = work.step_bytes([args.prompt + args.tokens / 2] * streams)
        rows.append(
            {
                "streams": streams,
                "tok/s": speed,
                "ms/step": 1000 * streams / speed,
                "times one stream": speed / one,
                "mlx_lm tok/s": their_speed,
                "ratio": None if their_speed is None else speed / their_speed,
                "GB/step": None if num_bytes is None else num_bytes / 1e9,
                "of roofline": limit.share(streams / speed, num_bytes, work.step_flops(streams, streams)),
            }
        )
    caps = subject.caps
    report(
        "batch", rows, model=subject.name, prompt=args.prompt, batching=caps.batching.value, why=caps.why, **limit.facts
    )


def _requests(subject: Subject, streams: int, prompt: int, tokens: int) -> list[Request]:
    """With some tokens more than are timed: no row may end before all of them decode."""
    vocab = subject.caps.vocab_size
    return [random_request(f"r{i}", vocab, prompt, tokens + WARM + SPARE * streams, i) for i in range(streams)]


def _speed(subject: Subject, requests: list[Request], tokens: int) -> float:
    """Tokens per second over all rows, from the moment all rows decode until the first one ends.

    Raises RuntimeError when one has ended by then.
    """
    streams = len(requests)
    loop = loop_of(subject, max_rows=streams)
    for request in requests:
        loop.submit(request)
    while sum(len(g.rows) for g in loop.groups) < streams:
        if any(output.finish is not None for output in loop.step()):
            raise RuntimeError(f"A row ended before all {streams} decoded: give them shorter prompts (--prompt).")
    for _ in range(WARM):
        loop.step()
    began, made = time.perf_counter(), 0
    while loop.num_running == streams and made < tokens * streams:
        made += sum(len(o.tokens) for o in loop.step())
    seconds = time.perf_counter() - began
    for request in requests:
        loop.abort(request.id)
    return made / seconds
