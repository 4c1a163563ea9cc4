"""Projections that read the same input, computed as one product for several rows. Engine thread only.

A product on CUDA takes about the same time whether it has 1,024 outputs or 6,144: launching it costs as much as a
narrow one computes. So the weights of q, k and v (and of gate and up) are stacked. The model file still
calls each projection: the first call computes for all, the others take their part. Quantised ones without a kernel for
few rows multiply these each by its own share of the stacked weights, which is faster there. No weight is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.models.linear import FlatQuantizedLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
STACKED = ("weight", "scales", "biases", "bias")
LEAST_ROWS = {nn.Linear: 1, nn.QuantizedLinear: 8}  # from how many rows on the stacked product is the faster one


class Part(nn.Module):  # type: ignore[misc]
    """One projection of a stack, `outputs` of it. The first part owns the stacked layer, which others may replace.

    The parts of a stack must be called with the same array object to share a product; otherwise each makes its own.
    """

    def __init__(self, stack: Stack, single: Any, outputs: slice) -> None:
        super().__init__()
        # Not child modules: the stacked weights count once, at their owner.
        object.__setattr__(self, "_stack", stack)
        object.__setattr__(self, "_single", single)
        object.__setattr__(self, "_outputs", outputs)
        object.__setattr__(self, "_least", _least_rows(single))

    @property
    def siblings(self) -> list[Part]:
        """All parts of the stack, in the order of their outputs."""
        members: list[Part] = self._stack.members
        return members

    def __call__(self, x: Any) -> Any:
        if x.size // x.shape[-1] < self._least:
            return self._single(x)
        return self._stack.product(x)[..., self._outputs]


class Stack:
    """The last product of a stacked layer, kept until each of its parts was taken."""

    def __init__(self) -> None:
        self.members: list[Part] = []
        self._input: Any = None
        self._output: Any = None
        self._left = 0

    def product(self, x: Any) -> Any:
        if x is not self._input:
            self._input, self._output, self._left = x, self.members[0].stacked(x), len(self.members)
        made = self._output
        self._left -= 1
        if self._left == 0:
            self._input = self._output = None
        return made


def fuse_projections(model: Any) -> int:
    """Stack sibling projections of `model` in place. Returns how many stacks there are."""
    count = 0
    for module in model.modules():
        for names in SIBLINGS:
            members = [module.get(name) for name in names]
            if all(m is not None for m in members) and _alike(members):
                for name, part in zip(names, _parts(members), strict=True):
                    module[name] = part
                count += 1
    return count


def stack_of(members: Sequence[Any]) -> Any:
    """The stacked layer whose parts, all of them and in this order, are `members`; None where they are not."""
    if not all(isinstance(member, Part) for member in members):
        return None
    parts = members[0].siblings
    whole = len(parts) == len(members) and all(a is b for a, b in zip(parts, members, strict=True))
    return parts[0].stacked if whole else None


def _parts(members: Sequence[Any]) -> list[Part]:
    stacked = _like(
        members[0], {key: mx.concatenate([m[key] for m in members]) for key in STACKED if key in members[0]}
    )
    stack, start = Stack(), 0
    for member in members:
        outputs = slice(start, start := start + member.weight.shape[0])
        single = _like(member, {key: stacked[key][outputs] for key in STACKED if key in member})
        stack.members.append(Part(stack, single, outputs))
    stack.members[0].stacked = stacked
    return stack.members


def _alike(members: Sequence[Any]) -> bool:
    """Whether layers differ in nothing but their number of outputs."""
    if _least_rows(members[0]) is None:
        return False
    settings = [
        (
            type(m),
            *(getattr(m, key, None) for key in ("group_size", "bits", "mode", "pad")),
            *((key in m, m[key].dtype if key in m else None) for key in STACKED),
            m.weight.shape[1:],
        )
        for m in members
    ]
    return all(s == settings[0] for s in settings)


def _least_rows(layer: Any) -> int | None:
    """None for a layer of another kind, which may do more than a product."""
    if type(layer) is FlatQuantizedLinear:
        return 1 if layer.most else LEAST_ROWS[nn.QuantizedLinear]
    return LEAST_ROWS.get(type(layer))


def _like(layer: Any, arrays: dict[str, Any]) -> Any:
    """A layer of the same kind with other arrays; evaluated, so that the old ones can go and slices share memory."""
    kind: Any = type(layer)
    new = kind.__new__(kind)
    new.__dict__.update(layer.__dict__)
    for key, array in arrays.items():
        dict.__setitem__(new, key, array)
    mx.eval(list(arrays.values()))
    return new
