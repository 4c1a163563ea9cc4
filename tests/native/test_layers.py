"""A model with our kernels says what it said without; what they are not written for stays as it is."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import tiny
from tests.fresh import run
from tests.models.builtin import builtin
from treadle.models.capabilities import describe, forward, new_layers
from treadle.models.rounding import distance, tolerance
from treadle.native import build, layers
from treadle.runtime import mlx_lm_module
from treadle.types import Batching

pytestmark = pytest.mark.skipif(build.kernels() is None, reason=f"no CPU kernels: {build.why_not()}")
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7]]
# Every product's inputs are whole groups of 64.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SAY = """
import json
from treadle import runtime
runtime.prepare()
import numpy as np
from treadle.bench.drive import loop_of, run
from treadle.bench.shapes import Subject
from treadle.engine.compiled import Forward
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.native import build
from treadle.types import Request, Sampling
loaded = load_model(resolve("smollm2"), None)
subject = Subject(loaded.name, loaded.model, loaded.caps, 0, Forward(loaded.model))
said = []
for text in ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a small"):
    ids = np.array(loaded.tokenizer.encode(text))
    line = run(loop_of(subject), [Request("x", ids, Sampling(temperature=0.0), 40)])["x"]
    said.append(loaded.tokenizer.decode(line.tokens))
print(json.dumps([build.kernels() is not None, said]))
"""


@pytest.fixture(autouse=True)
def functions_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `install` exchanges in model files goes back when a test ends."""
    for name in ("llama", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_moe", "granitemoehybrid"):
        file = mlx_lm_module(f"models.{name}")
        for function in ("scaled_dot_product_attention", "swiglu"):
            if function in vars(file):
                monkeypatch.setattr(file, function, vars(file)[function])


def with_kernels(model: Any) -> int:
    for file in {type(module).__module__ for module in model.modules()}:
        if layers.ATTENTION in vars(sys.modules[file]):  # other tests of the process may have put something before it
            vars(sys.modules[file])[layers.ATTENTION] = vars(mlx_lm_module("models.base"))[layers.ATTENTION]
    return layers.install(model)


def logits(model: Any, caps: Any, ids: list[list[int]]) -> Any:
    """Of a prompt row by row, joined, then of one more token and of three more in each row."""
    memory: Any = None
    found = []
    for row in ids:
        own = new_layers(model, caps)
        found.append(np.array(forward(model, [row], own))[0])
        if memory is None:
            memory = own
        elif caps.batching is Batching.RAGGED:
            memory.join(own)
    rows = memory.num_rows
    for step in ([[7]] * rows, [[11, 12, 13]] * rows):
        found += list(np.array(forward(model, step, memory)))
    return np.concatenate(found)


@pytest.mark.parametrize("name", [*tiny.GOOD])
def test_every_family_computes_what_it_computed(name: str) -> None:
    model, caps = tiny.built(tiny.CONFIGS[name])
    expected = logits(model, caps, IDS)
    assert with_kernels(model) > 0
    assert describe(model, tiny.VOCAB, 512).batching is caps.batching
    assert distance(expected, logits(model, caps, IDS)) <= tolerance(mx.float32)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 64), (2, 32)])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_traditional": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
    ],
    ids=["llama", "with biases", "qwen2", "qwen3"],
)
def test_packed_layers_of_the_usual_kind(config: dict[str, Any], bits: int, group: int) -> None:
    model, _ = tiny.built({**config, **WIDE})
    nn.quantize(model, group, bits)
    caps = describe(model, tiny.VOCAB, 512)
    expected = logits(model, caps, IDS)
    with_kernels(model)
    exchanged = [type(layer).__name__.startswith("Native") for layer in model.layers]
    assert all(exchanged)
    assert distance(expected, logits(model, caps, IDS)) <= tolerance(mx.float32)


def test_a_token_computes_the_same_bits_alone_and_among_others() -> None:
    """What is checked in one step is what single steps would have computed: so drafts change nothing."""
    model, _ = tiny.built({"model_type": "llama", **WIDE})
    nn.quantize(model, 32, 4)
    with_kernels(model)
    caps = describe(model, tiny.VOCAB, 512)
    ids = list(range(5, 45))

    def steps(sizes: list[int]) -> Any:
        memory, found, at = new_layers(model, caps), [], 0
        for size in sizes:
            found.append(np.array(forward(model, [ids[at : at + size]], memory))[0])
            at += size
        return np.concatenate(found)

    one_by_one = steps([1] * 12)
    assert np.array_equal(steps([1, 3, 2, 5, 1]), one_by_one)


def test_other_types_are_computed_as_before() -> None:
    model, _ = tiny.built({"model_type": "llama"})
    model.set_dtype(mx.bfloat16)
    caps = describe(model, tiny.VOCAB, 512)
    ids = mx.array(IDS[:1])
    expected = model(ids)
    with_kernels(model)
    assert model(ids).dtype == mx.bfloat16
    assert np.array_equal(np.array(model(ids).astype(mx.float32)), np.array(expected.astype(mx.float32)))
    assert caps.batching is describe(model, tiny.VOCAB, 512).batching


def test_weights_stay_where_they_are() -> None:
    from mlx.utils import tree_flatten

    model, _ = tiny.built({"model_type": "llama"})
    nn.quantize(model, 32, 4)
    before = {name: id(array) for name, array in tree_flatten(model.parameters())}
    with_kernels(model)
    assert {name: id(array) for name, array in tree_flatten(model.parameters())} == before


def test_the_built_in_model_says_the_same_with_and_without() -> None:
    builtin()
    there, said = run(SAY)
    without, expected = run(SAY, TREADLE_CPU_KERNELS="off")
    assert there and not without
    assert said == expected


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_codes_of_other_widths_become_wide_ones_of_the_same_value(
    bits: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "VALUES_AT_ONCE", 500)
    layer = kind(96, 96).to_quantized(32, bits)
    whole = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=bits)
    model = nn.Sequential(layer)
    assert layers.install(model) >= 1
    changed = model.layers[0]
    assert changed.bits == 8 and type(changed) in (layers.NativeQuantizedLinear, layers.NativeQuantizedEmbedding)
    again = mx.dequantize(changed.weight, changed.scales, changed.biases, group_size=32, bits=8)
    np.testing.assert_array_equal(np.array(again), np.array(whole))
