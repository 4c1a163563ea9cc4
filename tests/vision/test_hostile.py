"""Large, broken and hostile files beside other streams: a right answer or a 400, and the others go on."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.live import Live, chunks, live, until
from tests.vision.folders import write_folder
from tests.vision.test_decode import bomb
from tests.vision.test_serving import CHAT, asked, image, text
from treadle.api.context import PICTURE_THREADS
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.vision import reader


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = write_folder(tmp_path_factory.mktemp("models") / "qwen", "qwen2_vl", max_position_embeddings=2048)
    engine = Engine(lambda: load_model(resolve(str(folder)), None), Config(cache_gb=0.1))
    with live(engine) as running:  # type: ignore[arg-type]
        until(lambda: engine.state != "loading", 60)
        assert engine.state == "ready", engine.failure
        yield running


def file(kind: str, width: int, height: int, **options: Any) -> bytes:
    buffer = BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()


def part(data: bytes) -> dict[str, Any]:
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def post(server: Live, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + CHAT, json=body, timeout=120)


def streamed(server: Live, n: int, salt: str) -> str:
    """The text of a streamed reply of `n` tokens, however many of them came at a time."""
    body = asked(text("Count"), stream=True, cache_salt=salt, logit_bias={"0": -100}) | {"max_tokens": n}
    choices = [made["choices"][0] for made in chunks(post(server, body).text)]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_every_stream_goes_on_to_its_end_while_pictures_are_being_decoded(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    gate, decode = threading.Event(), reader.decode

    def blocked(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert gate.wait(60)
        return decode(*args, **named)

    monkeypatch.setattr(reader, "decode", blocked)
    with ThreadPoolExecutor(PICTURE_THREADS + 1) as pool:
        seen = [pool.submit(post, server, asked(image(seed), text("?"))) for seed in range(40, 41 + PICTURE_THREADS)]
        try:
            until(lambda: len(threads) == PICTURE_THREADS, 30)
            for n in range(3):
                assert streamed(server, 30, f"salt {n}")
            assert post(server, asked(text("And no stream?"))).status_code == 200
            assert not any(one.done() for one in seen) and len(threads) == PICTURE_THREADS
        finally:
            gate.set()
        assert [one.result().status_code for one in seen] == [200] * len(seen)
    assert all(name.startswith("treadle-picture") for name in threads)


FILES: dict[str, tuple[bytes, int, str]] = {
    "24 megapixels": (file("JPEG", 6000, 4000), 200, ""),
    "a whole PNG of a few kilobytes that unpacks to 48 megapixels": (file("PNG", 8000, 6000), 200, ""),
    "20000 x 20": (file("PNG", 20000, 20), 400, "cannot take this image"),
    "1 x 1": (file("PNG", 1, 1), 200, ""),
    "cut off": (file("JPEG", 640, 480)[:2000], 400, "cannot be read"),
    "a bomb": (bomb(60000, 60000), 400, "60000 x 60000 pixels"),
    "no image": (b"MZ" + bytes(1000), 400, "cannot be read"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_answered_and_changes_nothing_for_a_stream_beside_it(server: Live, name: str) -> None:
    data, status, reason = FILES[name]
    alone = streamed(server, 120, "alone")
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(streamed, server, 120, f"beside {name}")
        response = post(server, asked(part(data), text("?")))
        assert response.status_code == status, response.text
        assert beside.result() == alone
    if reason:
        assert reason in response.json()["error"]["message"]
        assert response.json()["error"]["param"].startswith("messages[0].content[0]")
    else:
        assert response.json()["choices"][0]["message"]["content"]
