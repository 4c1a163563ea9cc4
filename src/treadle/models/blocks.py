"""Decoder layers that take a step of few tokens per row in few operations. Engine thread only.

Such a step is short on the device, and the host hands it over operation by operation. A layer of the usual kind, by its
model file, has some forty of them: besides its products there are transposes of weights, reshapes, slices, norms. Here
it has about fifteen, and ten for a single row on CUDA, where a product takes along what lies around it (`products.py`).
What lies between one attention and the next (the rest of a layer and the beginning of the next) is one compiled
function over [tokens, size], with weights as constants and positions as an array, so that it is traced once for a
number of rows and tokens and never again. The cache and attention are called as the model file calls them.

A layer gets another `__call__`; weights, names and everything else stay. It does what it always did with more tokens,
and with caches that are not ours. Between two layers a `Passed` stands for the hidden state: so only model files are
taken that hand it from layer to layer untouched (`FAMILIES`), and only layers that compute the same (`compile.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.cache.layers import Rows
from treadle.models.attention import NAME
from treadle.models.fuse import stack_of
from treadle.models.kernels import Heads, Plain, Turn
from treadle.models.linear import FlatQuantizedLinear
from treadle.models.products import most_rows, product, takes

FAMILIES = tuple(f"mlx_lm.models.{name}" for name in ("llama", "qwen2", "qwen3", "mimo", "seed_oss", "ernie4_5"))
LAYERS = ("TransformerBlock", "DecoderLayer")
FREQS = ("Llama3RoPE", "YarnRoPE", "ProportionalRoPE")  # rotary embeddings of mlx-lm that are nothing but frequencies
SINGLE = "Single"
MOST_TOKENS = 16  # of a row


class Traces:
    """How many functions were traced so far in this process: each costs about a millisecond, once."""

    count = 0


@dataclass(frozen=True, slots=True)
class Alone:
    """The linear layers for a single row, whose kernels take along norms, gates and sums."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer computes before and behind attention, for few tokens per row."""

    pieces: Plain
    heads: Heads
    eps: float
    before: Any  # weights [size] of the norms
    behind: Any
    qkv: Callable[[Any], Any]
    out: Callable[[Any], Any]
    opened: Callable[[Any], Any]  # what the gates let through
    down: Callable[[Any], Any]
    alone: Alone | None

    def asked(self, stacked: Any, position: Any, tokens: int) -> tuple[Any, Any, Any]:
        """Queries, keys and values from their product; `position` int32 [rows] of the first token of each row."""
        return self.pieces.heads(stacked, position, tokens // position.shape[0], self.heads)

    def single(self, stream: Any) -> Alone | None:
        """The layers for this hidden state, if it is one row of the type that their kernels read."""
        return self.alone if stream.shape[0] == 1 and stream.dtype == self.before.dtype else None

    def stacked(self, stream: Any) -> Any:
        """Queries, keys and values side by side, for a hidden state [tokens, size]."""
        if (alone := self.single(stream)) is not None:
            return product(alone.qkv, stream, self.before, self.eps)
        return self.qkv(mx.fast.rms_norm(stream, self.before, self.eps))

    def rest(self, stream: Any, attended: Any) -> tuple[Any, Any]:
        """The hidden state [tokens, size] without what the MLP adds, and that."""
        found = attended if attended.shape[2] == 1 else attended.swapaxes(1, 2)
        added = self.out(found.reshape(stream.shape[0], -1))
        stream, normed = self.pieces.add_norm(stream, added, self.behind, self.eps)
        return stream, self.down(self.opened(normed))

    def finished(self, stream: Any, attended: Any) -> Any:
        """The hidden state [tokens, size] behind the layer."""
        if (alone := self.single(stream)) is None:
            stream, added = self.rest(stream, attended)
            return stream + added
        stream = product(alone.out, attended, added=stream)
        opened = product(alone.gate_up, stream, self.behind, self.eps, gated=True)
        return product(alone.down, opened, added=stream)


def _compiled(first: Parts | None, second: Parts | None, whole: bool = True) -> Any:
    """From attention of the `first` layer to attention of the `second`; None: there is no such layer.

    The arguments are (hidden state, what attention found, positions), the hidden state [rows, n, size] at the outer
    ends and [tokens, size] between layers; what is not there is left out. Not `whole`: to the product of the `second`,
    from which a kernel makes queries, keys and values.
    """

    def asked(stacked: Any, position: Any, tokens: int) -> tuple[Any, ...]:
        assert second is not None
        return second.asked(stacked, position, tokens) if whole else (stacked,)

    def enter(x: Any, position: Any) -> tuple[Any, ...]:
        Traces.count += 1
        assert second is not None
        stream = x.reshape(-1, x.shape[2])
        return stream, *asked(second.stacked(stream), position, stream.shape[0])

    def leave(stream: Any, attended: Any) -> Any:
        Traces.count += 1
        assert first is not None
        return first.finished(stream, attended).reshape(attended.shape[0], -1, stream.shape[1])

    def cross(stream: Any, attended: Any, position: Any) -> tuple[Any, ...]:
        Traces.count += 1
        assert first is not None and second is not None
        if first.single(stream) is not None and second.single(stream) is not None:
            stream = first.finished(stream, attended)
            return stream, *asked(second.stacked(stream), position, 1)
        stream, added = first.rest(stream, attended)
        stream, normed = first.pieces.add_norm(stream, added, second.before, second.eps)
        return stream, *asked(second.qkv(normed), position, stream.shape[0])

    if first is None:
        return mx.compile(enter)
    return mx.compile(leave) if second is None else mx.compile(cross)


class Passed:
    """The hidden state between two layers of ours, [rows, n, size], not computed to its end yet."""

    __slots__ = ("attended", "layer", "stream")

    def __init__(self, stream: Any, attended: Any, layer: Step) -> None:
        self.stream = stream
        self.attended = attended
        self.layer = layer

    def array(self) -> Any:
        return self.layer.leave(self.stream, self.attended)


class Step:
    """How one layer takes a step of few tokens per row."""

    def __init__(self, parts: Parts, before: Parts | None, last: bool, attention: Any) -> None:
        """`before`: of the layer in front, if that is one of ours. `last`: no layer of ours follows."""
        self.parts = parts
        self.last = last
        self.scale = attention.scale
        self.write = parts.pieces.writer(parts.heads, parts.before.dtype)
        wholes = (True,) if self.write is None else (True, False)
        self.enter = {whole: _compiled(None, parts, whole) for whole in wholes}
        self.cross = {whole: _compiled(before, parts, whole) for whole in wholes if before is not None}
        self.leave = _compiled(parts, None)
        self.file = vars(sys.modules[type(attention).__module__])  # where attention may be exchanged at any time

    def take(self, x: Any, starts: Any, mask: Any, cache: Rows) -> Any:
        passed = type(x) is Passed
        dtype = x.stream.dtype if passed else x.dtype
        held = None if self.write is None or dtype != self.parts.before.dtype else cache.in_place(dtype)
        whole = held is None
        stream, *found = self.cross[whole](x.stream, x.attended, starts) if passed else self.enter[whole](x, starts)
        if held is None:
            queries, *rows = found
            keys, values = cache.update_and_fetch(*rows)
        else:
            queries = self.write(found[0], starts, *held)  # type: ignore[misc]
            keys, values = cache.written()
        attended = self.file[NAME](queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.leave(stream, attended) if self.last else Passed(stream, attended, self)


@lru_cache(maxsize=16)
def _single(kind: Any) -> Any:
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        passed = type(x) is Passed
        if isinstance(cache, Rows) and (passed or x.shape[1] <= MOST_TOKENS):
            starts = cache.columns.starts
            if starts is not None:
                return self.step.take(x, starts, mask, cache)
        return kind.__call__(self, x.array() if passed else x, mask, cache)

    return type(SINGLE + kind.__name__, (kind,), {"__call__": call})


class Blocks:
    """The layers of a model for which there is a `Step`; `use` says which way they go."""

    def __init__(self, layers: Sequence[Any], steps: Sequence[Step]) -> None:
        self._kinds: list[tuple[Any, Any, Step]] = [
            (layer, type(layer), step) for layer, step in zip(layers, steps, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._kinds)

    def use(self, wanted: bool) -> None:
        for layer, kind, step in self._kinds:
            if wanted:
                layer.step = step
            layer.__class__ = _single(kind) if wanted else kind


def steps_of(layers: Sequence[Any], parts: Sequence[Parts | None]) -> Blocks:
    """The layers of which the parts are known, none exchanged yet."""
    chosen, steps = [], []
    for i, (layer, own) in enumerate(zip(layers, parts, strict=True)):
        if own is not None:
            last = i + 1 == len(layers) or parts[i + 1] is None
            chosen.append(layer)
            steps.append(Step(own, parts[i - 1] if i else None, last, layer.self_attn))
    return Blocks(chosen, steps)


def layers_of(model: Any) -> list[Any]:
    """The decoder layers of a model whose file is known to hand the hidden state from one to the next as it is."""
    inner: Any = getattr(model, "model", None)
    return list(inner.layers) if type(inner).__module__ in FAMILIES else []


def parts_of(layer: Any, pieces: Callable[[Heads, int, int, Any], Plain]) -> Parts | None:
    """None for a layer that is made of other things than those known here.

    `pieces` for the heads, the size of the hidden state, the width of the MLP and the type of the norms.
    """
    if type(layer).__module__ not in FAMILIES or type(layer).__name__ not in LAYERS:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    members = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]
    qkv, out, gate_up, down = (_product(group) for group in members)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    heads = _heads(attention, _outputs(members[0]))
    if heads is None or any(type(norm) is not nn.RMSNorm for norm in norms) or norms[0].eps != norms[1].eps:
        return None
    before, behind = (norm.weight for norm in norms)
    made = pieces(heads, before.shape[0], _outputs(members[2]) // 2, before.dtype)
    opened = _opened(members[2], gate_up, made)
    return Parts(made, heads, norms[0].eps, before, behind, qkv, out, opened, down, _alone(members, norms))


def _opened(members: Sequence[Any], gate_up: Callable[[Any], Any], pieces: Plain) -> Callable[[Any], Any]:
    """[rows, inputs] to what the gates let through."""
    single, *others = _singles(members)
    most = 0 if others else most_rows(single, gated=True)
    return lambda x: product(single, x, gated=True) if takes(single, x, most) else pieces.gated(gate_up(x))


def _alone(members: Sequence[Sequence[Any]], norms: Sequence[Any]) -> Alone | None:
    """None where the kernels do not know all of the layers."""
    groups = [_singles(group) for group in members]
    if any(len(group) > 1 for group in groups):
        return None
    qkv, out, gate_up, down = (group[0] for group in groups)
    known = most_rows(qkv, norm=True) and most_rows(out, add=True) and most_rows(gate_up, norm=True, gated=True)
    types = [layer.get("scales", layer.weight).dtype for layer in (qkv, out, gate_up, down)]
    alike = all(kind == norms[0].weight.dtype for kind in (*types, norms[1].weight.dtype))
    return Alone(qkv, out, gate_up, down) if known and most_rows(down, add=True) and alike else None


def _singles(members: Sequence[Any]) -> list[Any]:
    """The layers that compute the products of `members`: one, where they are stacked."""
    stacked = stack_of(members)
    return list(members) if stacked is None else [stacked]


def _outputs(members: Sequence[Any]) -> int:
    return sum(layer.weight.shape[0] for layer in _singles(members))


def _product(members: Sequence[Any]) -> Callable[[Any], Any] | None:
    """[rows, inputs] to the outputs of all members side by side; None where one does more than a product."""
    products = [_single_product(layer) for layer in _singles(members)]
    if None in products:
        return None
    if len(products) == 1:
        return products[0]
    return lambda x: mx.concatenate([product(x) for product in products if product is not None], axis=-1)


def _single_product(layer: Any) -> Callable[[Any], Any] | None:
    if type(layer) is FlatQuantizedLinear:
        return layer
    if type(layer) is not nn.Linear:
        return None
    turned, bias = layer.weight.T, layer.get("bias")
    mx.eval(turned)  # a view; a product with it is one operation
    most = most_rows(layer)

    def many(x: Any) -> Any:
        if takes(layer, x, most):
            return product(layer, x)
        return x @ turned if bias is None else mx.addmm(bias, x, turned)

    return many


def _heads(attention: Any, outputs: int) -> Heads | None:
    """None for attention that does more than norm its heads and turn them."""
    num_heads, shared = attention.n_heads, attention.n_kv_heads
    dim = outputs // (num_heads + 2 * shared)
    norms = [attention.get(name) for name in ("q_norm", "k_norm")]
    turn = turn_of(attention.rope)
    if norms == [None, None]:
        return Heads(num_heads, shared, dim, attention.rope, turn)
    if (
        any(type(norm) is not nn.RMSNorm or norm.weight.shape != (dim,) for norm in norms)
        or norms[0].eps != norms[1].eps
    ):
        return None
    return Heads(num_heads, shared, dim, attention.rope, turn, norms[0].weight, norms[1].weight, norms[0].eps)


def turn_of(rope: Any) -> Turn | None:
    """What a rotary embedding does, in numbers; None where these do not say all."""
    if type(rope) is nn.RoPE:
        return Turn(rope.dims, rope.traditional, float(rope.scale), float(rope.base))
    if type(rope).__name__ in FREQS and getattr(rope, "mscale", 1.0) == 1.0:
        return Turn(rope.dims, rope.traditional, 1.0, None, rope["_freqs"])
    return None
