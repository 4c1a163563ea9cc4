"""How sequences end other than by running to their end: what each drawn token may bring, in terms of an `Output`."""

from __future__ import annotations

from typing import Any

from treadle.engine.sampling import NAN_TOKEN
from treadle.engine.sequence import Sequence
from treadle.types import Finish

NO_END: dict[str, Any] = {}


def taken_one_by_one(sequence: Sequence, drawn: list[int]) -> tuple[int, dict[str, Any]]:
    """Commit drawn tokens up to the first that ends it: how many are part of the reply, and how it ends, if it does."""
    for n, token in enumerate(drawn):
        ending = refusal(sequence, token)
        if not ending:
            sequence.commit([token])
            ending = fault(sequence)
        if ending:
            return n, ending
        if sequence.ended is not None:
            return n + 1, {"finish": sequence.ended}
    return len(drawn), NO_END


def fault(sequence: Sequence) -> dict[str, Any]:
    """How it ends because its grammar cannot go on; empty if it can."""
    return {"finish": Finish.ERROR, "error": sequence.fault} if sequence.fault else NO_END


def refusal(sequence: Sequence, token: int) -> dict[str, Any]:
    """How the sequence ends instead of taking a drawn token; empty if it takes it."""
    if token == NAN_TOKEN:
        return {"finish": Finish.ERROR, "error": "The model produced values that are not numbers."}
    if token in sequence.request.stop_ids and not sequence.fault:
        return {"finish": Finish.STOP, "stop_id": token}
    return fault(sequence)


def sentence(error: Exception) -> str:
    """What is told of a fault."""
    first = next(iter(str(error).splitlines()), "")
    return f"The engine failed on this request ({type(error).__name__}: {first})."
