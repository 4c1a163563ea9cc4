"""mlx-lm's model classes by `model_type`, with every failure as one sentence."""

from __future__ import annotations

from typing import Any

from treadle.errors import LoadError
from treadle.runtime import guarded_import, mlx_lm_module

TRUNK = "model"  # the part of mlx-lm's models that is all but the output layer


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The classes of the model and of its arguments.

    Raises:
        LoadError: the type is missing or unknown, or its file cannot be imported.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise LoadError("config.json names no model_type, so the architecture is not known.")
    utils = mlx_lm_module("utils")
    try:
        with guarded_import(f"mlx-lm's model file for {name!r}"):
            model_class, args_class = utils._get_classes(config)
    except ValueError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and str(cause.name).startswith("mlx_lm.models."):
            raise LoadError(f"Models of type {name!r} are not supported by the installed mlx-lm.") from error
        raise LoadError(f"mlx-lm's model file for {name!r} cannot be imported: {cause or error}.") from error
    return model_class, args_class


def trunk_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The same for weights that were saved without the prefix of the part they are of. Raises as `model_classes`."""
    model_class, args_class = model_classes(config)

    class Prefixed(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            named = {f"{TRUNK}.{name}": weight for name, weight in weights.items()}
            known = getattr(super(), "sanitize", None)  # not all of mlx-lm's classes have one
            return named if known is None else known(named)

    return Prefixed, args_class
