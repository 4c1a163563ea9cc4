"""Sparse prefill: what it saves, and what it costs.

    python -m treadle.bench sparse [--part speed | quality] [--model random:8b --small random:0.6b --context 4096 16384]

`speed`: time to the first token of a prompt computed whole and in part, by turns, and the speed of decoding after
each. `quality`, for a model with real weights (which is its own small model here): how many needles are found at the
end of a text of which only a part was computed, the perplexity of what follows a text, and how often the server would
compute it whole by itself, because nothing stands out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.drive import Timeline, random_request, run
from treadle.bench.needles import NAMES, needle_in
from treadle.bench.quantise import documentation
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.bench.values import positive
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.build import special_ids
from treadle.engine.compiled import Forward
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.prefill import compute
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import Sampler
from treadle.engine.sequence import Sequence
from treadle.engine.skim import SIGHT, Skim, Terms
from treadle.models.capabilities import new_layers
from treadle.models.rope import gaps_fault, let_gaps_in
from treadle.sparse.score import let_watch
from treadle.speculate.draft_model import DraftModel
from treadle.types import Footprint, Ids, Request, Sampling

DECODED = 48  # tokens of each reply
WARM = 0.02  # of a prompt: a run of that length beforehand meets what is slow the first time
FOLLOWING = 128  # tokens behind a text whose perplexity is taken


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench sparse", description=__doc__)
    parser.add_argument("--part", choices=["speed", "quality", "both"], default="both")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--small", default="random:tiny")
    parser.add_argument("--context", type=positive, nargs="+", default=[1024, 4096])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.2, 0.3, 0.5])
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--sight", type=int, default=SIGHT, help="quality: tokens that it looks back while it reads")
    args = parser.parse_args(argv)
    if args.part != "speed" and args.model.startswith("random:"):
        parser.error(f"the quality of random weights says nothing: ask for --part speed of {args.model}")
    if args.part in ("speed", "both"):
        target, small = subject_of(args.model), subject_of(args.small)
        rows = [_speed(target, small, n, args.keep[0], args.rounds) for n in args.context]
        report("sparse: speed", rows, model=target.name, small=small.name, keep=args.keep[0])
    if args.part in ("quality", "both"):
        quality = _Quality(args.model, max(args.context), args.sight)
        rows = [quality.measured(keep, args.texts) for keep in (1.0, *args.keep)]
        report("sparse: quality", rows, model=quality.name, tokens=quality.context, sight=args.sight)


def skim_of(target: Subject, small: Subject, terms: Terms, store: Store | None = None) -> Skim:
    """As the server builds it; `store` keeps what the small model has read."""
    let_gaps_in(target.model)
    let_watch(small.model)
    if (fault := gaps_fault(target.model, target.caps)) is not None:
        raise SystemExit(f"{target.name}: {fault}")
    rows: DraftModel[Sequence] = DraftModel(small.model, small.caps, Sampler(small.caps.vocab_size))
    return Skim(rows, partial(new_layers, small.model, small.caps), Reuse(store, small.caps, 2048, small.name), terms)


def _speed(target: Subject, small: Subject, context: int, keep: float, rounds: int) -> dict[str, Any]:
    vocab = target.caps.vocab_size
    layers = partial(new_layers, target.model, target.caps)
    skim = skim_of(target, replace(small, caps=replace(small.caps, context_length=2 * context)), Terms())
    caps = replace(target.caps, context_length=max(target.caps.context_length, context + DECODED + 1))
    loop = Loop(target.model, caps, Config(), layers, skim=skim)

    def timed(sparse: bool, length: int, seed: int) -> Timeline:
        request = random_request("x", vocab, length, DECODED, seed)
        return run(loop, [replace(request, sparse=sparse, keep=keep)])["x"]

    for sparse in (False, True):
        timed(sparse, max(1024, int(WARM * context)), 99)
    found: dict[bool, list[Timeline]] = {False: [], True: []}
    for seed in range(rounds):
        for sparse, lines in found.items():
            lines.append(timed(sparse, context, seed))
    whole, part = ((min(x.ttft for x in lines), max(x.speed(4) for x in lines)) for lines in found.values())
    return {
        "tokens": context,
        "dense ttft s": whole[0],
        "sparse ttft s": part[0],
        "times faster": whole[0] / part[0],
        "decode after dense tok/s": whole[1],
        "after sparse": part[1],
        "ratio": part[1] / whole[1],
    }


@dataclass(frozen=True, slots=True)
class _Read:
    """A text that was computed, perhaps in part: the sequence with its layers, all but the last token in them."""

    sequence: Sequence
    declined: bool  # whether the server would have computed it whole by itself


class _Quality:
    """The texts are pieces of the standard library's documentation."""

    def __init__(self, model: str, context: int, sight: int) -> None:
        from treadle.models.load import load_model
        from treadle.models.sources import resolve

        loaded = load_model(resolve(model, None), None)
        self.name, self.context = loaded.name, context
        self._subject = Subject(loaded.name, loaded.model, loaded.caps, 0, Forward(loaded.model))
        self._tokenizer = loaded.tokenizer
        self._skim = skim_of(
            self._subject,
            self._subject,
            Terms(threshold=1, special=special_ids(loaded.tokenizer), sight=sight),
            Store(Settings(Budget(2**33), 2**62)),  # the same texts come again at another share
        )
        self._ids = np.array(loaded.tokenizer.encode(documentation()), np.int64)

    def measured(self, keep: float, texts: int) -> dict[str, Any]:
        """Over `texts` texts at a share of tokens."""
        found, declined, losses, kept = 0, 0, [], []
        for i in range(texts):
            text = self._ids[i * (self.context + FOLLOWING) :][: self.context + FOLLOWING]
            read = self._read(text[: self.context], keep)
            declined += read.declined
            losses.append(self._loss(read.sequence, text[self.context :]))
            name = NAMES[i % len(NAMES)]
            prompt, answer = needle_in(text[: self.context - 64], self._tokenizer, (i + 0.5) / texts, name, i)
            read = self._read(prompt, keep)
            declined += read.declined
            assert read.sequence.sparse is not None
            kept.append(read.sequence.sparse.kept / read.sequence.sparse.tokens)
            found += self._says(read.sequence, answer)
        return {
            "keep": keep,
            "kept": float(np.mean(kept)),
            "needles": f"{found}/{texts}",
            "perplexity": float(np.exp(np.mean(losses))),
            "computed whole by itself": f"{declined}/{2 * texts}",
        }

    def _read(self, prompt: Ids, keep: float) -> _Read:
        """Through the server's own path up to the first token."""
        subject, sampling = self._subject, Sampling(temperature=0.0)
        for insist in (None, True):
            sequence = Sequence(Request("x", prompt, sampling, 1, sparse=insist, keep=keep), 1, 0.0)
            while self._skim.reads(sequence, lambda: 0):
                self._skim.read(sequence, 512)
            assert sequence.sparse is not None
            if sequence.sparse.engaged:
                break
        sequence.layers = new_layers(subject.model, subject.caps)
        ledger = Ledger(Footprint(), 0, 2**62)
        while sequence.pending > 1:
            compute(subject.model, sequence, sequence.layers, min(512, sequence.pending - 1), ledger, {})
        return _Read(sequence, insist is True)

    def _step(self, sequence: Sequence, ids: Several[int]) -> Any:
        """Logits [n, vocab] behind tokens at the end of the text."""
        assert sequence.layers is not None
        sequence.layers.begin([len(ids)], [sequence.gap])
        logits = self._subject.model(mx.array([list(ids)]), cache=sequence.layers.caches)[0]
        sequence.layers.end()
        return logits

    def _loss(self, sequence: Sequence, following: Ids) -> float:
        """Mean negative log likelihood of the tokens that follow the text."""
        logits = self._step(sequence, [int(sequence.tokens[-1]), *following[:-1].tolist()]).astype(mx.float32)
        told = mx.array(following)[:, None]
        loss = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, told, axis=-1)[:, 0]
        return float(np.array(loss.mean()))

    def _says(self, sequence: Sequence, answer: list[int]) -> bool:
        token = int(sequence.tokens[-1])
        for wanted in answer:
            if int(self._step(sequence, [token])[0].argmax().item()) != wanted:
                return False
            token = wanted
        return True
