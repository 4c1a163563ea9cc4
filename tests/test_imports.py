"""Who may import whom, and who may not touch MLX, read from the syntax trees.

api -> engine -> {cache, speculate, sparse, vision, grammar, models} -> types, errors, config.
prompt and output sit beside api; nothing but the command line imports api.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
SOURCES = sorted((ROOT / "treadle").rglob("*.py"))

BASE = {"types", "errors", "config", "runtime", "system", "compiler", "__init__"}
PARTS = {"cache", "speculate", "sparse", "vision", "grammar", "models", "metrics", "native"}
TEXT = {"prompt", "output"}
# What each area may import of Treadle, besides itself.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "config": {"errors"},
    "__init__": set(),
    "__main__": {"cli"},
    "compiler": set(),
    "system": set(),
    "exports": set(),
    "blas": {"exports", "system"},
    "runtime": {"errors", "types", "compiler", "blas", "system"},
    **dict.fromkeys(PARTS, BASE | PARTS),
    "engine": BASE | PARTS,
    "prompt": BASE,
    "output": BASE,
    # The engine is handed to the API as a value; its types may be named.
    "api": BASE | PARTS | TEXT | {"engine"},
    "bench": BASE | PARTS | TEXT | {"engine", "api"},
    "cli": BASE | PARTS | TEXT | {"engine", "api", "bench"},
}
WITHOUT_MLX = (
    "api/",
    "prompt/",
    "output/",
    "cli/",
    "cache/geometry.py",
    "cache/tree.py",
    "engine/memory.py",
    "grammar/",
    "metrics/",
    "engine/scheduler.py",
    "engine/turns.py",
    "models/catalogue",
    "models/pairing.py",
    "models/weigh.py",
    "speculate/accept.py",
    "speculate/control.py",
    "speculate/cost.py",
    "speculate/experience.py",
    "speculate/lookup.py",
    "speculate/speculator.py",
    "speculate/telemetry.py",
)
MLX_MODULES = {"mlx", "mlx_lm", "mlx_vlm"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT / "treadle").as_posix()


def area(path: Path) -> str:
    """The top-level part of the package that a file belongs to."""
    first = path.relative_to(ROOT / "treadle").parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it, also only for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_areas(path: Path) -> set[str]:
    """Which areas of Treadle a file imports from, besides its own."""
    areas = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "treadle":
            known = len(parts) > 1 and (ROOT / "treadle" / parts[1]).exists()
            known = known or (len(parts) > 1 and (ROOT / "treadle" / f"{parts[1]}.py").exists())
            areas.add(parts[1] if known else "__init__")
    return areas - {area(path)}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_imports_only_what_its_area_may(path: Path) -> None:
    assert area(path) in ALLOWED, f"{area(path)} has no place in the order of imports yet"
    wrong = imported_areas(path) - ALLOWED[area(path)]
    assert not wrong, f"{relative(path)} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("path", [path for path in SOURCES if relative(path).startswith(WITHOUT_MLX)], ids=relative)
def test_what_is_not_on_the_engine_thread_imports_no_mlx(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & MLX_MODULES


def test_the_rules_would_notice_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "treadle"
    for folder in ("api", "cache"):
        (package / folder).mkdir(parents=True)
    wrong = package / "cache" / "wrong.py"
    wrong.write_text("def f():\n    from treadle.api import app\n    import mlx.core as mx\n")
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    assert imported_areas(wrong) - ALLOWED["cache"] == {"api"}
    assert "mlx.core" in imports(wrong)
