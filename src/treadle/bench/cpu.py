"""One stream on a CPU: our kernels, float32 with OpenBLAS, mlx_lm's loop and llama.cpp, on one file and by turns.

    python -m treadle.bench cpu [--model smollm2] [--prompt 100 1500] [--tokens 64] [--rounds 3]
                                [--llama-python /path/to/python] [--busy 2] [--only llama.cpp]

Each of them is measured in a process of its own, after a warm-up; the table has tokens per second, medians over the
rounds. llama.cpp is measured where `llama_cpp` can be imported, here or by the named Python, with as many threads as
there are cores. mlx_lm's loop gets its best case: float32 weights, and OpenBLAS loaded before MLX. `--busy` keeps so
many other processes computing meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from treadle import system
from treadle.bench.drive import loop_of, random_request, run
from treadle.bench.report import report
from treadle.bench.values import positive
from treadle.models.sources import resolve
from treadle.native import build

OURS, DENSE, MLX_LM, LLAMA = "native", "float32", "mlx_lm", "llama.cpp"
LLAMA_SCRIPT = """
import json, sys, time
from llama_cpp import Llama
path, threads, tokens, *prompts = sys.argv[1:]
model = Llama(path, n_ctx=max(map(int, prompts)) + int(tokens) + 8, n_threads=int(threads),
              n_threads_batch=int(threads), verbose=False)
found = {}
for warm in (True, False):
    for n in map(int, prompts):
        model.reset()
        began = time.perf_counter()
        model.eval([7 + i * 31 % 9000 for i in range(n)])
        middle = time.perf_counter()
        for i in range(int(tokens)):
            model.eval([7 + i])
        found[n] = (n / (middle - began), int(tokens) / (time.perf_counter() - middle))
print(json.dumps(found))
"""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench cpu", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=positive, nargs="+", default=[100, 1500])
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--llama-python", help="a Python that can import llama_cpp")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute meanwhile")
    parser.add_argument("--only", nargs="+", choices=(OURS, DENSE, MLX_LM, LLAMA), help="measure these, ours with them")
    parser.add_argument("--alone", choices=(OURS, DENSE, MLX_LM), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.alone is not None:
        print(json.dumps(_measured(args.alone, args.model, args.prompt, args.tokens)))
        return
    wanted = {OURS, *(args.only or (DENSE, MLX_LM, LLAMA))}
    commands = {name: command for name, command in _commands(args).items() if name in wanted}
    found: dict[str, list[Any]] = {name: [] for name in commands}
    with _busy(args.busy):
        for _ in range(args.rounds):
            for name, (command, environment) in commands.items():
                found[name].append(_one(command, environment))
    rows = [_row(prompt, i, kind, found) for prompt in args.prompt for i, kind in enumerate(("prefill", "decode"))]
    load = os.getloadavg()[1]
    report(
        "cpu",
        rows,
        model=args.model,
        threads=system.physical_cores(),
        rounds=args.rounds,
        busy=args.busy,
        load_average=load,
    )


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Other processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _commands(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str]]]:
    """What to run for each, and what to add to the environment."""
    sizes = [*map(str, args.prompt)]
    own = [sys.executable, "-m", "treadle.bench", "cpu", "--model", args.model, "--tokens", str(args.tokens)]
    off = {build.SETTING: build.OFF}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        name: ([*own, "--alone", name, "--prompt", *sizes], {} if name == OURS else off)
        for name in (OURS, DENSE, MLX_LM)
    }
    source = resolve(args.model)
    python = args.llama_python or (sys.executable if importlib.util.find_spec("llama_cpp") else None)
    if python is not None and source.kind == "gguf":
        threads = str(system.physical_cores())
        command = [python, "-c", LLAMA_SCRIPT, str(source.path), threads, str(args.tokens), *sizes]
        commands[LLAMA] = (command, {})
    return commands


def _one(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measured(name: str, model: str, prompts: Sequence[int], tokens: int) -> dict[int, tuple[float, float]]:
    """(prefill, decode) in tokens per second by prompt, in this process."""
    from treadle.bench.shapes import subject_of

    subject = subject_of(model)
    measure = _mlx_lm if name == MLX_LM else _loop
    found = {}
    for _ in ("warm-up", "measured"):
        for prompt in prompts:
            found[prompt] = measure(subject, prompt, tokens)
    return found


def _loop(subject: Any, prompt: int, tokens: int) -> tuple[float, float]:
    line = run(loop_of(subject), [random_request("x", subject.caps.vocab_size, prompt, tokens)])["x"]
    return prompt / line.ttft, line.speed()


def _mlx_lm(subject: Any, prompt: int, tokens: int) -> tuple[float, float]:
    import mlx.core as mx

    from treadle.runtime import mlx_lm_module

    ids = random_request("x", subject.caps.vocab_size, prompt, tokens).prompt
    began = time.perf_counter()
    steps = mlx_lm_module("generate").generate_step(mx.array(ids), subject.model, max_tokens=tokens)
    times = [time.perf_counter() - began for _ in steps]
    return prompt / times[0], (len(times) - 1) / (times[-1] - times[0])


def _row(prompt: int, i: int, kind: str, found: dict[str, list[Any]]) -> dict[str, Any]:
    """Medians over the rounds, and what ours are as a share of the others'."""
    speeds = {name: float(np.median([one[str(prompt)][i] for one in rounds])) for name, rounds in found.items()}
    shares = {f"{OURS} / {name}": speeds[OURS] / speed for name, speed in speeds.items() if name != OURS}
    return {"prompt": prompt, "what": kind, **speeds, **shares}
