"""`kv_bits` of a request: how its keys and values are held while it runs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from treadle.cache.formats import AUTO, parse
from treadle.config import KV_BITS
from treadle.types import Caps, KvFormat


def _bits(value: Any) -> str | None:
    """As text; "auto" is what the server does for requests that say nothing."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not KV_BITS.fullmatch(text):
        raise ValueError('must be "auto", 16, 8, 4, or keys/values like "8/4"')
    return None if text == AUTO else text


KvBits = Annotated[str | None, BeforeValidator(_bits, json_schema_input_type=str | int)]


def format_of(bits: str | None, caps: Caps) -> KvFormat | None:
    """The format that a request asks for; None: none. Whether the model can have it, the engine says."""
    return None if bits is None else parse(bits, caps.kv.group_size, caps.kv.recent)
