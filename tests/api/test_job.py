"""What a running request is told about its end."""

from __future__ import annotations

from tests.fakes_engine import FakeEngine
from treadle.api.job import Job, Jobs
from treadle.errors import Preempted, ShuttingDown
from treadle.types import Finish


def test_who_is_ended_for_the_shutdown_is_told_so_even_before_the_engine_knows() -> None:
    jobs = Jobs(FakeEngine())
    job = Job("x", jobs)
    assert isinstance(job.fault(Finish.ABORT, None), Preempted)
    jobs.end()
    assert isinstance(job.fault(Finish.ABORT, None), ShuttingDown)
