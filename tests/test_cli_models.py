"""`treadle models`: the file that names models, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_cli import run
from treadle.models.catalogue import read_catalogue


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's own settings and downloads are touched."""
    monkeypatch.setenv("TREADLE_CONFIG", str(tmp_path / "settings"))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_added_is_listed_shown_and_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    options = ["--alias", "gpt-4o", "--alias", "o1", "--context-length", "4096", "--temperature", "0.2", "--pinned"]
    assert run(monkeypatch, "models", "add", "coder", "smollm2", *options) == 0
    file = folder / "settings" / "models.toml"
    assert capsys.readouterr().out == f"coder is in {file} now.\n"
    (entry,) = read_catalogue(None).entries
    assert (entry.names, entry.settings, entry.pinned) == (("coder", "gpt-4o", "o1"), {"context_length": 4096}, True)
    assert run(monkeypatch, "models") == 0
    assert any(line.startswith("coder ") and "smollm2" in line for line in capsys.readouterr().out.splitlines())
    assert run(monkeypatch, "models", "show", "o1") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (shown["source"], shown["context_length"], shown["sampling.temperature"]) == ("smollm2", "4096", "0.2")
    assert shown["state"] == "not downloaded"
    assert run(monkeypatch, "models", "remove", "coder") == 0
    assert read_catalogue(None).entries == ()


def test_a_local_source_is_written_as_a_whole_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "mine").mkdir()
    assert run(monkeypatch, "models", "add", "mine", "./mine") == 0
    assert read_catalogue(None).entries[0].source == str(folder / "mine")


def test_what_lies_here_is_shown_with_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_bytes(bytes(3_100_000))
    assert run(monkeypatch, "models", "add", "mine", "mine") == 0
    assert run(monkeypatch, "models", "show", "mine") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:])
    assert (shown["state"], shown["size"], shown["path"]) == ("here", "3 MB", str(folder / "mine"))


@pytest.mark.parametrize("command", [["show"], ["add", "coder"]])
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("smolm2", "There is no model 'smolm2'; did you mean smollm2?"),
        ("./later", "There is no file or folder ./later."),
    ],
)
def test_a_source_that_cannot_be_is_no_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    source: str,
    sentence: str,
    folder: Path,
) -> None:
    assert run(monkeypatch, "models", *command, source) == 1
    assert capsys.readouterr() == ("", f"treadle: {sentence}\n")
    assert not (folder / "settings").exists()


def test_a_new_model_stands_apart_from_the_rules_after_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    file = folder / "settings" / "models.toml"
    file.parent.mkdir()
    file.write_text('[models.a]\nsource = "smollm2"\n\n[rules]\n"*" = "a"\n')
    assert run(monkeypatch, "models", "add", "b", "org/name") == 0
    b = '[models.b]\nsource = "org/name"\n'
    assert file.read_text() == f'[models.a]\nsource = "smollm2"\n\n{b}\n[rules]\n"*" = "a"\n'


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["remove", "coder"], "has no model 'coder'"),
        (["add", "coder", "smollm2", "--top-p", "3"], "line 5: models.coder.sampling.top_p is wrong"),
        (["add", "coder", "smollm2", "--context-length", "0"], "line 3: models.coder.context_length is wrong"),
        (["add", "coder", "smollm2", "--models-file", "/dev/null/models.toml"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert run(monkeypatch, "models", *arguments) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1 and err.startswith("treadle: ")


def test_pull_fetches_the_source_of_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "nowhere").mkdir()
    assert run(monkeypatch, "models", "add", "lost", "nowhere") == 0
    (folder / "nowhere").rmdir()
    assert run(monkeypatch, "models", "pull", "lost") == 1
    assert capsys.readouterr().err == f"treadle: There is no file or folder {folder / 'nowhere'}.\n"
    file = folder / "file.gguf"
    file.write_bytes(b"GGUF")
    assert run(monkeypatch, "models", "pull", str(file)) == 0
    assert capsys.readouterr().out == f"{file}\n"


def test_a_server_refuses_a_models_file_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "models.toml").write_text("[models.a]\nsource = 'x'\nspeed = 3\n")
    assert run(monkeypatch, "serve", "--models-file", "models.toml", "--port", "0") == 2
    assert "port must be positive" in capsys.readouterr().err
    monkeypatch.setattr("treadle.cli.serve.listen", lambda *_: open("models.toml"))  # noqa: PTH123, SIM115
    assert run(monkeypatch, "serve", "--models-file", "models.toml") == 2
    assert "treadle: models.toml, line 3: models.a.speed is not known.\n" in capsys.readouterr().err
