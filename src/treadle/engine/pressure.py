"""Carrying out what the governor decides, for the loops of all models. Engine thread only.

After every turn the device's memory is read (a count that MLX keeps), the system's once a second, and something is done
until nothing more is asked for. What is done to a group of rows is done to all of them: one row alone frees nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import mlx.core as mx

from treadle.cache.formats import ASKED, least, stays_exact
from treadle.cache.transfer import convert, shrink
from treadle.engine.ending import sentence
from treadle.engine.governor import (
    SHARES,
    SYSTEM_S,
    Act,
    Action,
    Candidate,
    Governor,
    Level,
    Reading,
    Situation,
    level_of,
)
from treadle.engine.sequence import Sequence, Stage
from treadle.metrics.snapshot import PressureCard
from treadle.types import Finish, KvFormat

if TYPE_CHECKING:
    from treadle.cache.layers import Layers
    from treadle.cache.store import Store
    from treadle.engine.group import Group
    from treadle.engine.loop import Loop

log = logging.getLogger("treadle.engine")

MOST_ACTS = 32  # in one turn
IDLE_BITS = 4  # of prefixes that are not in use
SETTLED_S = 0.25  # where nothing could be done, it is not tried again for so long
SETTLED_SHARE = 1 / 256  # of the limit; unless memory in use has grown by so much
NO_ROOM = "The device's memory is full, and nothing else is left that could give way."


class Pressure:
    """`limit` and `reserve` in bytes. `available`: what the system has left; None: its memory is not the device's."""

    def __init__(
        self,
        limit: int,
        store: Store | None,
        loops: Callable[[], Iterable[Loop]],
        *,
        reserve: int = 0,
        available: Callable[[], int] | None = None,
        active: Callable[[], int] = mx.get_active_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.governor = Governor()
        self._limit = limit
        self._store = store
        self._loops = loops
        self._reserve = reserve
        self._available = available
        self._active = active
        self._clock = clock
        self._left: int | None = None  # that the system had at the last look
        self._looked = float("-inf")
        self._settled = (0, float("-inf"))  # bytes in use and when, as nothing was left to be done

    def attach(self, loop: Loop) -> None:
        """Let the loop ask before it admits a sequence."""
        loop.open = self.open

    def open(self, nbytes: int) -> bool:
        """Whether a sequence may start that takes so many bytes soon; what the cache has would give way to it.

        With none running one always may: somebody has to finish first.
        """
        if not any(loop.num_running for loop in self._loops()):
            return True
        idle = self._pictures + (0 if self._store is None else self._store.tree.totals.nbytes)
        most = self._base + SHARES[Level.HOLD] * (self._limit - self._base)
        return not self.governor.holding and self._active() - idle + nbytes < most

    def relieve(self) -> None:
        """Read, and act until nothing more is asked for."""
        fresh = False
        for _ in range(MOST_ACTS):
            reading = self._reading(fresh)
            if self._at_rest(reading):
                return
            action = self.governor.decide(reading, self._situation(reading))
            if action is None:
                if fresh:
                    self._settled = (reading.active, self._clock())
                return
            self._do(action)
            self.governor.freed(action.act, reading.active + self._base - self._active())
            fresh = fresh or action.act is Act.REMEASURE

    def gauge(self) -> PressureCard:
        counts = self.governor.counts
        return PressureCard(
            level=self.governor.level.name.lower(),
            holding=self.governor.holding,
            entered={level.name.lower(): counts.entered[level] for level in Level},
            actions={act.value: counts.done[act] for act in Act},
            freed_bytes={act.value: counts.freed[act] for act in Act},
        )

    # Looking

    def _reading(self, fresh: bool) -> Reading:
        now = self._clock()
        if self._available is not None and now - self._looked >= SYSTEM_S:
            self._left, self._looked = self._available(), now
        base = self._base
        return Reading(max(0, self._active() - base), max(1, self._limit - base), fresh, self._left, self._reserve)

    @property
    def _base(self) -> int:
        """Bytes of the weights, which cannot give way: levels are shares of what is beside them."""
        return sum(loop.ledger.base for loop in self._loops())

    def _at_rest(self, reading: Reading) -> bool:
        """Whether nothing is asked for anyway: memory is there, or a moment ago nothing was left to be done."""
        governor, level = self.governor, level_of(reading)
        if level is Level.CALM:
            return governor.level is Level.CALM and not governor.holding
        most, when = self._settled
        near = reading.active <= most + SETTLED_SHARE * reading.limit and self._clock() - when < SETTLED_S
        return level >= Level.HOLD and not reading.fresh and near

    def _situation(self, reading: Reading) -> Situation:
        store, room = self._store, reading.limit - reading.active
        idle = store is not None and self._may_pack and store.packable(0.0, room // 2, ASKED) is not None
        return Situation(
            [_candidate(loop, sequence) for loop, sequence in self._running()],
            idle,
            self._pictures + (0 if store is None else store.evictable),
        )

    @property
    def _pictures(self) -> int:
        """Bytes of encoded pictures that may be forgotten."""
        return sum(loop.ledger.spare for loop in self._loops())

    @property
    def _may_pack(self) -> bool:
        """Whether idle prefixes may have fewer bits: not where somebody wants rows to be exact."""
        return not any(stays_exact(loop.config.kv_bits) for loop in self._loops())

    def _running(self) -> Iterator[tuple[Loop, Sequence]]:
        """The sequences that hold memory."""
        for loop in self._loops():
            held = [s for s in loop.prefilling if s.layers is not None]
            yield from ((loop, sequence) for sequence in [*held, *(s for g in loop.groups for s in g.rows)])

    # Acting

    def _do(self, action: Action) -> None:
        found = next(((loop, s) for loop, s in self._running() if s.id == action.id), None)
        match action.act:
            case Act.REMEASURE:
                for group in [group for loop in self._loops() for group in loop.groups]:
                    shrink(group.layers)
                mx.synchronize()
                mx.clear_cache()
            case Act.EVICT:
                self._evict(action.nbytes)
            case Act.PACK_IDLE:
                assert self._store is not None
                self._store.pack_one(IDLE_BITS, 0.0, (self._limit - self._active()) // 2, ASKED)
            case Act.PACK_LIVE:
                assert found is not None
                pack_rows(*found)
            case Act.PREEMPT:
                assert found is not None
                preempt(*found, room=self._limit - self._active())
                if self._store is not None:
                    self._store.save()
            case Act.END:
                assert found is not None
                end(*found)
            case Act.HOLD:
                log.info("Admission stops: memory runs short.")
                for loop in self._loops():
                    if loop.skim is not None:
                        loop.skim.give_way()
            case Act.ADMIT:
                log.info("Admission goes on.")

    def _evict(self, nbytes: int) -> None:
        """Encoded pictures first: where a prefix is cached, those in it are needed no more."""
        wanted = nbytes
        for loop in self._loops():
            before = loop.ledger.kept
            loop.ledger.forget(wanted)
            wanted -= before - loop.ledger.kept
        if self._store is not None and wanted > 0:
            self._store.save()
            self._store.make_room(self._store.tree.totals.nbytes - wanted)


def _candidate(loop: Loop, sequence: Sequence) -> Candidate:
    # Once, as each time costs its prefill; but one that has no reply yet would have to end without one.
    once = sequence.preempted and sequence.num_generated > 0
    kept = once or sequence.request.prompt_logprobs  # what was reported would be reported again
    return Candidate(sequence.id, sequence.arrived, _least(loop, sequence) is not None, kept)


def _least(loop: Loop, sequence: Sequence) -> KvFormat | None:
    """The format that its rows may be packed into; None: none, or they are."""
    kv = least(sequence.request.kv, loop.caps, loop.config.kv_bits)
    return None if kv == sequence.kv else kv


def _group_of(loop: Loop, sequence: Sequence) -> Group | None:
    """The group in which it decodes, whose step under way is read. None: it does not, or its end was read just now."""
    group = next((g for g in loop.groups if sequence in g.rows), None)
    if group is not None:
        loop.land(group)
    return group if group is not None and sequence in group.rows else None


def pack_rows(loop: Loop, sequence: Sequence) -> None:
    """Give the rows of a sequence, and of those that share its group, as few bits as they may have."""
    kv, group = _least(loop, sequence), _group_of(loop, sequence)
    if kv is None or sequence.stage is Stage.DONE:
        return
    rows = [sequence] if group is None else list(group.rows)
    for row in rows:
        loop.reuse.forget(row)  # its rows are no longer those of its format
    try:
        if group is None:
            assert sequence.layers is not None
            sequence.layers = _packed(loop, rows, sequence.layers, kv)
        else:
            group.layers = _packed(loop, rows, group.layers, kv)
    except Exception as error:  # as in a step: it is these sequences' own, and they are tried once more alone
        if group is not None:
            loop.isolate(group, error)
        else:
            log.exception("Packing the rows of %s failed.", sequence.id)
            loop.abort(sequence.id, Finish.ERROR, sentence(error))
        return
    for row in rows:
        row.kv = kv
        room = row.room - row.num_generated
        loop.ledger.promise(row.id, loop.ledger.need(len(row.tokens), room, kv, row.picture))


def _packed(loop: Loop, rows: list[Sequence], layers: Layers, kv: KvFormat) -> Layers:
    fresh = [loop.new_layers(kv) for _ in rows]
    for row, new in zip(rows, fresh, strict=True):
        new.reserve(len(row.tokens))
    convert(layers, fresh)
    first, *others = fresh
    for other in others:
        first.join(other)
        mx.eval(first.arrays())
    return first


def preempt(loop: Loop, sequence: Sequence, room: int) -> None:
    """Take a sequence's memory and let it wait again. Its prefix stays in the cache where `room` bytes let it."""
    group = _group_of(loop, sequence)
    if sequence.stage is Stage.DONE:
        return
    shared = group is not None and len(group.rows) > 1  # then its rows have to be copied
    if shared and loop.ledger.rows(sequence.computed, sequence.kv) > room:
        loop.reuse.forget(sequence)
    else:
        loop.reuse.release(sequence, None)
    loop.take_out(sequence)
    if group is not None and group.rows:
        shrink(group.layers)
    loop.requeue(sequence)
    sequence.preempted = True


def end(loop: Loop, sequence: Sequence) -> None:
    """A reply ends here, as if it had not been allowed to be longer; without one there is an error to tell."""
    if sequence.num_generated:
        loop.abort(sequence.id, Finish.LENGTH)
    else:
        loop.abort(sequence.id, Finish.ERROR, NO_ROOM)
