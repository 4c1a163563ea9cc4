"""A headless Chromium for the tests of the page; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
GONE = "net::ERR_CONNECTION"  # a server may end before its page does
PICTURES = Path(__file__).parents[2] / "artifacts" / "browser"  # ignored by git


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on the PATH")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


class Opener:
    """Opens an address, each in a fresh profile, and gathers what the browser complains of: a blocked script, say."""

    def __init__(self, browser: Any) -> None:
        self.complaints: list[str] = []
        self.contexts: list[Any] = []
        self._browser = browser

    def __call__(
        self,
        url: str,
        *,
        width: int = 1440,
        height: int = 900,
        scheme: str = "light",
        allow: str | None = None,
        answers: Callable[[Any], None] | None = None,
    ) -> Any:
        """`allow` is part of a message that is no complaint; `answers` answers in place of `/v1/stats`."""
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._heard(message, allow))
        page.on("request", lambda asked: asked.url.startswith(url) or self.complaints.append(f"asked {asked.url}"))
        if answers is not None:
            page.route("**/v1/stats*", answers)
        page.goto(url)
        return page

    def _heard(self, message: Any, allow: str | None) -> None:
        expected = (GONE,) if allow is None else (GONE, allow)
        if message.type in ("error", "warning") and not any(part in message.text for part in expected):
            self.complaints.append(message.text)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    opener = Opener(browser)
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.complaints == []


def picture(page: Any, name: str) -> None:
    """A screenshot of the whole page, kept to be looked at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
