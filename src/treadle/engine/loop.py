"""The one generation loop, as a synchronous object: `submit`, `abort`, `step() -> [Output]`. Engine thread only.

One turn: admit waiting sequences, step every group that decodes, compute one prefill chunk if the pacer allows it.
A prompt is prefilled up to its last token; that token is the first decode step, so there is one way to get logits.
`thread.py` runs this; tests and offline use call `step` themselves.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from treadle.cache.formats import least
from treadle.cache.layers import Layers
from treadle.config import Config
from treadle.engine import scheduler
from treadle.engine.admission import make_fit
from treadle.engine.compiled import Forward
from treadle.engine.ending import NO_END, sentence, taken_one_by_one
from treadle.engine.group import Flight, Group
from treadle.engine.memory import Ledger
from treadle.engine.prefill import compute, embedding, usual_chunk
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import NAN_TOKEN
from treadle.engine.sequence import Sequence, Stage
from treadle.engine.skim import Skim
from treadle.engine.speculation import Plan, Speculation
from treadle.grammar.compile import Grammars, no_grammars
from treadle.types import Caps, Finish, Footprint, KvFormat, Output, Request, TokenLogprob
from treadle.vision.sight import Sight
from treadle.vision.spans import chunk_of

log = logging.getLogger("treadle.engine")

UNLIMITED = 2**62
CLEAR_EVERY = 256  # tokens of a row between releases of freed buffers to the system


class Loop:
    """All sequences of one model. `new_layers` makes empty memory for one sequence, in a format or in the model's.

    `grammars` gives those of the model's vocabulary; it is asked only for requests with a constraint.
    """

    def __init__(
        self,
        model: Any,
        caps: Caps,
        config: Config,
        new_layers: Callable[[KvFormat | None], Layers],
        ledger: Ledger | None = None,
        reuse: Reuse | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Callable[[], Grammars] = no_grammars,
        speculation: Speculation | None = None,
        sight: Sight | None = None,
        skim: Skim | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.model = model
        self.forward = Forward(model) if forward is None else forward
        self.caps = caps
        self.config = config
        self.new_layers = new_layers
        self.ledger = ledger or Ledger(Footprint(), 0, UNLIMITED)
        self.reuse = reuse or Reuse(None, caps, config.checkpoint_every)
        self.clock = clock
        self.grammars = grammars
        self.speculation = speculation
        self.sight = sight
        self.skim = skim
        self.open: Callable[[int], bool] = lambda nbytes: True  # for a prompt's rows, now; see `pressure.py`
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.groups: list[Group] = []
        self.pacer = scheduler.Pacer(
            config.prefill_chunk or usual_chunk(), config.prefill_share, config.prefill_stall_s
        )
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
        sequence = Sequence(request, room, self.clock(), kv=request.kv)
        if request.spans:
            assert self.sight is not None, "pictures for a model without sight"
            sequence.positions, sequence.shift = self.sight.positions(request.prompt, request.spans)
        self.waiting.append(sequence)
        if room <= 0 and not request.computes_all:
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
            first = self.waiting[0]
            need = make_fit(first, self.ledger, least(first.kv, self.caps, self.config.kv_bits))
            if not (self.ledger.fits(need) and self.open(self.ledger.rows(len(first.tokens), first.kv))):
                return
            sequence = self.waiting.popleft()
            self.ledger.promise(sequence.id, need)
            self.reuse.make_room(self.ledger.free)
            sequence.started = sequence.started or self.clock()
            sequence.stage = Stage.PREFILL
            self.prefilling.append(sequence)

    # 3-7: decode

    def _decode(self, group: Group) -> None:
        """One step of a group; afterwards the next one may be under way already."""
        began = self.clock()
        try:
            if self.speculation is not None and group.flight is not None and self.speculation.foresees(group):
                self.land(group)
                self.speculation.landed(group)
            plan = self.speculation.plan(group) if self.speculation and group.rows and not group.flight else None
            if plan is not None:
                self._checked_step(group, plan)
            elif group.rows:
                self._plain_step(group, began)
        except Exception as error:
            self.isolate(group, error)
        self.pacer.decoded(self.clock() - began)
        self._steps += 1
        if self._steps >= CLEAR_EVERY:
            self._steps = 0
            mx.clear_cache()
            for row in (row for one in self.groups for row in one.rows):
                self.ledger.grow(row.id, row.computed + CLEAR_EVERY, row.kv)
            self.reuse.make_room(self.ledger.free)

    def _plain_step(self, group: Group, began: float) -> None:
        """Launch the next step, then read the one before it while the device works.

        A step that makes somebody's first token is read at once: it must not wait for the next one to be built. So is
        a step with a grammar's row, whose next mask needs the token.
        """
        launched = group.launch() if any(row.wants_more for row in group.rows) else None
        flight, group.flight = group.flight, launched
        if flight is not None:
            self._settle(flight)
        if launched is not None and launched.urgent:
            group.flight = None
            self._settle(launched)
        if self.speculation is not None and launched is not None:
            steady = flight is not None or (launched.urgent and all(r.first_token for r in launched.rows))
            self.speculation.plain(launched.rows, self.clock() - began if steady else None)

    def land(self, group: Group) -> None:
        """Read the step under way before the next is launched."""
        flight, group.flight = group.flight, None
        if flight is not None:
            self._settle(flight)

    def _settle(self, flight: Flight) -> None:
        for sequence, found in zip(flight.rows, flight.read(), strict=True):
            if sequence.stage is Stage.DECODE:
                sequence.launched -= 1
                self._accept(sequence, found.tokens, found.logprobs)

    def _checked_step(self, group: Group, plan: Plan) -> None:
        """A step with drafts: launched, read, and what was refused taken back, before anything else."""
        assert self.speculation is not None
        began = self.clock()
        drafts = {row: draft.tokens for row, draft in plan.drafts.items()}
        flight = group.check(drafts, plan.width, gaps=self.speculation.noise > 0)
        self.speculation.meanwhile(group)
        found = flight.read()
        verdicts = self.speculation.judge(flight, found)
        kept = [line.tokens[: verdict.taken] for line, verdict in zip(found, verdicts, strict=True)]
        self._steps += max(map(len, kept))
        group.settle(flight, kept)
        if any(NAN_TOKEN in line.tokens for line in found):
            group.layers.scrub()
        self.speculation.settle(plan, flight, verdicts, self.clock() - began)
        for sequence, line, tokens in zip(flight.rows, found, kept, strict=True):
            sequence.launched -= 1
            self._accept(sequence, tokens, line.logprobs)

    def _accept(self, sequence: Sequence, drawn: list[int], logprobs: list[TokenLogprob]) -> None:
        """Commit drawn tokens in order, or end the sequence at the first that does."""
        if drawn and sequence.first_token is None:
            sequence.first_token = self.clock()
        taken, ending = len(drawn), NO_END
        if sequence.passes(drawn):
            sequence.commit(drawn)
        else:
            taken, ending = taken_one_by_one(sequence, drawn)
        tokens, scores = tuple(drawn[:taken]), tuple(logprobs[:taken])
        if ending:
            self._end(sequence, tokens=tokens, logprobs=scores, **ending)
        elif taken:
            self._outputs.append(Output(sequence.id, tokens, scores))

    def isolate(self, group: Group, error: Exception) -> None:
        """A shared step failed: compute each row once more alone; a row that fails alone ends with the error."""
        log.exception("A step over %d rows failed.", len(group.rows))
        self.groups.remove(group)
        for sequence in group.rows:
            if len(group.rows) == 1 or sequence.retried:
                self._end(sequence, Finish.ERROR, error=sentence(error))
            else:
                self.reuse.forget(sequence)
                self.requeue(sequence)
                sequence.retried = sequence.alone = True

    def requeue(self, sequence: Sequence) -> None:
        """Let a sequence without layers wait again, as the first; what it has made stays."""
        if self.speculation is not None:
            self.speculation.leave(sequence, None)
        sequence.restart()
        self.ledger.release(sequence.id)
        self.waiting.appendleft(sequence)

    # 3-6: prefill

    def _prefill(self) -> None:
        """Compute one chunk of one sequence; a sequence with one token left joins a group."""
        allowance = self.pacer.allowance(bool(self.groups))
        if allowance and not self.prefilling:
            self._catch_up(allowance)
        if not self.prefilling or allowance == 0:
            return
        ready = [s for s in self.prefilling if s.layers is not None or not self.reuse.coming(s, self.prefilling)]
        facts = [scheduler.Prefilling(s.pending, i) for i, s in enumerate(ready)]
        sequence = ready[scheduler.pick(facts, self._turn)]
        self._turn += 1
        try:
            skimmed = None if self.skim is None else self.skim.turn(self, sequence)
            if skimmed is not None:
                self._outputs += skimmed
                return
            if sequence.layers is None:
                self.reuse.acquire(sequence, partial(self.new_layers, sequence.kv))
                self._outputs.append(Output(sequence.id, prefilled=sequence.reached))  # what need not be computed
            n = min(self.ledger.chunk(allowance, len(sequence.tokens)), sequence.ahead)
            n = scheduler.aligned(sequence.computed, n, self.pacer.chunk)
            n = chunk_of(sequence.request.spans, sequence.computed, self.reuse.up_to_checkpoint(sequence, n))
            self.reuse.make_room(self.ledger.free - self.ledger.activations(n, len(sequence.tokens), sequence.picture))
            if not self._look(sequence, n):
                self._chunk(sequence, n)
        except Exception as error:
            log.exception("Prefill of %s failed.", sequence.id)
            self._end(sequence, Finish.ERROR, error=sentence(error))

    def _catch_up(self, allowance: int) -> None:
        """Let the draft model read a chunk of what a running sequence consists of."""
        if self.speculation is not None and self.speculation.lagging:
            began = self.clock()
            n = self.speculation.catch_up(allowance)
            self.pacer.prefilled(max(n, 1), self.clock() - began, bool(self.groups))

    def _look(self, sequence: Sequence, n: int) -> bool:
        """Encode one picture that the next chunk shows, as this turn's work; whether there was one."""
        seconds = 0.0 if self.sight is None else self.sight.look(sequence, n)
        sequence.vision_s += seconds
        if seconds:
            self.pacer.paused(seconds, bool(self.groups))
        return seconds > 0

    def _chunk(self, sequence: Sequence, n: int) -> None:
        assert sequence.layers is not None
        if n:
            began = self.clock()
            seen = self.sight.given(sequence, n) if self.sight is not None and sequence.request.spans else {}
            scored = compute(self.model, sequence, sequence.layers, n, self.ledger, seen)
            if scored:
                self._outputs.append(Output(sequence.id, prompt_logprobs=scored, prefilled=sequence.reached))
            self.reuse.publish(sequence)
            self.pacer.prefilled(n, self.clock() - began, bool(self.groups))
        if sequence.ahead == 0 and sequence.request.pooling is not None:
            self._end(sequence, Finish.STOP, embedding=embedding(sequence), prefilled=sequence.computed)
        elif sequence.ahead == 0 and sequence.room <= 0:
            self._end(sequence, Finish.LENGTH)  # it was about the scores of its prompt
        elif sequence.ahead == 0:
            self._enter(sequence)
        else:
            self._outputs.append(Output(sequence.id, prefilled=sequence.reached))

    def _enter(self, sequence: Sequence) -> None:
        """Move a prefilled sequence into the group where it fits, or into one of its own."""
        request = sequence.request
        if request.constraint is not None:
            accepted = sequence.tokens[sequence.num_prompt :]
            sequence.matcher = self.grammars().matcher(request.constraint, request.stop_ids, accepted)
        self.prefilling.remove(sequence)
        group = next((g for g in self.groups if g.takes(sequence, self.caps.batching)), None)
        if group is None:
            group = Group(self.model, self.caps.vocab_size, self.forward)
            self.groups.append(group)
        group.join(sequence)
        sequence.stage = Stage.DECODE
        if self.speculation is not None:
            self.speculation.begin(sequence)

    def take_out(self, sequence: Sequence) -> None:
        """Of wherever it is."""
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

    # 8: one exit for all

    def _end(self, sequence: Sequence, finish: Finish, **made: Any) -> None:
        """Take a sequence out of wherever it is and report its end."""
        if self.skim is not None:
            self.skim.leave(sequence)
        if finish is Finish.ERROR:
            self.reuse.forget(sequence)
        else:
            self.reuse.release(sequence, made.get("stop_id"))
        if sequence.stage is Stage.DECODE and self.speculation is not None:
            self.speculation.end(sequence, made.get("stop_id"))
        self.take_out(sequence)
        self.ledger.release(sequence.id)
        sequence.stage, sequence.finish, sequence.layers = Stage.DONE, finish, None
        sequence.stop_id, sequence.matcher = made.get("stop_id"), None
        self._outputs.append(Output(sequence.id, finish=finish, usage=sequence.usage(self.clock()), **made))
