"""Whether speculation changes a text: two real servers, one without it, are asked the same and must answer the same.

    python -m treadle.bench equal [--model smollm2] [--speculation auto] [--prompts 50] [--tokens 128]

Prompts are of four kinds (chat, edit, JSON by a schema, summary); every other one is greedy, the rest are drawn with a
seed. Each is asked alone, so that a batch's rounding plays no part. What is compared is the reply's bytes, its end and
its number of tokens. Servers run one after the other and use the prefix cache alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from treadle.bench.report import report
from treadle.bench.values import positive

KINDS = ("chat", "edit", "json", "summary")
START_S = 300.0
ASK_S = 600.0
SUBJECTS = (
    "a lighthouse", "the water cycle", "a bakery", "chess", "a night train", "bees", "an old library",
    "volcanoes", "a bicycle", "the moon", "a small theatre", "rice", "a sailing ship",
)  # fmt: skip
PARAGRAPH = (
    "{0} opened in {1} with {2} rooms and a roof of slate. In {3} a storm took half of the roof, and the owner paid "
    "{4} crowns for a new one. Visitors came by boat, later by rail; in a good summer there were {5} of them. "
    "Today it is a school with {6} pupils, and the old bell still rings at noon."
)
CODE = """def total_{0}(items):
    result = 0
    for item in items:
        if item["kind"] == "{0}":
            result = result + item["price"] * item["count"]
    return result


def mean_{0}(items):
    chosen = [item for item in items if item["kind"] == "{0}"]
    return total_{0}(items) / len(chosen)
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "category": {"enum": ["place", "animal", "process", "thing"]},
        "year_first_mentioned": {"type": "integer", "minimum": 0, "maximum": 2100},
        "properties": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"property_name": {"type": "string", "maxLength": 20}, "important": {"type": "boolean"}},
                "required": ["property_name", "important"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "category", "year_first_mentioned", "properties"],
    "additionalProperties": False,
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench equal", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculation", default="auto", choices=("auto", "lookup", "draft"))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=positive, default=128)
    args = parser.parse_args(argv)
    asked = [request(i, args.tokens) for i in range(args.prompts)]
    plain, _ = answers(args.model, "off", asked)
    found, counts = answers(args.model, args.speculation, asked)
    same = [a == b for a, b in zip(plain, found, strict=True)]
    for i, (a, b) in enumerate(zip(plain, found, strict=True)):
        if a != b:
            print(f"{kind_of(i)} {i} differs:\n  {a}\n  {b}")
    report("equal", [_row(kind, same, counts) for kind in (*KINDS, "all")], **vars(args))


def kind_of(number: int) -> str:
    return KINDS[number % len(KINDS)]


def request(number: int, tokens: int) -> dict[str, Any]:
    """The body of prompt `number`; always the same."""
    kind, subject = kind_of(number), SUBJECTS[number // len(KINDS) % len(SUBJECTS)]
    body: dict[str, Any] = {"max_tokens": tokens}
    if kind == "chat":
        text = f"Tell me three things about {subject}, and why people like it."
    elif kind == "edit":
        text = f"Rename `item` to `entry` and print the whole code again.\n\n{CODE.format(subject.split()[-1])}"
    elif kind == "json":
        text = f"Describe {subject} as a JSON object."
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA}}
    else:
        text = f"Summarise this text in two sentences, with its numbers.\n\n{story(number, subject)}"
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number // len(KINDS) % 2 else {"temperature": 0}
    return body | drawn | {"messages": [{"role": "user", "content": text}]}


def story(number: int, subject: str) -> str:
    numbers = [1700 + 3 * number, 4 + number % 9, 1850 + number, 200 + 7 * number, 900 + 31 * number, 40 + number]
    return PARAGRAPH.format(f"The house of {subject}", *numbers)


def answers(model: str, speculation: str, asked: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """What a new server says to each: the text, the end and the number of tokens; and (drafted, accepted, seconds)."""
    said: list[Any] = []
    counts: list[Any] = []
    with _server(model, speculation) as url:
        for body in asked:
            began = time.perf_counter()
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ASK_S)
            response.raise_for_status()
            reply = response.json()
            choice, usage = reply["choices"][0], reply["usage"]
            said.append((choice["message"]["content"], choice["finish_reason"], usage["completion_tokens"]))
            details = usage["completion_tokens_details"]
            accepted, rejected = (details.get(f"{what}_prediction_tokens", 0) for what in ("accepted", "rejected"))
            counts.append((accepted + rejected, accepted, time.perf_counter() - began))
    return said, counts


def _row(kind: str, same: Sequence[bool], counts: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    mine = [i for i in range(len(same)) if kind in ("all", kind_of(i))]
    drafted, accepted = (sum(counts[i][column] for i in mine) for column in (0, 1))
    equal = sum(same[i] for i in mine)
    rate = equal / len(mine) if mine else 1.0
    return {
        "kind": kind,
        "prompts": len(mine),
        "equal": equal,
        "rate": rate,
        "drafted": drafted,
        "accepted": accepted,
    }


@contextmanager
def _server(model: str, speculation: str) -> Iterator[str]:
    """`treadle serve` as a process of its own; its address once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["serve", model, "--port", str(port), "--speculation", speculation]
    command = [sys.executable, "-c", "from treadle.cli import console; console()", *options]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            told = httpx.get(f"{url}/health", timeout=10).json()["speculation"]
            print(f"--speculation {speculation}: {json.dumps(told)}", flush=True)
            yield url
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError("The server did not start.")
