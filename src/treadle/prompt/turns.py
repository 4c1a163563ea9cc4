"""Where messages start in a prompt's ids (docs/prefix-cache.md: checkpoints at turn boundaries).

No list of model families: the template is asked. A few small conversations are rendered with and without
their last messages; the token that comes next where the shorter one ends starts a message. It counts if it is
one of the tokenizer's own (`<|im_start|>`, `<start_of_turn>`, `[INST]`), for ordinary text holds none of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from treadle.errors import BadRequest
from treadle.prompt.template import render
from treadle.prompt.tokenise import encoder_of
from treadle.types import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

MIN_PREFIX = 4  # a beginning of a few special tokens is computed faster than looked up

SYSTEM: Message = {"role": "system", "content": "one"}
USER: Message = {"role": "user", "content": "two"}
ASSISTANT: Message = {"role": "assistant", "content": "three"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": "four"}}}],
}
RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "five"}
PROBES: tuple[tuple[Message, ...], ...] = (
    (USER, ASSISTANT, USER, ASSISTANT, USER),
    (SYSTEM, USER),
    (USER, ASSISTANT, SYSTEM, USER),
    (USER, CALL, RESULT, ASSISTANT, USER),
)


def boundaries(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> tuple[int, ...]:
    """Positions in `ids` (int64 [num_tokens]) of the tokens that start a message, ascending.

    The start of the reply that the prompt asks for is one of them; positions below `MIN_PREFIX` are left out.
    Where the template marks only some messages by a token of the tokenizer's own, only those are found:
    `[INST]` starts a user's message, and nothing starts its answer. Without a chat template: ().
    """
    markers = markers_of(tokenizer)
    if markers.size == 0:
        return ()
    positions = np.flatnonzero(np.isin(ids, markers))
    return tuple(positions[positions >= MIN_PREFIX].tolist())


_found: WeakKeyDictionary[PreTrainedTokenizerBase, Ids] = WeakKeyDictionary()
_lock = Lock()


def markers_of(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The ids that start messages, int64 [num_markers]; found at the first call and kept with the tokenizer."""
    with _lock:
        if tokenizer not in _found:
            _found[tokenizer] = find_markers(tokenizer)
        return _found[tokenizer]


def find_markers(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """As `markers_of`, found anew by rendering every probe."""
    if not tokenizer.chat_template:
        return np.empty(0, np.int64)
    own = {id for id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    starts = {start for probe in PROBES for start in _starts(tokenizer, probe)}
    return np.array(sorted(starts & own), np.int64)


def _starts(tokenizer: PreTrainedTokenizerBase, probe: Sequence[Message]) -> Iterator[int]:
    """The first token of each message after the first and of the reply, where the template only appends."""
    whole = _rendered(tokenizer, probe, add_generation_prompt=True)
    for count in range(1, len(probe) + 1):
        part = _rendered(tokenizer, probe[:count], add_generation_prompt=False)
        if 0 < part.size < whole.size and np.array_equal(whole[: part.size], part):
            yield int(whole[part.size])


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> Ids:
    """The ids of a prompt; none at all for messages that the template refuses, such as those of tools."""
    try:
        text = render(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    except BadRequest:
        return np.empty(0, np.int64)
    return encoder_of(tokenizer).encode_in_full(text, add_special_tokens=False)
