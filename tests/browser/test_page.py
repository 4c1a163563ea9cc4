"""The monitor page in a real browser, served by the real server in front of a scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.browser.conftest import Opener, picture
from tests.browser.fed import entries, feed, gauges
from tests.fakes_engine import FakeEngine, Script, say
from tests.live import Live, live, until
from treadle.errors import QueueFull
from treadle.metrics.gauges import SequenceGauge
from treadle.types import Finish

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}], "stream": True}
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
POINTS = "(id) => Chart.getChart(document.querySelector(`#plot-${id} canvas`)).data.datasets.map((s) => s.data.length)"
ALLOWED_401 = "status of 401"


def slow(request: Any) -> Script:
    """Some seconds of words, so that it can be seen and stopped."""
    return say("hello world " * 40, step_s=0.05, cached=2)


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello world"))) as running:
        yield running


def ready(page: Any) -> Any:
    page.wait_for_selector("#state[data-state=ready]")
    return page


def wait(page: Any, expression: str) -> None:
    """Until `expression` holds. The page's policy forbids the browser to evaluate it again by itself."""
    until(lambda: bool(page.evaluate(expression)), within_s=15)


def text(page: Any, field: str) -> str:
    return str(page.text_content(f"[data-field={field}]"))


def shown(page: Any) -> list[str]:
    """The charts that can be seen."""
    return [str(title) for title in page.locator(".plot:visible h2").all_text_contents()]


def test_an_idle_server_has_numbers_and_says_where_there_are_none(server: Live, open_page: Opener) -> None:
    page = ready(open_page(server.url))
    assert page.text_content("#models strong") == "fake"
    assert "256 tokens of context" in page.text_content("#models .about")
    wait(page, "document.querySelector('[data-field=uptime]').textContent.endsWith(' s')")
    assert page.locator("#live-empty").is_visible() and page.locator("#chat-empty").is_visible()
    assert page.locator("#plot-ttft .empty").is_visible()
    assert "Drafts accepted" not in shown(page) and "Image encoding" not in shown(page) and len(shown(page)) == 8


def test_ten_thousand_requests_leave_a_bounded_page(open_page: Opener) -> None:
    engine = FakeEngine(say("hello world"))
    feed(engine, 10_000, drafts=True)
    engine.report = entries(1000)
    with live(engine) as server:
        page = ready(open_page(server.url, height=1800))
        wait(page, "document.querySelectorAll('#entries tr').length > 0")
        page.check("text=15 min")
        page.wait_for_selector("#plot-acceptance canvas[aria-label]")
        assert page.locator("tbody tr").count() <= 100
        assert page.evaluate("document.querySelectorAll('*').length") < 1500
        assert page.evaluate(POINTS, "prompts") == [40, 40]
        points = page.evaluate(POINTS, "gaps") + page.evaluate(POINTS, "memory")[:1]
        assert all(890 < number <= 900 for number in points)
        assert text(page, "finished") == "10,000" and "50 of 1,000" in text(page, "entry-count")
        assert "Drafts accepted" in shown(page)
        picture(page, "full")


def test_charts_go_on_by_a_point_a_second_without_being_made_anew(server: Live, open_page: Opener) -> None:
    feed(server.engine, 5)
    page = ready(open_page(server.url))
    page.wait_for_selector("#plot-decode canvas[aria-label]")
    before = page.evaluate(POINTS, "decode")[0]
    page.evaluate("document.querySelector('#plot-decode canvas').known = true")
    until(lambda: page.evaluate(POINTS, "decode")[0] >= before + 2)
    assert page.evaluate("document.querySelector('#plot-decode canvas').known")


def test_the_prompts_chart_stacks_cached_on_computed(server: Live, open_page: Opener) -> None:
    feed(server.engine, 3)
    page = ready(open_page(server.url))
    page.wait_for_selector("#plot-prompts canvas[aria-label]")
    chart = "Chart.getChart(document.querySelector('#plot-prompts canvas'))"
    sets = page.evaluate(f"{chart}.data.datasets.map((s) => [s.label, ...s.data.slice(-3)])")
    assert sets == [["cached", 0, 37, 74], ["computed", 500, 463, 426]]
    assert page.evaluate(f"{chart}.options.scales.y.stacked")
    assert page.text_content("#plot-prompts .value") == "74/500 cached"


def test_time_for_images_is_drawn_once_there_is_some(server: Live, open_page: Opener) -> None:
    def with_images(route: Any) -> None:
        body = route.fetch().json()
        body["history"]["series"]["vision_s"] = [0.25] * len(body["history"]["times"])
        route.fulfill(json=body)

    feed(server.engine, 3)
    page = ready(open_page(server.url, answers=with_images))
    page.wait_for_selector("#plot-vision canvas[aria-label]")
    assert page.text_content("#plot-vision .value") == "250 ms"


def test_a_live_request_is_listed_and_cancelled_from_the_keyboard(open_page: Opener) -> None:
    with live(FakeEngine(slow)) as server:
        connections = [server.send(CHAT, HELLO) for _ in range(2)]
        page = ready(open_page(server.url))
        wait(page, "document.querySelectorAll('#live tr').length === 2")
        id = next(iter(server.engine.streams))
        server.engine.recorder.measured(gauges(1, sequences=(SequenceGauge(id, "prefill", 5, 2),)))
        wait(page, "document.querySelector('#live').textContent.includes('prefill')")
        for left in (1, 0):
            button = page.locator("#live button").first
            if left:
                button.focus()
            assert page.evaluate("document.activeElement.ariaLabel").startswith("Cancel request chatcmpl-")
            page.keyboard.press("Enter")
            wait(page, f"document.querySelectorAll('#live tr').length === {left}")
        assert page.evaluate("document.activeElement.id") == "live-title"
        assert "is cancelled" in page.text_content("#news")
        assert len(server.engine.aborted) == 2
        for connection in connections:
            connection.close()


def test_a_chat_streams_and_goes_on_with_what_was_said(server: Live, open_page: Opener) -> None:
    page = ready(open_page(server.url))
    wait(page, "document.querySelector('#chat-model').value === 'fake'")
    for turn in (1, 2):
        page.fill("#chat-text", "hello")
        page.keyboard.press("Enter")
        wait(page, f"document.querySelectorAll('.bubble.assistant').length === {turn}")
        wait(page, "[...document.querySelectorAll('.assistant .note')].at(-1).textContent !== ''")
    assert page.locator(".assistant .body").all_text_contents() == ["hello world"] * 2
    assert re.fullmatch(r"stop · \d+ tokens · first after .* · .* tok/s", page.text_content(".assistant .note"))
    first, second = server.engine.requests
    assert len(second.prompt) > 2 * len(first.prompt)
    assert page.get_attribute("#chat-log", "aria-busy") == "false"
    page.click("#chat-new")
    assert page.locator(".bubble").count() == 0 and page.evaluate("document.activeElement.id") == "chat-text"


def test_stop_ends_the_reply_on_the_server_too(open_page: Opener) -> None:
    with live(FakeEngine(slow)) as server:
        page = ready(open_page(server.url))
        page.fill("#chat-text", "hello")
        page.keyboard.press("Enter")
        wait(page, "document.querySelector('.assistant .body')?.textContent.includes('hello')")
        assert page.get_attribute("#chat-log", "aria-busy") == "true"
        page.click("#chat-stop")
        wait(page, "document.querySelector('.assistant .note').textContent.startsWith('stopped')")
        until(lambda: not server.engine.streams)
        assert len(server.engine.aborted) == 1
        assert page.locator("#chat-send").is_visible() and not page.locator("#chat-stop").is_visible()


def test_what_a_model_writes_is_text_and_never_markup(open_page: Opener) -> None:
    with live(FakeEngine(say(MARKUP))) as server:
        page = ready(open_page(server.url))
        page.fill("#chat-text", MARKUP)
        page.keyboard.press("Enter")
        wait(page, "document.querySelector('.assistant .note')?.textContent !== ''")
        assert page.locator(".bubble .body").all_text_contents() == [MARKUP] * 2
        assert page.locator(".bubble img, .bubble b").count() == 0


def test_a_refusal_and_an_error_on_the_way_are_told_where_the_reply_would_stand(open_page: Opener) -> None:
    script = replace(say("hello"), finish=Finish.ERROR, error="The engine broke.")
    with live(FakeEngine(script)) as server:
        page = ready(open_page(server.url, allow="status of 429"))
        for refusal, told in (
            (QueueFull("Too many are waiting."), "Too many are waiting."),
            (None, "The engine broke."),
        ):
            server.engine.refusal = refusal
            page.fill("#chat-text", "hello")
            page.keyboard.press("Enter")
            wait(page, f"[...document.querySelectorAll('.note.problem')].at(-1)?.textContent.includes('{told}')")
        assert page.locator("#chat-send").is_visible()


def test_with_a_key_the_page_asks_for_it_keeps_it_in_the_tab_and_forgets_it(open_page: Opener) -> None:
    with live(FakeEngine(say("hello world")), api_keys=("secret",)) as server:
        page = open_page(server.url, allow=ALLOWED_401)
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("document.activeElement.id") == "key"
        picture(page, "key")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        wait(page, "document.querySelector('#key-problem').textContent.includes('not accept')")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        ready(page)
        page.fill("#chat-text", "hello")
        page.keyboard.press("Enter")
        wait(page, "document.querySelector('.assistant .body')?.textContent === 'hello world'")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.reload()
        ready(page)
        page.click("text=Forget key")
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("sessionStorage.length") == 0


def test_a_server_that_goes_is_told_and_one_that_comes_back_begins_anew(open_page: Opener) -> None:
    with live(FakeEngine(say("hello"))) as first:
        feed(first.engine, 20)
        page = ready(open_page(first.url, allow="Failed to load resource"))
        page.wait_for_selector("#plot-prompts canvas[aria-label]")
        page.route("**/v1/**", lambda route: route.abort())
        page.wait_for_selector("#state[data-state='no connection']")
        assert "does not answer" in page.text_content("#banner")
        with live(FakeEngine(say("hello"))) as second:
            feed(second.engine, 1)
            fresh = json.loads(second.get("/v1/stats").text)
            page.unroute("**/v1/**")
            page.route("**/v1/stats*", lambda route: route.fulfill(json=fresh))
            ready(page)
            wait(page, "document.querySelector('#plot-prompts .value').textContent === '0/500 cached'")
            assert text(page, "finished") == "1" and not page.locator("#banner").is_visible()
            page.unroute("**/v1/stats*")


def test_a_loading_and_a_failed_server_say_so(server: Live, open_page: Opener) -> None:
    server.engine.state = "loading"
    page = open_page(server.url)
    page.wait_for_selector("#state[data-state=loading]")
    server.engine.state, server.engine.failure = "failed", "The file is broken."
    page.wait_for_selector("#state[data-state=failed]")
    wait(page, "document.querySelector('#banner').textContent === 'The file is broken.'")
    server.engine.state = "ready"


def test_a_paused_page_asks_for_nothing(server: Live, open_page: Opener) -> None:
    page = ready(open_page(server.url))
    wait(page, "document.querySelector('[data-field=uptime]').textContent !== '–'")
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.wait_for_timeout(300)  # an answer that was under way
    uptime = text(page, "uptime")
    page.wait_for_timeout(2200)
    assert text(page, "uptime") == uptime
    page.click("#pause")
    wait(page, f"document.querySelector('[data-field=uptime]').textContent !== '{uptime}'")


def test_every_control_is_reached_by_the_tab_key_and_has_a_name(server: Live, open_page: Opener) -> None:
    page = ready(open_page(server.url))
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if reached[-1] == "chat-send":
            break
    assert reached[0] == "skip"
    wanted = ["pause", "scroll", "chat-model", "chat-new", "chat-log", "chat-text", "chat-send"]
    assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted
    tree = page.locator("body").aria_snapshot()
    for name in ('button "Pause"', 'combobox "Model"', 'textbox "Message"', 'log "Conversation"', 'radio "5 min"'):
        assert name in tree


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_drawn_with_their_own_colours(open_page: Opener, scheme: str) -> None:
    engine = FakeEngine(slow)
    feed(engine, 400)
    engine.report = entries(12)
    with live(engine) as server:
        connections = [server.send(CHAT, HELLO) for _ in range(3)]
        page = ready(open_page(server.url, height=1500, scheme=scheme))
        wait(page, "document.querySelectorAll('#entries tr').length === 12")
        page.fill("#chat-text", "hello")
        page.keyboard.press("Enter")
        page.wait_for_selector("#plot-memory canvas[aria-label]")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(ground) < 64) == (scheme == "dark")
        ticks = "Chart.getChart(document.querySelector('#plot-memory canvas')).options.scales.y.ticks.color"
        before = page.evaluate(ticks)
        page.wait_for_timeout(1500)
        picture(page, scheme)
        page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
        wait(page, f"{ticks} !== '{before}'")
        for connection in connections:
            connection.close()


def test_a_phone_shows_everything_without_scrolling_sideways(open_page: Opener) -> None:
    engine = FakeEngine(slow)
    feed(engine, 120)
    with live(engine) as server:
        connection = server.send(CHAT, HELLO)
        page = ready(open_page(server.url, width=390, height=844))
        page.wait_for_selector("#live button")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        box = page.locator("#live button").bounding_box()
        assert box["x"] + box["width"] <= 390
        for target in page.locator("header button:visible, #chat-form button:visible").all():
            assert target.bounding_box()["height"] >= 36
        for plot in page.locator(".plot:visible").all():
            plot.scroll_into_view_if_needed()
            plot.locator("canvas[aria-label]").wait_for()
        picture(page, "phone")
        connection.close()
