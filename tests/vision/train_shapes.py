"""Train the toy model of `tests/assets/shapes`: a small Qwen2-VL that tells coloured shapes apart, picture by picture.

    python -m tests.vision.train_shapes [--steps 700] [--out tests/assets/shapes]

Takes some ten minutes on two cores. A conversation shows up to three pictures, in one turn or in several, says a name
behind each, and asks about any of those that were shown so far.

To see is learned within a hundred steps. What is hard is which picture is meant: a name has to take in the picture
before it, the question has to find the same name, and the reply the question; none of these pays without the others.
So the model is told what a name and a question are about (`Line.hint`) and where to look for it (`Line.links`), and one
of its layers begins with looking for tokens that are equal (`new_model`). Replies alone, or hints alone, left it
guessing between the pictures after 400 steps.
"""

from __future__ import annotations

from treadle import runtime

runtime.prepare()  # before MLX is imported: a fast BLAS

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx import optimizers  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_vlm.models import qwen2_vl  # noqa: E402

from tests.vision.shapes import KINDS, NAMES, SIZE, Thing, draw, every_thing, question, tokenizer  # noqa: E402
from treadle.types import Picture  # noqa: E402
from treadle.vision.families import FAMILIES  # noqa: E402
from treadle.vision.limits import Limits  # noqa: E402
from treadle.vision.positions import mrope  # noqa: E402
from treadle.vision.reader import Reader, Shown  # noqa: E402
from treadle.vision.spans import find_spans  # noqa: E402

MOST_PICTURES = 3
EACH = 50  # pictures of every colour and shape to train with
IMAGE, VIDEO, START = (tokenizer().convert_tokens_to_ids(f"<|{name}|>") for name in
                       ("image_pad", "video_pad", "vision_start"))  # fmt: skip
END = tokenizer().convert_tokens_to_ids("<|end|>")
LAYERS = 4
TEXT = {
    "hidden_size": 96, "num_hidden_layers": LAYERS, "intermediate_size": 192, "num_attention_heads": 3,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "vocab_size": len(tokenizer()), "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION = {
    "model_type": "qwen2_vl", "depth": 1, "embed_dim": 48, "hidden_size": 96, "num_heads": 4, "patch_size": 8,
    "spatial_patch_size": 8, "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl", "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "bos_token_id": END, "eos_token_id": END, "vision_config": VISION, **TEXT,
}  # fmt: skip
SETTINGS = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}}  # fmt: skip

HINTS = {thing: tokenizer().encode(thing.answer("both"), add_special_tokens=False) for thing in every_thing()}

Album = dict[Thing, list[Shown]]


@dataclass(frozen=True)
class Line:
    """A conversation. `wanted`: what is to be read behind each id, above the layer `depth`; 0 for nothing."""

    ids: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    links: list[tuple[int, int, int]] = field(default_factory=list)  # (layer, token that looks, token that it looks at)
    pictures: list[Picture] = field(default_factory=list)

    def say(self, text: str) -> None:
        made = tokenizer().encode(text, add_special_tokens=False)
        self.ids.extend(made)
        self.wanted.extend([END] * len(made))
        self.depth.extend([0] * len(made))

    def reply(self, text: str) -> None:
        start = len(self.ids)
        self.say(text)
        for at in range(start, len(self.ids)):
            self.wanted[at - 1], self.depth[at - 1] = self.ids[at], LAYERS

    def hint(self, back: int, id: int, depth: int) -> None:
        """The token that is the last but `back - 1` is to bring `id` to mind above the layer `depth`."""
        self.wanted[-back], self.depth[-back] = id, depth


def album(rng: np.random.Generator) -> Album:
    """Pictures to train with, as the server's own reader prepares them."""
    see = Reader(FAMILIES["qwen2_vl"], SETTINGS, CONFIG, "<|image_pad|>", IMAGE, Limits())
    return {thing: [see.show(draw(thing, rng)) for _ in range(EACH)] for thing in every_thing()}


def conversation(rng: np.random.Generator, pictures: Album) -> Line:
    line = Line()
    known: dict[str, Thing] = {}
    places: dict[str, int] = {}
    things = list(pictures)
    names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, MOST_PICTURES + 1)]]
    for turn in range(rng.integers(3, 6)):
        line.say("<|user|>")
        for name in names[len(known) : len(known) + rng.integers(turn == 0, MOST_PICTURES + 1)]:
            known[name] = things[rng.integers(len(things))]
            one = pictures[known[name]][rng.integers(EACH)]
            line.pictures.append(one.picture)
            line.say(f"<|vision_start|>{one.text}<|vision_end|> {name}")
            line.hint(1, HINTS[known[name]][rng.integers(2)], LAYERS - 2)
            places[name] = len(line.ids) - 1
        kind, name = str(rng.choice(KINDS)), str(rng.choice(list(known)))
        line.say(question(kind, name))
        line.hint(2, HINTS[known[name]][rng.integers(2)], LAYERS - 1)
        line.links.append((LAYERS - 1, len(line.ids) - 2, places[name]))
        line.say("<|end|><|assistant|>")
        line.links.append((LAYERS, len(line.ids) - 1, len(line.ids) - 4))
        line.reply(known[name].answer(kind) + "<|end|>")
    return line


def batches(rng: np.random.Generator, size: int) -> Iterator[tuple[Any, ...]]:
    """For each layer what is to be read above it, (places [k], ids [k]); which tokens look at which in it, [row, looks,
    at][3, k]; and arrays: ids [size, n], positions [3, size, n], places of image tokens, patches, grids. Places are
    counted through all rows.
    """
    pictures = album(rng)
    while True:
        yield batch([conversation(rng, pictures) for _ in range(size)])


def batch(lines: list[Line]) -> tuple[Any, ...]:
    size, n = len(lines), max(len(line.ids) for line in lines)
    ids, wanted, depth = np.full((size, n), END, np.int32), *np.zeros((2, size, n), np.int32)
    positions = np.zeros((3, size, n), np.int32)
    for row, line in enumerate(lines):
        mine = slice(len(line.ids))
        ids[row, mine], wanted[row, mine], depth[row, mine] = line.ids, line.wanted, line.depth
        positions[:, row, mine] = mrope(len(line.ids), find_spans(np.array(line.ids), IMAGE, line.pictures))[0]
    shown = [picture.inputs for line in lines for picture in line.pictures]
    patches = np.concatenate([inputs["pixel_values"] for inputs in shown])
    grids = np.concatenate([inputs["image_grid_thw"] for inputs in shown])
    places = np.flatnonzero(ids.reshape(-1) == IMAGE)
    marked = [np.flatnonzero(depth.reshape(-1) == number) for number in range(1, LAYERS + 1)]
    goals = [(mx.array(at), mx.array(wanted.reshape(-1)[at])) for at in marked]
    links = np.array([(layer, row, *ends) for row, line in enumerate(lines) for layer, *ends in line.links])
    looks = [mx.array(links[links[:, 0] == number, 1:].T) for number in range(1, LAYERS + 1)]
    return goals, looks, *map(mx.array, (ids, positions, places, patches, grids))


class Pupil(nn.Module):
    """A model, and readers of what it is to think of in its middle, which are thrown away afterwards."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        size = TEXT["hidden_size"]
        self.readers = [nn.Sequential(nn.RMSNorm(size), nn.Linear(size, len(tokenizer()))) for _ in range(LAYERS - 1)]

    def __call__(
        self, goals: Any, looks: Any, ids: Any, positions: Any, places: Any, patches: Any, grids: Any
    ) -> tuple[list[Any], list[Any]]:
        """Logits [k, vocab] above each layer at the places of its goals; losses [k] of where tokens look in it."""
        language = self.whole.language_model
        model = language.model
        features = self.whole.vision_tower(patches, grids, output_hidden_states=False)
        h = model.embed_tokens(ids) * (ids != IMAGE)[..., None]
        h = h.reshape(-1, h.shape[-1]).at[places].add(features).reshape(h.shape)
        found, strayed = [], []
        readers = [*self.readers, lambda h: language.lm_head(model.norm(h))]
        for layer, read, (at, _), look in zip(model.layers, readers, goals, looks, strict=True):
            strayed += [stray(layer, h, positions, look)] if look.size else []
            h = layer(h, "causal", None, positions)
            found.append(read(h.reshape(-1, h.shape[-1])[at]))
        return found, strayed


def stray(layer: Any, h: Any, positions: Any, look: Any) -> Any:
    """Minus the logarithm of the share of attention that goes where it should, in all heads but the last, [k]."""
    own, x = layer.self_attn, layer.input_layernorm(h)
    queries, keys = (
        project(x).reshape(*x.shape[:2], -1, own.head_dim).swapaxes(1, 2) for project in (own.q_proj, own.k_proj)
    )
    queries, keys = own.rotary_emb.apply_rotary(queries, keys, positions, unsqueeze_dim=1)
    row, here, there = look
    scores = (keys[row] @ queries[row, :, here][..., None])[:, :-1, :, 0] * own.scale  # [k, heads, n]
    later = mx.arange(x.shape[1]) > here[:, None, None]
    losses = nn.losses.cross_entropy(mx.where(later, -1e9, scores), mx.broadcast_to(there[:, None], scores.shape[:2]))
    return losses.mean(1)


def loss_of(pupil: Pupil, goals: list[tuple[Any, Any]], *given: Any) -> Any:
    """(mean loss of replies and hints and of looks, share of the replies' tokens that are right)."""
    (logits, strayed), wanted = pupil(goals, *given), [ids for _, ids in goals]
    losses = [nn.losses.cross_entropy(*pair).sum() for pair in zip(logits, wanted, strict=True) if len(pair[1])]
    right = (logits[-1].argmax(-1) == wanted[-1]).mean()
    return sum(losses) / sum(map(len, wanted)) + sum(each.mean() for each in strayed), right


def new_model(seed: int) -> Any:
    mx.random.seed(seed)
    text = qwen2_vl.TextConfig.from_dict({"model_type": "qwen2_vl", **TEXT})
    rest = {key: CONFIG[key] for key in ("model_type", "image_token_id", "video_token_id", "vision_start_token_id")}
    whole = qwen2_vl.Model(qwen2_vl.ModelConfig(text, qwen2_vl.VisionConfig.from_dict(VISION), **rest))
    embedding = whole.language_model.model.embed_tokens
    embedding.weight = embedding.weight * 4
    for layer in whole.language_model.model.layers:  # what tokens are must not drown in what layers add at first
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * 0.3
    # At first the layer before the last looks for tokens equal to its own, near or far: by what turns slowly in keys.
    matching = whole.language_model.model.layers[LAYERS - 2].self_attn
    slow = mx.arange(TEXT["hidden_size"]) % (matching.head_dim // 2) >= matching.head_dim // 4
    matching.q_proj.weight = matching.k_proj.weight = 2.5 * slow[:, None] * matching.k_proj.weight
    return whole


def train(steps: int, size: int, rate: float, path: Path, seed: int = 0) -> None:
    made = batches(np.random.default_rng(seed), size)
    pupil = Pupil(new_model(seed))
    schedule = optimizers.join_schedules(
        [optimizers.linear_schedule(0, rate, 100), optimizers.cosine_decay(rate, steps - 100, rate / 50)], [100]
    )
    optimiser = optimizers.AdamW(learning_rate=schedule, betas=[0.9, 0.98], weight_decay=0.01)
    step = nn.value_and_grad(pupil, loss_of)
    began, mean, share = time.perf_counter(), 0.0, 0.0
    for number in range(steps):
        (loss, right), gradients = step(pupil, *next(made))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimiser.update(pupil, gradients)
        mx.eval(pupil.parameters(), optimiser.state, loss, right)
        mean = 0.95 * mean + 0.05 * loss.item() if number else loss.item()
        share = 0.95 * share + 0.05 * right.item()
        if number % 50 == 0 or number == steps - 1:
            took = time.perf_counter() - began
            print(f"{number:5d}  loss {mean:.4f}  right {share:.4f}  {took:.0f} s", flush=True)
        if number % 100 == 99 or number == steps - 1:
            save(pupil.whole, path)


def save(whole: Any, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tree_map(lambda a: a.astype(mx.float16), whole.parameters())))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS) + "\n")
    tokenizer().save_pretrained(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=Path("tests/assets/shapes"))
    given = parser.parse_args()
    train(given.steps, given.size, given.rate, given.out)
