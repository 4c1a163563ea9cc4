"""What differs between the protocols around an answer: silence and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response

from treadle.api.errors import error_body, error_response
from treadle.api.outbox import keep_alive
from treadle.api.sse import encode
from treadle.errors import TreadleError


@dataclass(frozen=True, slots=True)
class Wire:
    """`silence` makes what a stream says when it has nothing to say, `fault` its end when something fails;
    `refusal` is the answer that is an error from the start."""

    silence: Callable[[], bytes]
    fault: Callable[[TreadleError], bytes]
    refusal: Callable[[TreadleError], Response]


OPENAI = Wire(keep_alive, lambda error: encode(error_body(error)), error_response)
