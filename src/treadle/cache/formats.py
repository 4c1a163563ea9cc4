"""Which form attention rows take: from a setting and what was measured to a format and the reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from treadle.errors import ConfigError
from treadle.types import Caps, KvFormat

AUTO = "auto"
BITS = ("16", "8", "4")
FORMATS = tuple(keys if keys == values else f"{keys}/{values}" for keys in BITS for values in BITS)
MOST_LOSS = 0.1  # per cent of perplexity that 8 bits may cost where nobody asked for them
LEAST_SPEED = 0.97  # of the exact rows' decoding speed that counts as not slower, as timings vary


ASKED = "as asked"  # in the key of exact rows that nobody may pack, because their request asked for exact ones
LAYOUT = 2  # of packed rows; 1: 4-bit rows without exact first block and means


@dataclass(frozen=True, slots=True)
class Measured:
    """What `treadle bench quality` found for one format of one model on one device."""

    delta_percent: float  # of perplexity, against exact rows
    speed: float  # of decoding, as a share of the exact rows'
    context: int  # tokens at which the speed was taken
    needle: float  # share of the needles found


def parse(text: str, group_size: int = 64, recent: int = 64) -> KvFormat:
    """ "16", "8", "4", or keys/values like "8/4". Raises ConfigError for anything else."""
    keys, slash, values = text.partition("/")
    if keys not in BITS or (slash and values not in BITS):
        raise ConfigError(
            f'kv_bits must be "auto", 16, 8, 4, or keys/values like "8/4", not {text!r}.', param="kv_bits"
        )
    return KvFormat(int(keys), int(values or keys), group_size, recent)


def form_of(kv: KvFormat) -> str:
    """What tells packed rows from those of other formats and of other layouts, in memory and on disk."""
    return f"{kv!r}, layout {LAYOUT}"


def choose(
    setting: str, measured: Mapping[str, Measured], group_size: int = 64, recent: int = 64
) -> tuple[KvFormat, str]:
    """The format for a setting of `kv_bits`, and a sentence why. `measured` by format ("8", "8/4", "4").

    "auto" takes 8 bits only where they were measured on this device to be neither slower nor worse.
    """
    if setting != AUTO:
        return parse(setting, group_size, recent), "as set"
    found, exact = measured.get("8"), parse("16", group_size, recent)
    if found is None:
        return exact, "auto: 8 bits were not measured for this model on this device (treadle bench quality)"
    if found.delta_percent > MOST_LOSS:
        return exact, f"auto: 8 bits cost {found.delta_percent:.2f} % of perplexity, more than {MOST_LOSS:g} %"
    if found.speed < LEAST_SPEED:
        return exact, f"auto: 8 bits decode at {found.speed:.2f} of the exact speed at {found.context} tokens"
    cost = f"{found.delta_percent:.2f} % of perplexity"
    why = f"auto: 8 bits decode at {found.speed:.2f} of the exact speed and cost {cost}"
    return parse("8", group_size, recent), why


def stays_exact(setting: str | int) -> bool:
    """Whether a setting of `kv_bits` says that rows are exact whatever happens."""
    return str(setting) != AUTO and parse(str(setting)).exact


def least(asked: KvFormat | None, caps: Caps, setting: str | int) -> KvFormat | None:
    """The format that a request's rows may be packed into when memory is short; None: they stay as they are.

    They do where the request asks for a format, where `kv_bits` is set to 16, and where they have 4 bits anyway.
    """
    if asked is not None or caps.kv_fault is not None or stays_exact(setting):
        return None
    packed = replace(caps.kv, key_bits=4, value_bits=4)
    return None if packed == caps.kv else packed
