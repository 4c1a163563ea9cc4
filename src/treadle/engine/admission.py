"""What a waiting sequence needs, in a format in which it can fit. Pure."""

from __future__ import annotations

from treadle.engine.memory import Ledger
from treadle.engine.sequence import Sequence
from treadle.types import KvFormat


def make_fit(sequence: Sequence, ledger: Ledger, packed: KvFormat | None) -> int:
    """Bytes for the whole sequence. One that would not fit even alone gets the format `packed`, where it may."""
    need = ledger.need(len(sequence.tokens), sequence.room, sequence.kv, sequence.picture)
    if packed is None or need <= ledger.most:
        return need
    sequence.kv = packed
    return ledger.need(len(sequence.tokens), sequence.room, packed, sequence.picture)
