"""Several models in one engine: loaded when asked for, unloaded when others need the room, and never from under a
request."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.test_loop import request_of
from tests.fakes import STOP, HashModel, slow_twin
from treadle.config import Config
from treadle.engine import slot as slot_module
from treadle.engine.engine import Engine
from treadle.engine.slot import Slot
from treadle.errors import LoadError, ModelInUse, ModelNotFound, NotReady, QueueFull, ShuttingDown
from treadle.models.load import LoadedModel
from treadle.models.recipe import Prepared, Recipe
from treadle.speculate.control import Source
from treadle.types import Finish

MB = 10**6
SIZE = 8 * MB
TWO = 0.022  # GB: room for two of that size, not for three
ENDLESS = {"logit_bias": ((STOP, -100.0),)}


class Heavy(HashModel):
    """A hash model with weights that are really there."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.weights = mx.zeros(SIZE // 4)
        mx.eval(self.weights)

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        time.sleep(self.pause_s)
        return super().__call__(ids, cache)


class Models:
    """Recipes of heavy models, what was loaded in which order, and what goes wrong."""

    def __init__(self, config: Config, names: str = "abc", pinned: str = "", pause_s: float = 0.0) -> None:
        self.loads: list[str] = []
        self.faults: dict[str, str] = {}
        self.pause_s = pause_s
        self.prepare_s = 0.0
        self.hurry = threading.Event()  # ends downloads
        self.recipes = [
            Recipe(name, config, lambda name=name: self._prepare(name), (name + "2",), name in pinned)  # type: ignore[misc]
            for name in names
        ]
        self.engine = Engine(self.recipes[0], config, self.recipes[1:], {"claude-*": "b", "*": "c2", "x": "a"})

    def _prepare(self, name: str) -> Prepared:
        self.hurry.wait(self.prepare_s)
        return Prepared(SIZE, lambda: self._load(name))

    def _load(self, name: str) -> LoadedModel:
        self.loads.append(name)
        model = Heavy(self.pause_s)
        if name in self.faults:
            raise LoadError(self.faults[name])
        return LoadedModel(name, "hash", name, model, None, {}, model.caps, frozenset({STOP}), {}, None)

    def state(self) -> str:
        """The names of the loaded models."""
        return "".join(slot.name for slot in self.engine.slots if slot.resident is not None)

    async def ask(self, name: str, id: str, tokens: int | None = 3, **sampling: Any) -> tuple[list[int], Finish | None]:
        made: list[int] = []
        finish = None
        async with self.engine.find(name).use() as resident:
            stream = resident.submit(request_of(id, [5, 6, 7], tokens, **sampling))
        async for output in stream:
            made += output.tokens
            finish = output.finish
        return made, finish


def run(models: Models, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        models.engine.start()
        await models.engine.ready()
        try:
            await body()
        finally:
            await models.engine.stop()

    asyncio.run(main())


def config(**settings: Any) -> Config:
    gc.collect()
    held = mx.get_active_memory() / 1e9  # by other tests of this process
    settings["memory_limit_gb"] = held + settings.get("memory_limit_gb", TWO)
    return Config(**{"drain_s": 0.2, "model_wait_s": 5.0, **settings})


def test_the_least_recently_used_model_makes_room() -> None:
    models = Models(config())

    async def body() -> None:
        for name, loaded in [("a", "a"), ("b", "ab"), ("c", "bc"), ("b", "bc"), ("a", "ab"), ("b", "ab"), ("c", "bc")]:
            await models.ask(name, f"{name}-{loaded}")
            assert models.state() == loaded
        assert models.loads == ["a", "b", "c", "a", "c"]

    run(models, body)


def test_the_text_is_right_after_any_number_of_swaps() -> None:
    models = Models(config())
    wanted = slow_twin(HashModel(), request_of("x", [5, 6, 7], 9), 512)

    async def body() -> None:
        async def one(i: int) -> None:
            assert (await models.ask("abc"[i * i % 3 if i % 5 else i % 2], f"r{i}", 9))[0] == wanted

        for start in range(0, 60, 6):
            await asyncio.gather(*(one(i) for i in range(start, start + 6)))
        assert len(models.state()) == 2

    run(models, body)


def test_a_pinned_model_stays_and_is_there_from_the_start() -> None:
    models = Models(config(), pinned="c")

    async def body() -> None:
        while models.state() != "ac":
            await asyncio.sleep(0.01)
        for name, loaded in [("b", "bc"), ("a", "ac"), ("b", "bc")]:
            await models.ask(name, f"{name}-{loaded}")
            assert models.state() == loaded

    run(models, body)


def test_requests_for_a_loading_model_share_one_load() -> None:
    models = Models(config())
    models.prepare_s = 0.05

    async def body() -> None:
        asked = [asyncio.create_task(models.ask("b", f"r{i}")) for i in range(20)]
        await asyncio.sleep(0.02)
        assert models.engine.find("b").state == "loading"
        assert all(finish is not None for _, finish in await asyncio.gather(*asked))
        assert models.loads == ["a", "b"]

    run(models, body)


def test_each_of_three_models_gets_its_turn_where_there_is_room_for_one() -> None:
    """A model that was just loaded is not taken from those who waited for it."""
    models = Models(config(memory_limit_gb=0.012))

    async def body() -> None:
        await asyncio.gather(*(models.ask("abc"[i % 3], f"r{i}") for i in range(30)))
        assert len(models.loads) <= 9

    run(models, body)


def test_a_busy_model_is_drained_and_not_cut_off() -> None:
    models = Models(config(memory_limit_gb=0.012), pause_s=0.002)

    async def body() -> None:
        long = asyncio.create_task(models.ask("a", "long", 60, **ENDLESS))
        await asyncio.sleep(0.02)
        await models.ask("b", "next")
        assert long.done() and (await long)[1] is Finish.LENGTH
        assert models.state() == "b"

    run(models, body)


def test_a_load_that_waits_too_long_is_given_up_and_nothing_is_lost() -> None:
    models = Models(config(memory_limit_gb=0.012, model_wait_s=0.1), pause_s=0.005)

    async def body() -> None:
        long = asyncio.create_task(models.ask("a", "long", 100, **ENDLESS))
        await asyncio.sleep(0.02)
        with pytest.raises(NotReady, match=r"no room for the model 'b'.*'a' was in use"):
            await models.ask("b", "next")
        assert models.engine.find("b").state == "unloaded"
        with pytest.raises(ModelInUse, match="'a' was in use"):
            await models.engine.find("a").unload()
        assert (await models.ask("a", "beside"))[1] is not None
        assert (await long)[1] is Finish.LENGTH
        assert (await models.ask("b", "again"))[1] is not None

    run(models, body)


def test_an_unload_by_hand_waits_for_streams_and_later_requests_load_again() -> None:
    models = Models(config(), pause_s=0.002)

    async def body() -> None:
        long = asyncio.create_task(models.ask("a", "long", 40, **ENDLESS))
        await asyncio.sleep(0.02)
        unloading = asyncio.create_task(models.engine.find("a").unload())
        await asyncio.sleep(0)
        late = asyncio.create_task(models.ask("a", "late"))
        assert await unloading is True
        assert (await long)[1] is Finish.LENGTH
        assert (await late)[1] is not None
        assert models.loads == ["a", "a"]
        await models.engine.find("a").unload()
        assert await models.engine.find("a").unload() is False

    run(models, body)


def test_a_failed_load_is_told_to_all_who_waited_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(config())
    models.faults["b"] = "The file is damaged."

    async def body() -> None:
        results = await asyncio.gather(*(models.ask("b", f"r{i}") for i in range(5)), return_exceptions=True)
        assert all(isinstance(r, NotReady) and r.message == "The file is damaged." for r in results)
        slot = models.engine.find("b")
        assert (slot.state, slot.failure, models.loads) == ("failed", "The file is damaged.", ["a", "b"])
        with pytest.raises(NotReady, match="damaged"):
            await models.ask("b", "soon")
        assert models.loads == ["a", "b"]
        models.faults.clear()
        await slot.load()
        assert slot.state == "ready" and slot.failure is None
        await slot.unload()
        models.faults["b"] = "Again."
        with pytest.raises(NotReady, match="Again"):
            await slot.load()
        models.faults.clear()
        monkeypatch.setattr(slot_module, "FAILED_S", 0.0)
        assert (await models.ask("b", "later"))[1] is not None

    run(models, body)


def test_a_model_that_can_never_fit_is_refused_and_nobody_is_unloaded_for_it() -> None:
    models = Models(config(memory_limit_gb=0.012), pinned="a")

    async def body() -> None:
        with pytest.raises(NotReady, match=r"'b' needs about 0\.01 GB"):
            await models.ask("b", "x")
        assert models.state() == "a"

    run(models, body)


def active() -> int:
    return int(mx.get_active_memory())


def test_the_memory_of_an_unloaded_model_is_free_at_once_and_that_of_a_failed_load_too() -> None:
    models = Models(config())

    async def body() -> None:
        await models.ask("a", "x")
        before = active()
        await models.ask("b", "x")
        assert active() > before + SIZE - MB
        await models.engine.find("b").unload()
        assert active() < before + MB
        models.faults["c"] = "No."
        with pytest.raises(NotReady):
            await models.ask("c", "x")
        assert active() < before + MB

    run(models, body)


def test_a_model_that_nobody_uses_is_unloaded_after_its_time() -> None:
    models = Models(config(model_idle_s=0.1), pinned="b")

    async def body() -> None:
        while models.state() != "b":
            await asyncio.sleep(0.02)
        assert models.engine.state == "ready"
        assert (await models.ask("a", "x"))[1] is not None

    run(models, body)


def test_prefixes_go_with_their_model_but_stay_on_disk(tmp_path: Path) -> None:
    models = Models(config(cache_dir=str(tmp_path), cache_min_tokens=16, memory_limit_gb=0.1))
    prompt = list(range(1, 90)) * 4

    async def cached(id: str) -> int:
        async with models.engine.find("b").use() as resident:
            stream = resident.submit(request_of(id, prompt, 3))
        last = [output async for output in stream][-1]
        assert last.usage is not None
        return last.usage.cached_tokens

    async def body() -> None:
        assert await cached("first") == 0
        assert await cached("second") == len(prompt) - 1
        await models.engine.find("b").unload()
        report = await models.engine.cache_report()
        assert report.used_bytes == 0 and report.evictions["unload"] > 0
        async with asyncio.timeout(10):
            while report.disk is not None and report.disk["files"] == 0:  # another thread writes
                await asyncio.sleep(0.01)
                report = await models.engine.cache_report()
        assert report.disk is not None
        assert await cached("third") >= 256

    run(models, body)


def test_an_unload_that_waited_for_the_load_lets_those_finish_for_whom_it_was() -> None:
    models = Models(config(model_wait_s=30.0))
    models.prepare_s = 0.1

    async def body() -> None:
        slot = models.engine.find("b")
        asked = [asyncio.create_task(models.ask("b", f"r{i}")) for i in range(2)]
        await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            assert await slot.unload()
            assert [len(tokens) for tokens, _ in await asyncio.gather(*asked)] == [3, 3]
        assert models.loads == ["a", "b"] and models.state() == "a"

    run(models, body)


def test_a_model_is_not_taken_from_those_for_whom_it_was_just_loaded() -> None:
    """Another load that waited in between wants its room at once."""
    models = Models(config(memory_limit_gb=0.012, model_wait_s=30.0))
    models.prepare_s = 0.05

    async def body() -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*(models.ask(name, f"{name}{i}") for name in "bc" for i in range(2)))
        assert models.loads == ["a", "b", "c"]

    run(models, body)


def test_names_aliases_and_rules_find_their_model() -> None:
    engine = Models(config()).engine
    found = {name: engine.find(name).name for name in ("a", "b2", "claude-opus-4", "claude", "x", "", "c")}
    assert found == {"a": "a", "b2": "b", "claude-opus-4": "b", "claude": "c", "x": "c", "": "a", "c": "c"}


def test_a_source_finds_its_model_loaded_or_not_unless_another_has_it_as_a_name() -> None:
    sources = {"a": "b", "b": "org/b@v1", "c": "org/c"}
    recipes = [replace(recipe, source=sources[recipe.name]) for recipe in Models(config()).recipes]
    engine = Engine(recipes[0], config(), recipes[1:], {"*": "a"})
    found = {name: engine.find(name).name for name in ("org/b@v1", "org/c", "b", "org/d")}
    assert found == {"org/b@v1": "b", "org/c": "c", "b": "b", "org/d": "a"}


def test_what_was_drafted_stays_counted_when_a_model_goes_and_comes_back() -> None:
    models = Models(config())

    async def drafted(expected: int) -> None:
        for _ in range(400):
            found = (models.engine.recorder.gauges.speculation or {}).get("b")
            if found is not None and found["drafted"]["lookup"] == expected:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"never {expected}")

    async def body() -> None:
        slot = models.engine.find("b")
        for times in (1, 2):
            await slot.load()
            assert slot.resident is not None and slot.resident.loop.speculation is not None
            slot.resident.loop.speculation.counters.settled(Source.LOOKUP, 3, 2)
            await slot.unload()
            await drafted(3 * times)

    run(models, body)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    recipes = Models(config()).recipes
    engine = Engine(recipes[0], config(), recipes[1:2], {"claude-*": "b"})
    with pytest.raises(ModelNotFound, match="'gpt' is not served here; 'a' and 'b' are"):
        engine.find("gpt")


def test_too_many_who_wait_for_a_load_are_told_at_once() -> None:
    models = Models(config(max_waiting=2))
    models.prepare_s = 0.05

    async def body() -> None:
        asked = [asyncio.create_task(models.ask("b", f"r{i}")) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="wait for 'b'"):
            await models.ask("b", "more")
        await asyncio.gather(*asked)

    run(models, body)


def test_who_waits_for_a_load_when_the_server_stops_learns_so() -> None:
    models = Models(config())
    models.prepare_s = 0.05

    async def body() -> None:
        asked = asyncio.create_task(models.ask("b", "x"))
        await asyncio.sleep(0.02)
        await models.engine.stop()
        with pytest.raises(ShuttingDown):
            await asked
        with pytest.raises(NotReady, match="shutting down"):
            await models.ask("a", "late")

    run(models, body)


def test_a_waiter_that_leaves_does_not_stop_the_load() -> None:
    models = Models(config())
    models.prepare_s = 0.05

    async def body() -> None:
        asked = asyncio.create_task(models.ask("b", "x"))
        await asyncio.sleep(0.02)
        asked.cancel()
        slot: Slot = models.engine.find("b")
        while slot.state == "loading":
            await asyncio.sleep(0.01)
        assert slot.state == "ready" and not slot.busy

    run(models, body)


def test_a_download_keeps_neither_other_models_nor_the_end_waiting() -> None:
    models = Models(config())

    async def body() -> None:
        models.prepare_s = 60.0
        asked = asyncio.create_task(models.ask("b", "x"))
        await asyncio.sleep(0.02)
        assert (await models.ask("a", "y"))[1] is not None
        await models.engine.stop()
        with pytest.raises(ShuttingDown):
            await asked

    try:
        run(models, body)
    finally:
        models.hurry.set()
