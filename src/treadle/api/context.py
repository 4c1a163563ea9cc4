"""What every route needs: the engine, the settings, the threads for prompts and the running jobs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from starlette.requests import Request

from treadle.api.job import Jobs
from treadle.api.ports import EnginePort, ModelPort
from treadle.config import Config
from treadle.errors import ModelNotFound

PROMPT_THREADS = 4


@dataclass(frozen=True, slots=True)
class Context:
    """Made once per application, kept on `app.state.context`."""

    engine: EnginePort
    config: Config
    jobs: Jobs
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="treadle-prompt")
    )

    @property
    def max_body(self) -> int:
        """Largest request body in bytes."""
        return int(self.config.max_body_mb * 2**20)

    def served(self, name: str | None) -> ModelPort:
        """The loaded model, if `name` is one of its names or empty. Raises NotReady, ModelNotFound."""
        model = self.engine.model
        if name and name not in (model.name, model.source, self.config.model):
            raise ModelNotFound(f"The model {name[:200]!r} is not served here; {model.name!r} is.", param="model")
        return model


def context(request: Request) -> Context:
    """The context of the application that got `request`."""
    found = request.app.state.context
    assert isinstance(found, Context)
    return found
