"""Train the toy model of `tests/assets/shapes`: a Qwen2-VL of some 300,000 parameters that tells coloured shapes apart.

    python -m tests.vision.train_shapes [--steps 1000] [--out tests/assets/shapes]

Takes minutes on two cores. A conversation has one picture and a few questions about it.
"""

from __future__ import annotations

from treadle import runtime

runtime.prepare()  # before MLX is imported: a fast BLAS

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx import optimizers  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_vlm.models import qwen2_vl  # noqa: E402

from tests.vision.shapes import QUESTIONS, any_thing, draw, tokenizer  # noqa: E402
from treadle.types import Picture  # noqa: E402
from treadle.vision.families import FAMILIES  # noqa: E402
from treadle.vision.limits import Limits  # noqa: E402
from treadle.vision.positions import mrope  # noqa: E402
from treadle.vision.reader import Reader  # noqa: E402
from treadle.vision.spans import find_spans  # noqa: E402

IMAGE, VIDEO, START = (tokenizer().convert_tokens_to_ids(f"<|{name}|>") for name in
                       ("image_pad", "video_pad", "vision_start"))  # fmt: skip
END = tokenizer().convert_tokens_to_ids("<|end|>")
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": len(tokenizer()), "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
}  # fmt: skip
VISION = {
    "model_type": "qwen2_vl", "depth": 2, "embed_dim": 48, "hidden_size": 64, "num_heads": 4, "patch_size": 4,
    "spatial_patch_size": 4, "mlp_ratio": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_vl", "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "bos_token_id": END, "eos_token_id": END, "vision_config": VISION, **TEXT,
}  # fmt: skip
SETTINGS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32}}  # fmt: skip


def reader() -> Reader:
    return Reader(FAMILIES["qwen2_vl"], SETTINGS, CONFIG, "<|image_pad|>", IMAGE, Limits())


def conversation(rng: np.random.Generator, see: Reader) -> tuple[list[int], list[bool], list[Picture]]:
    """Ids, which of them the model is to predict, and the picture."""
    ids: list[int] = []
    asked: list[bool] = []
    thing = any_thing(rng)
    shown = see.show(draw(thing, rng))

    def say(text: str, learn: bool = False) -> None:
        made = tokenizer().encode(text, add_special_tokens=False)
        ids.extend(made)
        asked.extend([learn] * len(made))

    say(f"<|user|><|vision_start|>{shown.text}<|vision_end|>")
    for turn in range(rng.integers(1, 5)):
        question = str(rng.choice(list(QUESTIONS)))
        say(("<|user|>" if turn else "") + QUESTIONS[question] + "<|end|><|assistant|>")
        say(thing.answer(question) + "<|end|>", learn=True)
    return ids, asked, [shown.picture]


def batch(rng: np.random.Generator, see: Reader, size: int) -> tuple[Any, ...]:
    """Arrays of a batch: ids, positions [3, size, n], targets, weights, places of image tokens, patches, grids."""
    made = [conversation(rng, see) for _ in range(size)]
    n = max(len(ids) for ids, _, _ in made)
    ids, weights = np.full((size, n), END, np.int32), np.zeros((size, n), np.float32)
    positions = np.zeros((3, size, n), np.int32)
    for row, (line, asked, pictures) in enumerate(made):
        ids[row, : len(line)] = line
        weights[row, : len(line)] = asked
        spans = find_spans(np.array(line), IMAGE, pictures)
        positions[:, row, : len(line)] = mrope(len(line), spans)[0]
    shown = [picture.inputs for _, _, pictures in made for picture in pictures]
    patches = np.concatenate([inputs["pixel_values"] for inputs in shown])
    grids = np.concatenate([inputs["image_grid_thw"] for inputs in shown])
    places = np.flatnonzero(ids[:, :-1].reshape(-1) == IMAGE)  # no picture is the last token of a row
    return tuple(map(mx.array, (ids[:, :-1], positions[..., :-1], ids[:, 1:], weights[:, 1:], places, patches, grids)))


def loss_of(
    whole: Any, ids: Any, positions: Any, targets: Any, weights: Any, places: Any, patches: Any, grids: Any
) -> Any:
    language = whole.language_model
    features = whole.vision_tower(patches, grids, output_hidden_states=False)
    rows = language.model.embed_tokens(ids) * (ids != IMAGE)[..., None]
    rows = rows.reshape(-1, rows.shape[-1]).at[places].add(features).reshape(rows.shape)
    hidden = language.model(ids, inputs_embeds=rows, position_ids=positions)
    logits = language.model.embed_tokens.as_linear(hidden)
    losses = nn.losses.cross_entropy(logits, targets) * weights
    return losses.sum() / weights.sum()


def new_model(seed: int) -> Any:
    mx.random.seed(seed)
    text = qwen2_vl.TextConfig.from_dict({"model_type": "qwen2_vl", **TEXT})
    rest = {key: CONFIG[key] for key in ("model_type", "image_token_id", "video_token_id", "vision_start_token_id")}
    whole = qwen2_vl.Model(qwen2_vl.ModelConfig(text, qwen2_vl.VisionConfig.from_dict(VISION), **rest))
    embedding = whole.language_model.model.embed_tokens
    embedding.weight = embedding.weight * 0.3
    return whole


def train(steps: int, size: int, rate: float, path: Path, seed: int = 0) -> None:
    rng, see = np.random.default_rng(seed), reader()
    whole = new_model(seed)
    schedule = optimizers.join_schedules(
        [optimizers.linear_schedule(0, rate, 100), optimizers.cosine_decay(rate, steps - 100, rate / 50)], [100]
    )
    optimiser = optimizers.AdamW(learning_rate=schedule, weight_decay=0.01)
    step = nn.value_and_grad(whole, loss_of)
    began, mean = time.perf_counter(), 0.0
    for number in range(steps):
        loss, gradients = step(whole, *batch(rng, see, size))
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimiser.update(whole, gradients)
        mx.eval(whole.parameters(), optimiser.state, loss)
        mean = 0.98 * mean + 0.02 * loss.item() if number else loss.item()
        if number % 100 == 0 or number == steps - 1:
            print(f"{number:5d}  loss {mean:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
        if number % 100 == 99 or number == steps - 1:
            save(whole, path)


def save(whole: Any, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tree_map(lambda a: a.astype(mx.float16), whole.parameters())))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS) + "\n")
    tokenizer().save_pretrained(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("tests/assets/shapes"))
    given = parser.parse_args()
    train(given.steps, given.size, given.rate, given.out)
