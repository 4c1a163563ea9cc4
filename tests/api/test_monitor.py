"""The monitor page's files: who gets them, how they are kept, and that nothing foreign is in them."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest

from tests.fakes_engine import FakeEngine
from tests.live import Live, live
from treadle.api.monitor.assets import CHARTS, site
from treadle.api.monitor.routes import takes_gzip

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with live(FakeEngine(), api_keys=("secret",)) as running:
        yield running


def get(server: Live, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, timeout=20)


class Tags(HTMLParser):
    """All start tags with their attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_a_browser_gets_the_page_and_other_clients_the_hint(locked: Live) -> None:
    page = get(locked, "/", **BROWSER)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache" and "accept" in page.headers["vary"]
    assert "/v1/stats" in get(locked, "/").json()["routes"]


def test_the_page_and_its_files_need_no_key_but_every_number_does(locked: Live) -> None:
    html = get(locked, "/", **BROWSER).text
    for link in re.findall(r'(?:src|href)="(monitor/[^"]+)"', html):
        assert get(locked, "/" + link).status_code == 200
    for path in ("/v1/stats", "/v1/cache", "/v1/models", "/metrics", "/monitor"):
        assert get(locked, path, **BROWSER).status_code == 401
    assert httpx.post(locked.url + f"/monitor/{site().version}/main.js", timeout=20).status_code == 401


def test_a_foreign_host_name_gets_neither_page_nor_files(locked: Live) -> None:
    for path in ("/", f"/monitor/{site().version}/main.js"):
        assert get(locked, path, host="evil.example", **BROWSER).status_code == 403


@pytest.mark.parametrize("path", ["/", f"/monitor/{site().version}/main.js"])
def test_the_policy_allows_the_server_s_own_files_and_nothing_inline(locked: Live, path: str) -> None:
    headers = get(locked, path, **BROWSER).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert headers["x-content-type-options"] == "nosniff"


def test_files_are_kept_for_good_under_an_address_that_changes_with_them(locked: Live) -> None:
    for name, asset in site().files.items():
        answer = get(locked, f"/monitor/{site().version}/{name}")
        assert answer.content == asset.plain and answer.headers["content-encoding"] == "gzip"
        assert "immutable" in answer.headers["cache-control"] and "max-age=31536000" in answer.headers["cache-control"]
        assert answer.headers["content-type"] == asset.type and answer.headers["vary"] == "accept-encoding"


@pytest.mark.parametrize("path", ["/monitor/0/main.js", f"/monitor/{site().version}/../routes.py", "/monitor/x"])
def test_other_versions_and_other_files_are_a_404(locked: Live, path: str) -> None:
    request = httpx.Request("GET", locked.url + path)
    assert httpx.Client().send(request).status_code in (401, 404)
    missing = get(locked, f"/monitor/{site().version}/assets.py")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")


def test_whoever_cannot_unpack_gets_the_plain_file(locked: Live) -> None:
    answer = get(locked, f"/monitor/{site().version}/monitor.css", **{"accept-encoding": "identity"})
    assert "content-encoding" not in answer.headers
    assert answer.content == site().files["monitor.css"].plain


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("gzip, br", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("", False),
        ("x-gzip", False),
    ],
)
def test_gzip_is_sent_where_it_is_named(header: str, takes: bool) -> None:
    assert takes_gzip(header) is takes


def test_the_page_has_no_inline_script_or_style_and_labels_every_control() -> None:
    tags = Tags(site().page.plain.decode())
    assert tags.inline == ""
    labelled = {attributes.get("for") for tag, attributes in tags.tags if tag == "label"}
    for tag, attributes in tags.tags:
        assert not {name for name in attributes if name == "style" or name.startswith("on")}, (tag, attributes)
        if tag in ("select", "textarea") or (tag == "input" and attributes["type"] != "radio"):
            assert attributes["id"] in labelled


def test_everything_that_a_file_of_the_page_names_is_there_and_nothing_is_asked_elsewhere() -> None:
    assert CHARTS in site().files
    for name, asset in site().files.items():
        text = asset.plain.decode()
        assert gzip.decompress(asset.packed()) == asset.plain
        if name != CHARTS:
            assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(site().files)
            assert not re.findall(r"https?://(?!www\.w3\.org)", text), name
            assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name


def test_the_charts_come_from_a_package_that_is_never_imported() -> None:
    site()
    assert b"Chart.js" in site().files[CHARTS].plain[:200]
    assert "chartkick" not in sys.modules
