"""MLX and mlx-lm are imported so that the process keeps its limits and computes fast."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest

from tests.fresh import run
from treadle import runtime
from treadle.errors import LoadError

LIMITS = (
    "import json, resource\n"
    "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
    "from treadle.runtime import mlx_lm_module\n"
    "mlx_lm_module('utils')\n"
    "print(json.dumps([before, resource.getrlimit(resource.RLIMIT_NOFILE)]))"
)


@pytest.mark.parametrize("limit", [1024, 8192])
def test_importing_mlx_lm_keeps_the_limit_of_open_files(limit: int) -> None:
    assert run(LIMITS, limit=limit) == [[limit, limit], [limit, limit]]


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(LoadError, match=r"mlx_lm\.models\.no_such_model cannot be imported"):
        runtime.mlx_lm_module("models.no_such_model")


def test_an_import_that_exits_is_an_error() -> None:
    with (
        pytest.raises(LoadError, match="it tried to exit the process"),
        runtime.guarded_import("a model file"),
    ):
        sys.exit(1)


def test_the_limits_work_again_after_a_guarded_import() -> None:
    import resource

    with pytest.raises(LoadError), runtime.guarded_import("x"):
        raise ImportError("no")
    assert "_keep_limit" not in resource.setrlimit.__qualname__


def test_every_hook_of_mlx_lm_exists() -> None:
    runtime.check_hooks()


def test_a_missing_hook_is_named_with_the_tested_versions() -> None:
    with pytest.raises(LoadError, match=r"lacks models\.cache\.NoSuchCache.*tested with mlx "):
        runtime.check_hooks({"models.cache": ("KVCache", "NoSuchCache")})


def test_device_facts_are_plausible() -> None:
    facts = runtime.device_facts()
    assert facts.backend in ("cpu", "cuda", "metal")
    assert facts.name
    assert 0 < facts.working_set_bytes <= facts.memory_bytes
    assert facts.versions["mlx"] == version("mlx")
