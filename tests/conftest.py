"""One set-up for every test: MLX prepared before its first import, small property runs, no model hub."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Test processes share few cores; more BLAS threads than cores make them crawl.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nothing here may reach out to a model hub; tests of the hub itself change this for their own scope.
os.environ["HF_HUB_OFFLINE"] = "1"

from treadle import runtime
from treadle.models.folders import cache_folder

# Tests have cache folders of their own; the CPU kernels are compiled once for all of them.
os.environ.setdefault("TREADLE_CPU_KERNELS", str(cache_folder() / "kernels"))

runtime.prepare()


settings.register_profile("treadle", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")


@pytest.fixture(autouse=True, scope="session")
def calibrations_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests find out about their tiny models does not go into the user's cache folder."""
    place = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.models.calibration.folder", lambda: place)
        yield
