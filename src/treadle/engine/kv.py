"""From the setting `kv_bits` and what was measured to the form of a loaded model's rows. Engine thread only."""

from __future__ import annotations

import logging
from dataclasses import replace

from treadle.cache.formats import choose
from treadle.config import Config
from treadle.models import quality
from treadle.models.kv import with_kv
from treadle.models.load import LoadedModel
from treadle.runtime import device_facts

log = logging.getLogger("treadle.engine")


def formatted(loaded: LoadedModel, config: Config) -> LoadedModel:
    """With the form of its rows that `kv_bits` asks for, as far as the model can have it; says which and why."""
    found = quality.stored(loaded.revision, device_facts().name)
    measured = {} if found is None else found.formats
    kv, why = choose(str(config.kv_bits), measured, config.kv_group_size, config.kv_recent)
    caps = with_kv(loaded.model, loaded.caps, kv, why, loaded.calibration)
    caps = replace(caps, kv_losses={name: one.delta_percent for name, one in measured.items()})
    log.info("%s: keys and values of %s bits: %s", loaded.name, caps.kv, caps.kv_why)
    return replace(loaded, caps=caps)
