"""The one generation loop, as a synchronous object: `submit`, `abort`, `step() -> [Output]`. Engine thread only.

One turn: admit waiting sequences, step every group that decodes, compute one prefill chunk if the pacer allows it.
A prompt is prefilled up to its last token; that token is the first decode step, so there is one way to get logits.
`engine.py` runs this on its thread; tests and offline use call `step` themselves.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.config import Config
from treadle.engine import scheduler
from treadle.engine.group import Flight, Group
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import NAN_TOKEN
from treadle.engine.sequence import Emission, Sequence, Stage
from treadle.grammar.compile import Grammars
from treadle.grammar.fault import GrammarError
from treadle.types import Batching, Caps, Finish, Footprint, Output, Request

log = logging.getLogger("treadle.engine")

UNLIMITED = 2**62
SPARE_SHARE = 1 / 32  # of the memory limit that may stay in freed buffers between chunks
CLEAR_EVERY = 256  # decode steps between releases of freed buffers to the system


def no_grammars() -> Grammars:
    """For a loop without a tokenizer, as in offline use with bare ids."""
    raise GrammarError("this loop has no tokenizer to compile a grammar for")


class Loop:
    """All sequences of one model. `new_layers` makes empty memory for one sequence.

    `grammars` gives those of the model's vocabulary; it is asked only for requests with a constraint.
    """

    def __init__(
        self,
        model: Any,
        caps: Caps,
        config: Config,
        new_layers: Callable[[], Layers],
        ledger: Ledger | None = None,
        reuse: Reuse | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Callable[[], Grammars] = no_grammars,
    ) -> None:
        self.model = model
        self.caps = caps
        self.config = config
        self.new_layers = new_layers
        self.ledger = ledger or Ledger(Footprint(), 0, UNLIMITED)
        self.reuse = reuse or Reuse(None, caps, config.checkpoint_every)
        self.clock = clock
        self.grammars = grammars
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.groups: list[Group] = []
        self.pacer = scheduler.Pacer(config.prefill_chunk, config.prefill_share, config.prefill_stall_s)
        self._outputs: list[Output] = []
        self._turn = 0
        self._steps = 0

    # What others may ask

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + sum(len(g.rows) for g in self.groups)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.groups or self._outputs)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.prefilling
        for group in self.groups:
            yield from group.rows

    def submit(self, request: Request) -> None:
        """Queue a request whose ids were checked. In `preempt` mode everything before it is aborted.

        Choices of one client request (ids that differ after a colon only) do not abort each other.
        """
        if self.config.on_busy == "preempt":
            for sequence in list(self.sequences()):
                if sequence.id.partition(":")[0] != request.id.partition(":")[0]:
                    self._end(sequence, Finish.ABORT)
        room = self.caps.context_length - len(request.prompt)
        if request.max_tokens is not None:
            room = min(room, request.max_tokens)
        sequence = Sequence(request, room, self.clock())
        self.waiting.append(sequence)
        if room <= 0:
            self._end(sequence, Finish.LENGTH)

    def abort(self, id: str, finish: Finish = Finish.ABORT, error: str | None = None) -> bool:
        """End a sequence now, wherever it is. False when the id is unknown."""
        for sequence in self.sequences():
            if sequence.id == id:
                self._end(sequence, finish, error=error)
                return True
        return False

    def step(self) -> list[Output]:
        """One turn of the loop. Returns what it made, in order, for any of the sequences."""
        self._expire()
        self._admit()
        for group in list(self.groups):
            self._decode(group)
        self._prefill()
        outputs, self._outputs = self._outputs, []
        return outputs

    # 1-2: who takes part

    def _expire(self) -> None:
        for sequence in list(self.sequences()):
            limit = sequence.request.timeout_s
            if limit is not None and self.clock() - sequence.arrived > limit:
                self._end(sequence, Finish.ABORT, error=f"The request passed its time limit of {limit:g} s.")

    def _admit(self) -> None:
        slots = 1 if self.config.on_busy == "queue" else self.config.max_rows
        while self.waiting and self.num_running < slots:
            need = self.ledger.need(len(self.waiting[0].tokens), self.waiting[0].room)
            if not self.ledger.fits(need):
                return
            sequence = self.waiting.popleft()
            self.ledger.promise(sequence.id, need)
            self.reuse.make_room(self.ledger.free)
            sequence.started = sequence.started or self.clock()
            sequence.stage = Stage.PREFILL
            self.prefilling.append(sequence)

    # 3-7: decode

    def _decode(self, group: Group) -> None:
        """Launch the next step, then read the one before it while the device works.

        A step that makes somebody's first token is read at once: it must not wait for the next one to be built. So is
        a step with a grammar's row, whose next mask needs the token.
        """
        began = self.clock()
        try:
            launched = group.launch() if any(row.wants_more for row in group.rows) else None
            flight, group.flight = group.flight, launched
            if flight is not None:
                self._settle(flight)
            if launched is not None and launched.urgent:
                group.flight = None
                self._settle(launched)
        except Exception as error:
            self._isolate(group, error)
        self.pacer.decoded(self.clock() - began)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
            for row in group.rows:
                self.ledger.grow(row.id, row.computed + CLEAR_EVERY)
            self.reuse.make_room(self.ledger.free)

    def _settle(self, flight: Flight) -> None:
        for sequence, emission in zip(flight.rows, flight.read(), strict=True):
            if sequence.stage is Stage.DECODE:
                sequence.launched -= 1
                self._accept(sequence, emission)

    def _accept(self, sequence: Sequence, emission: Emission) -> None:
        """Commit one drawn token, or end the sequence."""
        token = emission.token
        if sequence.first_token is None:
            sequence.first_token = self.clock()
        if sequence.fault:
            self._end(sequence, Finish.ERROR, error=sequence.fault)
        elif token == NAN_TOKEN:
            self._end(sequence, Finish.ERROR, error="The model produced values that are not numbers.")
        elif token in sequence.request.stop_ids:
            self._end(sequence, Finish.STOP, stop_id=token)
        else:
            sequence.commit(token)
            logprobs = () if emission.logprob is None else (emission.logprob,)
            if sequence.fault:
                self._end(sequence, Finish.ERROR, error=sequence.fault)
            elif (finish := sequence.ended) is not None:
                self._end(sequence, finish, tokens=(token,), logprobs=logprobs)
            else:
                self._outputs.append(Output(sequence.id, (token,), logprobs))

    def _isolate(self, group: Group, error: Exception) -> None:
        """A shared step failed: compute each row once more alone; a row that fails alone ends with the error."""
        log.exception("A step over %d rows failed.", len(group.rows))
        self.groups.remove(group)
        for sequence in group.rows:
            if len(group.rows) == 1 or sequence.retried:
                self._end(sequence, Finish.ERROR, error=_sentence(error))
            else:
                self.reuse.forget(sequence)
                sequence.restart()
                self.ledger.release(sequence.id)
                sequence.retried = sequence.alone = True
                self.waiting.appendleft(sequence)

    # 3-6: prefill

    def _prefill(self) -> None:
        """Compute one chunk of one sequence; a sequence with one token left joins a group."""
        allowance = self.pacer.allowance(bool(self.groups))
        if not self.prefilling or allowance == 0:
            return
        ready = [s for s in self.prefilling if s.layers is not None or not self.reuse.coming(s, self.prefilling)]
        facts = [scheduler.Prefilling(s.pending, i) for i, s in enumerate(ready)]
        sequence = ready[scheduler.pick(facts, self._turn)]
        self._turn += 1
        try:
            if sequence.layers is None:
                self.reuse.acquire(sequence, self.new_layers)
            n = min(self.ledger.chunk(allowance, len(sequence.tokens)), sequence.pending - 1)
            self.reuse.make_room(self.ledger.free - self.ledger.activations(n, len(sequence.tokens)))
            self._chunk(sequence, self.reuse.up_to_checkpoint(sequence, n))
        except Exception as error:
            log.exception("Prefill of %s failed.", sequence.id)
            self._end(sequence, Finish.ERROR, error=_sentence(error))

    def _chunk(self, sequence: Sequence, n: int) -> None:
        assert sequence.layers is not None
        if n:
            began = self.clock()
            self._forward(sequence, sequence.layers, n)
            self.reuse.publish(sequence)
            self.pacer.prefilled(n, self.clock() - began, bool(self.groups))
        if sequence.pending == 1:
            self._enter(sequence)
        else:
            self._outputs.append(Output(sequence.id, prefilled=sequence.computed))

    def _forward(self, sequence: Sequence, layers: Layers, n: int) -> None:
        """Compute the rows of the next `n` tokens; their logits are never made."""
        ids = sequence.tokens[sequence.computed : sequence.computed + n].astype(np.int32)
        others = mx.get_active_memory() - layers.nbytes
        mx.reset_peak_memory()
        layers.begin([n])
        self.model(mx.array(ids)[None], cache=layers.caches)
        layers.end()
        mx.eval(layers.arrays())
        sequence.computed += n
        self.ledger.observe(n, sequence.computed, mx.get_peak_memory() - others - layers.nbytes)
        if mx.get_cache_memory() > self.ledger.limit * SPARE_SHARE:
            mx.clear_cache()  # giving buffers back costs time, above all on CUDA, so a few are kept

    def _enter(self, sequence: Sequence) -> None:
        """Move a prefilled sequence into the group where it fits, or into one of its own."""
        request = sequence.request
        if request.constraint is not None:
            accepted = sequence.tokens[sequence.num_prompt :]
            sequence.matcher = self.grammars().matcher(request.constraint, request.stop_ids, accepted)
        self.prefilling.remove(sequence)
        group = next((g for g in self.groups if self._fits(g, sequence)), None)
        if group is None:
            group = Group(self.model, self.caps.vocab_size)
            self.groups.append(group)
        group.join(sequence)
        sequence.stage = Stage.DECODE

    def _fits(self, group: Group, sequence: Sequence) -> bool:
        if self.caps.batching is Batching.NEVER or sequence.alone or any(row.alone for row in group.rows):
            return False
        return scheduler.fits_together([row.computed for row in group.rows], sequence.computed)

    # 8: one exit for all

    def _end(self, sequence: Sequence, finish: Finish, **made: Any) -> None:
        """Take a sequence out of wherever it is and report its end."""
        if finish is Finish.ERROR:
            self.reuse.forget(sequence)
        else:
            self.reuse.release(sequence, made.get("stop_id"))
        if sequence.stage is Stage.DECODE:
            group = next((g for g in self.groups if sequence in g.rows), None)
            if group is not None:
                group.drop(sequence)
                if not group.rows:
                    self.groups.remove(group)
        elif sequence.stage is Stage.PREFILL:
            self.prefilling.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.ledger.release(sequence.id)
        sequence.stage, sequence.finish, sequence.layers = Stage.DONE, finish, None
        sequence.stop_id, sequence.matcher = made.get("stop_id"), None
        self._outputs.append(Output(sequence.id, finish=finish, usage=sequence.usage(self.clock()), **made))


def _sentence(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"The engine failed on this request ({type(error).__name__}: {first})."
