"""What a waiting sequence needs, in a format in which it can fit. Pure."""

from __future__ import annotations

from treadle.engine.memory import Ledger
from treadle.engine.sequence import Sequence
from treadle.types import KvFormat


def make_fit(sequence: Sequence, ledger: Ledger, packed: KvFormat | None) -> int:
    """Bytes for the whole sequence. One that would not fit even alone gets the format `packed`, where it may."""
    room = sequence.room - sequence.num_generated  # one that waits again has a part of its reply
    need = ledger.need(len(sequence.tokens), room, sequence.kv, sequence.picture)
    if packed is None or need <= ledger.most:
        return need
    sequence.kv = packed
    return ledger.need(len(sequence.tokens), room, packed, sequence.picture)
