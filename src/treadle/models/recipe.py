"""How to come by a model: what the engine is told of one before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treadle.config import Config
from treadle.models.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model whose files are here. `load` runs on the engine thread; `num_bytes` estimates its weights in memory.

    `lighter` is the same without what it can do without, for where that has no room.
    """

    num_bytes: int
    load: Callable[[], LoadedModel]
    lighter: Prepared | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model by its name. `config` has the model's own settings; `prepare` may download and touches no MLX."""

    name: str
    config: Config
    prepare: Callable[[], Prepared]
    aliases: tuple[str, ...] = ()
    pinned: bool = False  # never unloaded but by hand
    source: str = ""  # as it was written; a name too, where nothing else has it

    @classmethod
    def of(cls, load: Callable[[], LoadedModel], config: Config) -> Recipe:
        """For a model that is nowhere but in `load`; its name is the configuration's until it is loaded."""
        return cls(config.model, config, lambda: Prepared(0, load))
