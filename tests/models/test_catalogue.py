"""`models.toml` becomes entries and rules, or one sentence with the key and its line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from treadle.config import Config
from treadle.errors import ConfigError
from treadle.models.catalogue import OWN_SETTINGS, Entry, default_file, parse_catalogue, read_catalogue
from treadle.models.catalogue_file import add_entry, remove_entry

PATH = Path("folder/models.toml")
WHOLE = """
[models]
quick = "smollm2"

[models.coder]
source = "org/name@v1"
aliases = ["gpt-4o", "gpt-4"]
context_length = 4096
pinned = true
chat_template = "{{ messages }}"
sampling = { temperature = 0.2, top_k = 20 }

[rules]
"claude-*" = "coder"
"*" = "quick"
"""


def test_a_whole_file_is_read() -> None:
    catalogue = parse_catalogue(WHOLE, PATH)
    quick, coder = catalogue.entries
    assert quick == Entry("quick", "smollm2")
    assert (coder.source, coder.names, coder.pinned) == ("org/name@v1", ("coder", "gpt-4o", "gpt-4"), True)
    assert (coder.sampling, coder.chat_template) == ({"temperature": 0.2, "top_k": 20}, "{{ messages }}")
    assert coder.settings == {"context_length": 4096}
    assert [(rule.pattern, rule.target) for rule in catalogue.rules] == [("claude-*", "coder"), ("*", "quick")]
    assert catalogue.rules[0].place == "folder/models.toml, line 14"
    assert catalogue.find("gpt-4") is coder and catalogue.find("gpt-5") is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[models.a]\nsource = 'x'\nsurce = 'y'", 3, r"models\.a\.surce is not known; did you mean source\?"),
        ("\n[models.a]\naliases = ['b']", 2, r"models\.a\.source is missing"),
        ("[models.a]\nsource = 'x'\n\npinned = 1", 4, r"models\.a\.pinned is wrong: input should be a valid boolean"),
        ("[models.a]\nsource = ''", 2, r"models\.a\.source is wrong"),
        ("[models]\na = 5", 2, r"models\.a must be a table, or a source"),
        ("models = 5", 1, r"models must be a table"),
        ("[models.a]\nsource='x'\n[models.a.sampling]\ntop_p = 2.0", 4, r"models\.a\.sampling\.top_p is wrong: .* 1"),
        (
            "[models.a]\nsource='x'\nsampling = {temprature = 1}",
            3,
            r"temprature is not known; did you mean temperature\?$",
        ),
        (
            "[models.a]\nsource='x'\nspeculation='off'\ndraft_model='y'",
            4,
            r"models\.a\.draft_model is wrong: draft_model names 'y', but speculation is 'off'\.$",
        ),
        ("[models.a]\nsource='x'\naliases=['a']", 3, r"models\.a\.aliases has the name 'a', which 'a' has already"),
        ("[models.a]\nsource='x'\ncontext_length = -1", 3, r"models\.a\.context_length is wrong: .*positive"),
        (
            "[models.a]\nsource='x'\ncontext_length = 'long'",
            3,
            r"context_length is wrong: input should be a valid integer",
        ),
        ("[models.a]\nsource='x'\n[models.b]\nsource='x'\naliases=['a']", 5, r"the name 'a', which 'a' has"),
        ("[models.a]\nsource='x'\nchat_template='none.jinja'", 3, r"names the file folder/none\.jinja"),
        ("[models]\na='x'\n[rules]\n'b*' = ''", 4, r"rules\.b\* must be the name of a model"),
        ("[model.a]\nsource='x'", 1, r"model is not known; expected models or rules"),
    ],
)
def test_an_error_names_the_key_and_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^folder/models\.toml, line {line}: .*{words}") as caught:
        parse_catalogue(text, PATH)
    assert "\n" not in caught.value.message


def test_what_this_version_lacks_is_refused_by_name() -> None:
    lacking = [key for key in OWN_SETTINGS if key not in {one.name for one in fields(Config)}]
    for key in lacking:
        with pytest.raises(ConfigError, match=rf"line 3: models\.a\.{key} is not supported yet"):
            parse_catalogue(f"[models.a]\nsource = 'x'\n{key} = 8", PATH)
    assert "context_length" not in lacking


def test_broken_toml_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"models\.toml is not valid TOML: .*line 2"):
        parse_catalogue("[models.a]\nsource = =\n", PATH)


def test_files_beside_the_catalogue_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    text = "[models.a]\nsource = './folder'\nchat_template = 'own.jinja'"
    (entry,) = parse_catalogue(text, tmp_path / "models.toml").entries
    assert (entry.source, entry.chat_template) == (str(tmp_path / "folder"), "{{ messages[0].content }}")


def test_what_the_command_line_says_holds_for_its_model_alone() -> None:
    own, plain = Entry("own", "x", settings={"context_length": 100}), Entry("plain", "x")
    given, bare = Config(context_length=50, max_rows=3), Config(max_rows=3)
    assert [entry.config(given, first=True).context_length for entry in (own, plain)] == [50, 50]
    assert [entry.config(given, first=False).context_length for entry in (own, plain)] == [100, None]
    assert own.config(bare, first=True).context_length == 100
    assert own.config(given, first=False).max_rows == 3


def test_the_default_file_is_optional_but_a_named_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CONFIG", str(tmp_path))
    assert read_catalogue(None).entries == ()
    default_file().write_text("[models]\na = 'x'")
    assert [entry.name for entry in read_catalogue(None).entries] == ["a"]
    with pytest.raises(ConfigError, match=r"other\.toml cannot be read"):
        read_catalogue(str(tmp_path / "other.toml"))


def test_the_default_file_lies_in_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_CONFIG", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert default_file() == Path("/settings/treadle/models.toml")
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_file().parts[-3:] == ("Application Support", "treadle", "models.toml")


COMMENTED = """# my models
[models.a]
source = "x"  # the best

# names that nobody has
[rules]
"b-*" = "a"
"""


def test_a_change_keeps_the_rest_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "models.toml"
    add_entry(path, "first", {"source": "x"})
    path.write_text(COMMENTED)
    add_entry(path, "c d", {"source": "y", "aliases": ["e"], "sampling": {"temperature": 0.5}})
    text = path.read_text()
    assert all(line in text for line in COMMENTED.splitlines())
    catalogue = parse_catalogue(text, path)
    assert [entry.name for entry in catalogue.entries] == ["a", "c d"] and len(catalogue.rules) == 1
    remove_entry(path, "c d")
    assert all(line in path.read_text() for line in COMMENTED.splitlines())
    assert [entry.name for entry in read_catalogue(str(path)).entries] == ["a"]


def test_a_change_that_would_break_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(COMMENTED)
    with pytest.raises(ConfigError, match=r"has a model 'a' already"):
        add_entry(path, "a", {"source": "y"})
    with pytest.raises(ConfigError, match=r"has no model 'z'; it has a"):
        remove_entry(path, "z")
    with pytest.raises(ConfigError, match=r"line 7: rules\.b-\* needs the model 'a'"):
        remove_entry(path, "a")
    with pytest.raises(ConfigError, match="top_p is wrong"):
        add_entry(path, "z", {"source": "y", "sampling": {"top_p": 7.0}})
    assert path.read_text() == COMMENTED
