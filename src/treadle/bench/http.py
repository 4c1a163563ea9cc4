"""What HTTP costs: the real server with an instant model against the bare loop, 1 to 32 streams.

    python -m treadle.bench http [--streams 1 8 32] [--tokens 400]

The overhead is the difference in time per step divided by the number of streams: microseconds per token and stream,
from the token on the engine thread to its bytes at a client in another process.
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

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from treadle.api.server import Server
from treadle.bench.drive import loop_of, random_request, run
from treadle.bench.report import report
from treadle.bench.shapes import SHAPES, Subject, random_model
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import LoadedModel

VOCAB = SHAPES["instant"]["vocab_size"]
CLIENT = """
import json, selectors, socket, sys, time
port, streams, tokens = map(int, sys.argv[1:])
body = json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens, "temperature": 0, "stream": True}).encode()
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
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args(argv)
    bare = {n: _bare(random_model("instant", None), n, args.tokens) for n in args.streams}
    rows = []
    with _served(max(args.streams)) as port:
        _client(port, 1, 50)  # warm up
        for n in args.streams:
            step = min(_client(port, n, args.tokens) for _ in range(3)) / args.tokens
            cost = (step - bare[n]) / n
            rows.append(
                {"streams": n, "bare ms/step": 1e3 * bare[n], "http ms/step": 1e3 * step, "overhead us": 1e6 * cost}
            )
    report("http", rows)


def _bare(subject: Subject, streams: int, tokens: int) -> float:
    """Seconds per step of the loop alone."""
    best = float("inf")
    for _ in range(3):
        requests = [random_request(f"r{i}", VOCAB, 3, tokens) for i in range(streams)]
        lines = run(loop_of(subject, max_rows=streams), requests)
        first, last = min(t.times[0] for t in lines.values()), max(t.times[-1] for t in lines.values())
        best = min(best, (last - first) / tokens)
    return best


def _load() -> LoadedModel:
    subject = random_model("instant", None)
    words = {f"w{i} ": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0 ")))
    return LoadedModel("instant", "instant", "0", subject.model, tokenizer, {}, subject.caps, frozenset(), {}, None)


@contextmanager
def _served(rows: int) -> Iterator[int]:
    config = Config(max_rows=rows, cache_gb=0, drain_s=0.1)
    engine = Engine(_load, config)
    server = Server(engine, config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while engine.state == "loading" or not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _client(port: int, streams: int, tokens: int) -> float:
    """Seconds from the first byte to the end of the last stream."""
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(port), str(streams), str(tokens)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told["events"] >= streams * tokens, f"{told['events']} events for {streams} x {tokens} tokens"
    return float(told["seconds"])
