"""Units stay small: functions of at most 60 lines, files of at most 400."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "src" / "treadle").rglob("*.py"))
MAX_FUNCTION = 60
MAX_FILE = 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.parent.name + "/" + path.name)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= MAX_FILE, f"{path.name} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{path.name}: {node.name} has {length} lines"


def test_there_is_something_to_measure() -> None:
    assert len(SOURCES) > 20
