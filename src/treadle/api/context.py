"""What every route needs: the engine, the settings, the threads for prompts and the running jobs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from starlette.requests import Request

from treadle.api.job import Jobs
from treadle.api.ports import EnginePort
from treadle.config import Config

PROMPT_THREADS = 4
PICTURE_THREADS = 2  # decoding takes a core, and fetching takes its time: prompts of text do not wait for either


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

    picture_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PICTURE_THREADS, thread_name_prefix="treadle-picture")
    )

    def threads(self, shows_images: bool) -> ThreadPoolExecutor:
        """Those that make a request's prompts."""
        return self.picture_pool if shows_images else self.pool

    @property
    def max_body(self) -> int:
        """Largest request body in bytes."""
        return int(self.config.max_body_mb * 2**20)


def context(request: Request) -> Context:
    """The context of the application that got `request`."""
    found = request.app.state.context
    assert isinstance(found, Context)
    return found
