"""From a `Constraint` to matchers: checked and compiled once, then copied for each sequence. Any thread.

A request's grammar is compiled by `check` in the thread that prepares its prompt, and found again by `matcher`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits

from treadle.grammar.fault import GrammarError, reason
from treadle.grammar.lark import expression
from treadle.grammar.matcher import Matcher
from treadle.grammar.repeats import check_repeats
from treadle.grammar.vocabulary import Vocabulary
from treadle.types import Constraint, Language

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_KEPT = 32  # compiled grammars per model
MOST_STATES = 100_000  # of a lexer, at 1 to 2 kB each
MOST_ITEMS = 20_000  # alternatives that a token may begin: schemas and tools to choose from; 1 ms each step


def grammar_of(constraint: Constraint) -> str:
    """The constraint in llguidance's own form. Raises GrammarError; not everything wrong is found here."""
    lark = constraint.source if constraint.kind is Language.LARK else f"start: {expression(constraint)}"
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


class Grammars:
    """The compiled grammars of one vocabulary, the most recently used ones kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: OrderedDict[tuple[Language, str], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def check(self, constraint: Constraint) -> None:
        """Compile (a millisecond, up to a second for a huge grammar) and keep. Raises GrammarError."""
        if constraint.kind is not Language.FREE:
            self._compiled(constraint)

    def matcher(self, constraint: Constraint, ends: Collection[int], accepted: Iterable[int] = ()) -> Matcher:
        """A matcher after the tokens `accepted`; `ends` end the reply. Raises GrammarError."""
        start = None if constraint.kind is Language.FREE else self._compiled(constraint)
        matcher = Matcher(start, self.vocabulary, ends, constraint.reasoning)
        for token in accepted:
            matcher.accept(int(token))
        return matcher

    def _compiled(self, constraint: Constraint) -> LLMatcher:
        key = (constraint.kind, constraint.source)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._compile(constraint)
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, constraint: Constraint) -> LLMatcher:
        check_repeats(constraint)
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MOST_STATES, max_items_in_row=MOST_ITEMS)
        made = LLMatcher(self.vocabulary.tokens, grammar_of(constraint), log_level=0, limits=limits)
        if made.is_error():
            raise GrammarError(reason(made.get_error()))
        # The first mask builds most of the lexer, so a grammar that is too complex fails here and not in the engine.
        # It may use up what all masks share: the second one, of another copy, is a sequence's first.
        for _ in range(2):
            first = Matcher(made, self.vocabulary, self.vocabulary.ends)
            first.mask()
            if first.fault:
                raise GrammarError("it allows no reply, or is too complex")
        return made


_made: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, frozenset[int]], Grammars]] = WeakKeyDictionary()
_lock = Lock()


def grammars_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: frozenset[int]) -> Grammars:
    """The grammars of a model, made at the first call (a second or so) and kept with its tokenizer.

    Raises GrammarError when no grammar can work with this tokenizer.
    """
    with _lock:
        by_size = _made.setdefault(tokenizer, {})
        key = (vocab_size, ends)
        if key not in by_size:
            by_size[key] = Grammars(Vocabulary(tokenizer, vocab_size, ends))
        return by_size[key]


def no_grammars() -> Grammars:
    """For a loop without a tokenizer, as in offline use with bare ids."""
    raise GrammarError("this loop has no tokenizer to compile a grammar for")
