"""Every key is found on the line where it stands."""

from __future__ import annotations

import pytest

from treadle.models.toml_lines import line_of

TEXT = '''# models
[models]
quick = "smollm2"   # a source

[models.coder]
source = "org/name"
aliases = [
    "one",
    "two",
]

# a text that looks like keys
chat_template = """
source = "no"
[rules]
"""
sampling.top_p = 0.9

[models."with.dot"]
source = "x"

[rules]
"claude-*" = "coder"
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("models", "quick"), 3),
        (("models", "coder"), 5),
        (("models", "coder", "source"), 6),
        (("models", "coder", "aliases"), 7),
        (("models", "coder", "chat_template"), 13),
        (("models", "coder", "sampling", "top_p"), 17),
        (("models", "with.dot", "source"), 20),
        (("rules", "claude-*"), 23),
    ],
)
def test_a_key_is_found(path: tuple[str, ...], line: int) -> None:
    assert line_of(TEXT, path) == line


def test_a_key_that_is_missing_is_at_its_table() -> None:
    assert line_of(TEXT, ("models", "coder", "nothing")) == 5
    assert line_of(TEXT, ("nothing",)) == 1
