"""A model whose layers take few tokens in few operations computes what it computed before."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from tests.models.test_rope import LLAMA3
from tests.tiny import CONFIGS, built
from treadle.cache.layers import Layers
from treadle.models import blocks
from treadle.models import compile as compiling
from treadle.models.blocks import SINGLE, Traces, layers_of, turn_of
from treadle.models.capabilities import forward, new_layers
from treadle.models.compile import compile_steps
from treadle.models.fuse import fuse_projections
from treadle.models.kernels import Heads, Plain, Writer
from treadle.models.linear import flatten_rows
from treadle.runtime import mlx_lm_module
from treadle.types import EXACT, Caps, KvFormat

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with other frequencies": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama with windows": {
        "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "ernie": {"model_type": "ernie4_5", "use_bias": False, "head_dim": 8},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
LONG = 200


class InPlace(Plain):
    """Writes keys and values as the kernel does: into the memory of arrays, behind the back of MLX."""

    written = 0

    def writer(self, heads: Heads, dtype: Any) -> Writer:
        def write(stacked: Any, position: Any, *held: Any) -> Any:
            n = stacked.shape[0] // position.shape[0]
            queries, *rows = self.heads(stacked, position, n, heads)
            mx.eval(queries, rows, held)
            start = held[2].item()
            for buffer, own in zip(held, rows, strict=False):
                np.array(buffer, copy=False)[: own.shape[0], :, start : start + n] = own
            InPlace.written += 1
            return queries

        return write


@pytest.fixture(params=[False, True], ids=["returned", "in place"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways in which a step's rows come into a layer's buffers."""
    if request.param:
        monkeypatch.setattr(compiling, "_pieces", lambda kernels: lambda *measures: InPlace())
    before = InPlace.written
    yield
    assert (InPlace.written > before) is request.param


def pair(name: str, bits: int | None = None) -> tuple[Any, Any, Caps]:
    """The same model as it is and with exchanged layers."""
    plain, caps = built(FAMILIES[name])
    other, _ = built(FAMILIES[name])
    for model in (plain, other):
        if bits is not None:
            nn.quantize(model, 32, bits)
            flatten_rows(model, pad=True)
    fuse_projections(other)
    assert compile_steps(other, "metal", "on")
    return plain, other, caps


def step(model: Any, ids: list[list[int]], layers: Layers) -> NDArray[np.float32]:
    """The logits behind the last token of each row."""
    logits = np.array(forward(model, ids, layers))
    return np.stack([row[len(line) - 1] for row, line in zip(logits, ids, strict=True)])


def prefilled(model: Any, caps: Caps, prompt: list[int], kv: KvFormat = EXACT) -> Layers:
    layers = new_layers(model, caps, kv)
    forward(model, [prompt], layers)
    return layers


def exchanged(model: Any) -> int:
    return sum(type(layer).__name__.startswith(SINGLE) for layer in model.layers)


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4 bits"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_stay_the_same_alone_and_in_batches_with_joins_and_leaves(
    name: str, bits: int | None, written: None
) -> None:
    plain, other, caps = pair(name, bits)
    assert exchanged(other) == 4
    prompts = [PROMPT, PROMPT[:18], PROMPT[2:], [7, 7]]
    memories = [[prefilled(model, caps, prompt) for prompt in prompts] for model in (plain, other)]
    script: list[tuple[str, int]] = [
        ("step", 1),
        ("step", 4),
        ("join", 1),
        ("step", 1),
        ("step", 3),
        ("join", 2),
        ("join", 3),
    ]
    script += [("step", 1), ("step", 2), ("drop", 1), ("step", 1), ("drop", 0), ("drop", 0), ("step", 1), ("step", 16)]
    rows = 1
    for number, (what, value) in enumerate(script):
        if what == "step":
            lengths = [value + row % 2 if value > 1 else 1 for row in range(rows)]
            ids = [[(5 * number + row + i) % 100 for i in range(lengths[row])] for row in range(rows)]
            wanted, found = (step(model, ids, own[0]) for model, own in zip((plain, other), memories, strict=True))
            np.testing.assert_allclose(found, wanted, atol=3e-5 if bits is None else 1e-4)
        for own in memories:
            if what == "join":
                own[0].join(own[value])
            elif what == "drop":
                own[0].drop(value)
        rows += {"join": 1, "drop": -1, "step": 0}[what]


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4 bits"])
@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen2", "qwen3"])
def test_products_that_take_along_what_lies_around_them(
    name: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = set()

    def product(layer: Any, x: Any, norm: Any = None, eps: float = 0.0, gated: bool = False, added: Any = None) -> Any:
        row = x.reshape(-1, x.shape[-1]) if norm is None and added is None else x.reshape(1, -1)
        row = row if norm is None else mx.fast.rms_norm(row, norm, eps)
        found = type(layer).__base__.__call__(layer, row) if bits else layer(row)
        taken.add((norm is not None, gated, added is not None))
        if gated:
            gate, up = mx.split(found, 2, axis=-1)
            found = nn.silu(gate) * up
        return found if added is None else found + added

    monkeypatch.setattr(blocks, "most_rows", lambda layer, **around: 2)
    monkeypatch.setattr(blocks, "product", product)
    plain, other, caps = pair(name, bits)
    assert exchanged(other) == 4
    memories = [prefilled(model, caps, PROMPT) for model in (plain, other)]
    for ids in ([5], [9], [2, 6, 1], [2, 6], [4]):
        wanted, found = (step(model, [ids], own) for model, own in zip((plain, other), memories, strict=True))
        np.testing.assert_allclose(found, wanted, atol=3e-5 if bits is None else 1e-4)
    assert {(True, False, False), (True, True, False), (False, False, True), (False, True, False)} <= taken


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_long_greedy_text_is_identical(name: str, written: None) -> None:
    texts = []
    plain, other, caps = pair(name)
    for model in (plain, other):
        layers, text = prefilled(model, caps, PROMPT), [6]
        for _ in range(LONG):
            text.append(int(step(model, [text[-1:]], layers)[0].argmax()))
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kv", ["16", "8/8"])
def test_rewinds_prefixes_gaps_and_packed_rows_are_met_as_before(kv: str, written: None) -> None:
    """Steps of several tokens, a rewind, a copied prefix and tokens that were left out lie between single ones."""
    plain, other, caps = pair("qwen3")
    form = EXACT if kv == "16" else KvFormat(8, 8, 32, 64)
    found: list[list[NDArray[np.float32]]] = []
    for model in (plain, other):
        layers, logits = prefilled(model, caps, PROMPT * 8, form), []
        logits.append(step(model, [[4]], layers))
        logits.append(step(model, [[4, 5, 6]], layers))
        layers.rewind(0, 2)
        logits.append(step(model, [[9]], layers))
        copy = layers.take(0)
        logits.append(step(model, [[8]], copy))
        copy.begin([1], [100])
        logits.append(np.array(model(mx.array([[8]]), cache=copy.caches)[:, -1]))
        copy.end()
        layers.join(copy)
        layers.begin([1, 1], [0, 50])
        logits.append(np.array(model(mx.array([[8], [2]]), cache=layers.caches)[:, -1]))
        layers.end()
        found.append(logits)
    for wanted, same in zip(*found, strict=True):
        np.testing.assert_allclose(same, wanted, atol=1e-5)


def test_nothing_is_traced_after_the_first_step_with_so_many_rows(written: None) -> None:
    _, model, caps = pair("qwen3")
    layers = prefilled(model, caps, PROMPT)
    step(model, [[1]], layers)
    for rows in (1, 2, 3):
        if rows > 1:
            layers.join(prefilled(model, caps, PROMPT[rows:]))
        step(model, [[1]] * rows, layers)
        before = Traces.count
        for number in range(300):  # beyond the end of a buffer
            step(model, [[number % 50]] * rows, layers)
        assert Traces.count == before
    assert Traces.count > 0


def test_weights_names_and_memory_stay_as_they_were() -> None:
    model, _ = built(FAMILIES["qwen3"])
    before = {name: a.shape for name, a in tree_flatten(model.parameters())}
    gc.collect()
    held = mx.get_active_memory()
    assert compile_steps(model, "metal", "on")
    gc.collect()
    assert {name: a.shape for name, a in tree_flatten(model.parameters())} == before
    assert mx.get_active_memory() - held < 64 * 1024  # no second copy of 4 layers, which have 200 KB


def test_a_model_that_is_let_go_leaves_no_memory() -> None:
    gc.collect()
    held = mx.get_active_memory()
    model, _ = built(FAMILIES["qwen3"])
    weights = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    assert compile_steps(model, "metal", "on")
    del model
    gc.collect()
    assert mx.get_active_memory() - held < weights // 4


@pytest.mark.parametrize("name", ["window", "sinks", "delta", "moe", "mla"])
def test_layers_of_another_kind_are_left_alone(name: str) -> None:
    model, _ = built(CONFIGS[name])
    kinds = [type(layer) for layer in model.layers]
    assert not compile_steps(model, "metal", "on")
    assert [type(layer) for layer in model.layers] == kinds


def test_one_layer_of_another_kind_does_not_hinder_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(nn.Linear):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return 2 * super().__call__(x)

    models = []
    for _ in range(2):
        model, caps = built(FAMILIES["llama"])
        model.layers[1].mlp.down_proj.__class__ = Doubled
        models.append(model)
    plain, other = models
    with caplog.at_level(logging.INFO, "treadle.models"):
        assert compile_steps(other, "metal", "on")
    assert exchanged(other) == 3
    assert "as they are: 1 (made of other parts)." in caplog.text
    wanted, found = (step(model, [[4]], prefilled(model, caps, PROMPT)) for model in (plain, other))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_layer_that_computes_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Plain.heads
    monkeypatch.setattr(Plain, "heads", lambda self, x, position, *rest: original(self, x, position + 1, *rest))
    model, _ = built(FAMILIES["llama"])
    with caplog.at_level(logging.INFO, "treadle.models"):
        assert not compile_steps(model, "metal", "on")
    assert exchanged(model) == 0


def test_what_fails_between_layers_is_found_out_by_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "layer_fault", lambda layer, blocks: None)
    original = Plain.gated
    monkeypatch.setattr(Plain, "gated", lambda self, x: 2 * original(self, x))
    model, _ = built(FAMILIES["llama"])
    assert not compile_steps(model, "metal", "on")
    assert exchanged(model) == 0
    assert "differ by" in caplog.text


@pytest.mark.parametrize(("seconds", "kept"), [({False: 2.0, True: 1.0}, True), ({False: 1.0, True: 2.0}, False)])
def test_auto_keeps_the_faster_way(
    seconds: dict[bool, float], kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = built(FAMILIES["llama"])
    monkeypatch.setattr(compiling, "turn", lambda forward, memory: seconds[exchanged(model) > 0])
    with caplog.at_level(logging.INFO, "treadle.models"):
        assert compile_steps(model, "metal", "auto") is kept
    assert exchanged(model) == (4 if kept else 0)
    assert "2000.00" in caplog.text and "1000.00" in caplog.text


def test_off_and_auto_on_a_cpu_leave_a_model_as_it_is() -> None:
    model, _ = built(FAMILIES["llama"])
    before = Traces.count
    assert not compile_steps(model, "cuda", "off")
    assert not compile_steps(model, "cpu", "auto")
    assert exchanged(model) == 0 and Traces.count == before


def test_caches_of_another_package_go_the_old_way() -> None:
    plain, other, _ = pair("llama")
    found: list[NDArray[np.float32]] = []
    before = Traces.count
    for model in (plain, other):
        cache = mlx_lm_module("models.cache").make_prompt_cache(model)
        model(mx.array([PROMPT]), cache=cache)
        found.append(np.array(model(mx.array([[5]]), cache=cache)))
    np.testing.assert_allclose(*found, atol=1e-5)
    assert Traces.count == before


def test_attention_that_is_exchanged_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, caps = pair("llama")
    layers = prefilled(model, caps, PROMPT)
    file = mlx_lm_module("models.llama")
    original, calls = file.scaled_dot_product_attention, []
    monkeypatch.setattr(
        file, "scaled_dot_product_attention", lambda *args, **more: (calls.append(more), original(*args, **more))[1]
    )
    step(model, [[4]], layers)
    assert len(calls) == 4
    assert len(layers_of(model)) == 4


def test_what_a_rotary_embedding_does_is_told_in_numbers_or_not_at_all() -> None:
    ropes = mlx_lm_module("models.rope_utils")
    base = turn_of(nn.RoPE(16, traditional=True, base=500.0, scale=0.5))
    assert base is not None
    assert (base.dims, base.traditional, base.base, base.scale, base.freqs) == (16, True, 500.0, 0.5, None)
    other = turn_of(ropes.initialize_rope(16, 10000.0, False, LLAMA3, 512))
    assert other is not None and other.base is None and other.freqs.shape == (8,)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert turn_of(ropes.initialize_rope(16, 10000.0, False, yarn, 512)) is None  # it scales what it turns, too
