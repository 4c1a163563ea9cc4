"""What HTTP costs: the real server against the loop without one, 1 to 32 streams.

    python -m treadle.bench http [--model random:instant | random:8b] [--streams 1 8 32] [--tokens 400]

The model has random weights; an instant one shows the cost itself, a large one what is left of its speed. Both sides
run without drafts. The overhead is the difference in time per step divided by the number of streams: microseconds per
token and stream, from the token on the engine thread to its bytes at a client in another process.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from treadle.api.server import Server
from treadle.bench import roofline
from treadle.bench.drive import loop_of, run
from treadle.bench.report import report
from treadle.bench.roofline import Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import LoadedModel
from treadle.types import Request, Sampling

PROMPT = (1, 2, 3)
ROUNDS = 3
CLIENT = """
import json, selectors, socket, sys, time
port, streams, tokens = map(int, sys.argv[1:4])
body = json.dumps({"prompt": json.loads(sys.argv[4]), "max_tokens": tokens, "temperature": 0, "stream": True}).encode()
head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
head += "Content-Length: %d\\r\\n\\r\\n" % len(body)
waiting, first, count = selectors.DefaultSelector(), None, 0
for _ in range(streams):
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(head.encode() + body)
    waiting.register(s, selectors.EVENT_READ)
while waiting.get_map():
    for key, _ in waiting.select():
        data = key.fileobj.recv(1 << 20)
        if not data:
            waiting.unregister(key.fileobj)
        first = first or time.perf_counter()
        count += data.count(b"data: {")
print(json.dumps({"seconds": time.perf_counter() - first, "events": count}))
"""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench http", description=__doc__)
    parser.add_argument("--model", default="random:instant")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=positive, default=400)
    args = parser.parse_args(argv)
    if not args.model.startswith("random:"):
        parser.error("--model must be random:SHAPE[:BITS], whose replies end at --tokens and not before")
    subject = subject_of(args.model)
    limit, work = roofline.measured(), Work.of(subject, plain_of(args.model))
    rows = []
    with _served(subject, max(args.streams)) as port:
        _client(port, 1, min(50, args.tokens))  # warm up
        for n in args.streams:
            turns = [(_loop(subject, n, args.tokens), _client(port, n, args.tokens)) for _ in range(ROUNDS)]
            loop, step = (min(seconds) / args.tokens for seconds in zip(*turns, strict=True))
            num_bytes = work.step_bytes([len(PROMPT) + args.tokens / 2] * n)
            rows.append(
                {
                    "streams": n,
                    "loop ms/step": 1e3 * loop,
                    "http ms/step": 1e3 * step,
                    "overhead us": 1e6 * (step - loop) / n,
                    "tok/s": n / step,
                    "ratio": loop / step,
                    "GB/step": None if num_bytes is None else num_bytes / 1e9,
                    "of roofline": limit.share(step, num_bytes, work.step_flops(n, n)),
                }
            )
    report("http", rows, model=subject.name, **limit.facts)


def _loop(subject: Subject, streams: int, tokens: int) -> float:
    """Seconds from the first token to the last one of all streams, without a server."""
    requests = [Request(f"r{i}", np.array(PROMPT), Sampling(temperature=0.0), tokens) for i in range(streams)]
    lines = run(loop_of(subject, max_rows=streams), requests).values()
    return max(line.times[-1] for line in lines) - min(line.times[0] for line in lines)


def _loaded(subject: Subject) -> LoadedModel:
    """The same model with a word for each id, of bytes as most models have them. Its arrays are evaluated, so that the
    engine's thread may use them.
    """
    words = Tokenizer(models.BPE({f"\u0120w{i}": i for i in range(subject.caps.vocab_size)}, []))
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return LoadedModel(subject.name, "random", "0", subject.model, tokenizer, {}, subject.caps, frozenset(), {}, None)


@contextmanager
def _served(subject: Subject, rows: int) -> Iterator[int]:
    config = Config(max_rows=rows, cache_gb=0, drain_s=0.1, speculation="off")
    engine = Engine(partial(_loaded, subject), config)
    server = Server(engine, config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while engine.state == "loading" or not server.started:
            if not thread.is_alive():
                raise RuntimeError(f"The server ended at its start: {engine.failure}")
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _client(port: int, streams: int, tokens: int) -> float:
    """Seconds from the first byte to the end of the last stream."""
    asked = [str(port), str(streams), str(tokens), json.dumps(PROMPT)]
    done = subprocess.run([sys.executable, "-c", CLIENT, *asked], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    if told["events"] < streams * tokens:
        raise RuntimeError(f"The server sent {told['events']} events for {streams} streams of {tokens} tokens.")
    return float(told["seconds"])
