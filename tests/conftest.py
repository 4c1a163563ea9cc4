"""One set-up for every test: MLX prepared before its first import, small property runs, no model hub."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Test processes share few cores; more BLAS threads than cores make them crawl.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nothing here may reach out to a model hub; tests of the hub itself change this for their own scope.
os.environ["HF_HUB_OFFLINE"] = "1"

from treadle import runtime

runtime.prepare()

settings.register_profile("treadle", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")
