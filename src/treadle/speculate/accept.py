"""The one acceptance rule (docs/speculation.md): the model's own draws stand, and drafts are kept while they match.

Pure. A row's step has one line more than it has drafts: line j was drawn from the logits behind draft j - 1, so it is
only worth anything if the drafts before it were right. What stands is what plain steps would have drawn, up to the
rounding of a step that computes several tokens at once: where the two best candidates are closer than that, the line
and what follows it are left to a plain step. So is a line that came to no number. That may be a wrong draft's doing:
what a token must not see is seen with a weight of 0, and 0 times no number is none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Verdict(NamedTuple):
    """What stands of one row's step."""

    taken: int  # lines whose tokens stand, in order
    matched: int  # drafts among them
    judged: int  # drafts that were compared with a line that stands
    tie: bool  # a line was too close to call, or no number

    @property
    def kept(self) -> int:
        """Drafts whose rows stay in the layers: the last token taken is always the next one to be fed."""
        return max(self.taken - 1, 0)


def judge(
    draft: Sequence[int],
    drawn: Sequence[int],
    gaps: Sequence[float] | None,
    noise: float,
    ends: Collection[int],
    room: int,
) -> Verdict:
    """`drawn` has len(draft) + 1 tokens; `gaps` how far each was ahead of the next best, in logits (None: not asked).

    A token below 0 stands for none. `ends` stop the reply, and so does the `room`-th token. A row without drafts is a
    plain step: its line stands.
    """
    taken = matched = 0
    for j, token in enumerate(drawn[: len(draft) + 1]):
        if draft and (token < 0 or (gaps is not None and gaps[j] <= noise)):
            return Verdict(taken, matched, min(taken, len(draft)), True)
        taken += 1
        right = j < len(draft) and token == draft[j]
        matched += right
        if not right or token in ends or taken >= room:
            break
    return Verdict(taken, matched, min(taken, len(draft)), False)
