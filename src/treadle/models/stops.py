"""The token ids that end a model's answer, from everything that declares one. No MLX."""

from __future__ import annotations

from typing import Any

# Tokens that end a turn in some chat template; they count where special and written by the template.
TURN_ENDERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|eot|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "</s>",
)
# With channels, an <|end|> closes one message of an answer and not the answer.
CHANNEL, CHANNEL_END = "<|channel|>", "<|end|>"


def stop_ids(tokenizer: Any, config: dict[str, Any], generation: dict[str, Any]) -> frozenset[int]:
    """What tokenizer, config (also its `text_config`), generation config and chat template end with."""
    text_config = config.get("text_config") or {}
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    for declared in (config, text_config, generation):
        found |= _ids(declared.get("eos_token_id"))
    return frozenset(found | _turn_enders(tokenizer))


def template_of(tokenizer: Any) -> str | None:
    """The chat template, the one named `default` where a tokenizer has several."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _ids(declared: Any) -> set[int]:
    listed = declared if isinstance(declared, list) else [declared]
    return {token for token in listed if isinstance(token, int)}


def _turn_enders(tokenizer: Any) -> set[int]:
    template = template_of(tokenizer) or ""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    enders = [text for text in TURN_ENDERS if text in template and text in special]
    return {special[text] for text in enders if not (text == CHANNEL_END and CHANNEL in template)}
