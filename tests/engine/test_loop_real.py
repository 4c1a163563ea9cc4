"""Tiny real architectures through the loop: in a batch, in chunks, the tokens are those of mlx-lm's own caches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import Clock, Run
from tests.fakes import slow_twin
from tests.tiny import CONFIGS, GOOD, VOCAB, tiny
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.models.capabilities import new_layers
from treadle.types import Batching, Finish, Request, Sampling


def run_of(name: str, **settings: object) -> Run:
    model, caps = tiny(name)
    config = Config(**settings)  # type: ignore[arg-type]
    return Run(Loop(model, caps, config, partial(new_layers, model, caps), clock=Clock()))


def prompts() -> list[Request]:
    """Lengths below, at and far above the tiny window of 8; greedy and sampled rows."""
    rng = np.random.default_rng(3)
    sizes = (1, 3, 8, 9, 30, 47)
    return [
        Request(
            f"r{i}",
            rng.integers(0, VOCAB, n),
            Sampling(temperature=0.0 if i % 2 else 1.0, seed=i, top_p=0.95, presence_penalty=0.3 * (i % 3)),
            max_tokens=10 + 3 * i,
        )
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_with_joins_and_leaves_gives_every_row_its_own_text(name: str) -> None:
    run = run_of(name, prefill_chunk=16, max_rows=4)
    asked = prompts()
    for request in asked:
        run.loop.submit(request)
        run.turn()
        run.turn()
    run.until_idle()
    model, caps = tiny(name)
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, caps.context_length)


@pytest.mark.parametrize("name", GOOD)
def test_the_self_check_proves_good_families_ragged(name: str) -> None:
    assert tiny(name)[1].batching is Batching.RAGGED


def test_the_self_check_finds_a_family_that_is_wrong_when_padded() -> None:
    caps = tiny("jamba")[1]
    assert caps.batching is Batching.DECODE and "padded" in caps.why


def test_the_prompt_is_scored_token_by_token_when_asked() -> None:
    """Each prompt token's own logprob by one forward over the whole prompt, whatever the chunks and the cache."""
    import mlx.core as mx

    model, _ = tiny("attention")
    ids = np.random.default_rng(4).integers(0, VOCAB, 37)
    run = run_of("attention", prefill_chunk=8)
    run.loop.submit(Request("x", ids, Sampling(0.0, logprobs=2), 3, prompt_logprobs=True))
    run.until_idle()
    scored = [p for output in run.outputs["x"] for p in output.prompt_logprobs]
    logits = model(mx.array(ids)[None])[0]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert [p.token for p in scored] == ids[1:].tolist()
    np.testing.assert_allclose([p.logprob for p in scored], expected[np.arange(36), ids[1:]], atol=1e-4)
    for line, p in zip(expected, scored, strict=False):
        assert [id for id, _ in p.top] == np.argsort(-line)[:2].tolist()


def test_a_prompt_can_be_scored_without_a_reply() -> None:
    ids = np.random.default_rng(4).integers(0, VOCAB, 21)
    run = run_of("attention", prefill_chunk=8)
    run.loop.submit(Request("x", ids, Sampling(0.0, logprobs=0), 0, prompt_logprobs=True))
    run.until_idle()
    scored = [p.token for output in run.outputs["x"] for p in output.prompt_logprobs]
    assert scored == ids[1:].tolist() and run.text("x") == [] and run.finish("x") is Finish.LENGTH
