"""Projections that read the same input, computed as one product. Engine thread only.

Launching a product costs CUDA more than a small one takes; q, k and v (and gate and up) of a layer read the same input,
so their weights are stacked and multiplied once. The model file still calls each projection: the first call computes
for all, the others take their part. They must be called with the same array object, or each computes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
STACKED = ("weight", "scales", "biases", "bias")


class Stack:
    """What the stacked layer of `owner` (the first part) made of the last input, until every part was taken."""

    def __init__(self, owner: Part, sizes: Sequence[int]) -> None:
        self.owner = owner
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._input: Any = None
        self._output: Any = None
        self._left = 0

    def part(self, index: int, x: Any) -> Any:
        if x is not self._input:
            self._input, self._output, self._left = x, self.owner.stacked(x), len(self.slices)
        made = self._output[..., self.slices[index]]
        self._left -= 1
        if self._left == 0:
            self._input = self._output = None
        return made


class Part(nn.Module):  # type: ignore[misc]
    """One projection of a stack. The first part owns the stacked layer, which others may replace."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def join(self, stack: Stack) -> None:
        object.__setattr__(self, "_stack", stack)  # not a child module

    def __call__(self, x: Any) -> Any:
        return self._stack.part(self._index, x)


def fuse_projections(model: Any) -> int:
    """Stack sibling projections of `model` in place. Returns how many stacks there are."""
    count = 0
    for module in model.modules():
        for names in SIBLINGS:
            members = [module.get(name) for name in names]
            if all(m is not None for m in members) and _alike(members):
                parts = [Part(index) for index in range(len(names))]
                parts[0].stacked = _stacked(members)
                stack = Stack(parts[0], [m.weight.shape[0] for m in members])
                for name, part in zip(names, parts, strict=True):
                    part.join(stack)
                    module[name] = part
                count += 1
    return count


def _alike(members: Sequence[Any]) -> bool:
    """Whether layers differ in nothing but their number of outputs."""
    first = members[0]
    if type(first) not in (nn.Linear, nn.QuantizedLinear):
        return False
    settings = [
        (
            type(m),
            *(getattr(m, key, None) for key in ("group_size", "bits", "mode")),
            *((key in m, m[key].dtype if key in m else None) for key in STACKED),
            m.weight.shape[1:],
        )
        for m in members
    ]
    return all(s == settings[0] for s in settings)


def _stacked(members: Sequence[Any]) -> Any:
    """A layer of the same type over all outputs; evaluated, so that the single weights can go."""
    first = members[0]
    kind: Any = type(first)
    new = kind.__new__(kind)
    new.__dict__.update(first.__dict__)
    for key in STACKED:
        if key in first:
            dict.__setitem__(new, key, mx.concatenate([m[key] for m in members]))
    mx.eval([new[key] for key in STACKED if key in new])
    return new
