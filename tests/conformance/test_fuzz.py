"""Schemathesis sends what the OpenAPI schema allows, and what it does not: no answer is a 500.

A full server answers 503, and a request whose own `timeout` runs out is answered 504: both are what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case

from tests.fakes_engine import FakeEngine, say
from tests.live import Live, live
from treadle.api.app import create_app
from treadle.config import Config

schema = schemathesis.openapi.from_dict(create_app(FakeEngine(say("hello")), Config()).openapi())


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello"))) as running:
        yield running


@schema.parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_no_request_is_an_internal_error(case: Case, server: Live) -> None:
    answer = case.call(base_url=server.url, timeout=20)
    asked = isinstance(case.body, dict) and "timeout" in case.body
    allowed = {503, 504} if asked else {503}
    assert answer.status_code < 500 or answer.status_code in allowed, (answer.status_code, answer.text[:300])
    assert httpx.get(server.url + "/health").status_code == 200
