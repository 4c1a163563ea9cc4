"""Which model may skim for which, and that it is loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_speculation import folders
from tests.models.gguf_files import make, write_folder, write_gguf
from treadle.config import Config
from treadle.errors import ConfigError, LoadError
from treadle.models.catalogue import Entry, parse_catalogue
from treadle.models.prepare import prepare


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return folders(tmp_path_factory.mktemp("pair"))


def entry_of(path: Path) -> Entry:
    return Entry("large", str(path))


def test_a_small_model_is_loaded_beside_and_weighed(pair: tuple[Path, Path]) -> None:
    alone = prepare(entry_of(pair[0]), Config(draft_model="none"))
    both = prepare(entry_of(pair[0]), Config(draft_model="none", specprefill_model=str(pair[1])))
    assert both.num_bytes > alone.num_bytes
    loaded = both.load()
    assert loaded.skimmer is not None and loaded.skimmer.name == "small" and loaded.draft is None
    assert loaded.footprint == loaded.caps.footprint, "its rows are promised while it reads"


def test_one_that_drafts_and_skims_is_loaded_and_counted_once(pair: tuple[Path, Path]) -> None:
    small = str(pair[1])
    drafting = prepare(entry_of(pair[0]), Config(draft_model=small))
    both = prepare(entry_of(pair[0]), Config(draft_model=small, specprefill_model=small))
    assert both.num_bytes == drafting.num_bytes
    loaded = both.load()
    assert loaded.skimmer is loaded.draft and len(loaded.helpers) == 1


def test_a_model_may_skim_for_itself(pair: tuple[Path, Path]) -> None:
    loaded = prepare(entry_of(pair[1]), Config(draft_model="none", specprefill_model=str(pair[1]))).load()
    assert loaded.skimmer is not None and loaded.skimmer.model is loaded.model


def test_another_vocabulary_is_refused_before_anything_is_loaded(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = make("llama")
    tokenizer = write_gguf(tmp_path / "tokenizer.gguf", config)
    other = write_folder(tmp_path / "other", config, tokenizer)
    words = other / "tokenizer.json"
    words.write_text(words.read_text().replace('"one"', '"uno"', 1).replace('"a"', '"ä"'))
    with pytest.raises(LoadError, match=r"other cannot skim for large: their vocabularies differ \(id \d+"):
        prepare(entry_of(pair[0]), Config(draft_model="none", specprefill_model=str(other)))


def test_the_settings_of_a_model_in_the_file() -> None:
    text = '[models.a]\nsource = "x"\nspecprefill_model = "y"\nspecprefill_keep_pct = 0.5\nspecprefill_threshold = 99\n'
    (entry,) = parse_catalogue(text + "specprefill = false\n", Path("models.toml")).entries
    config = entry.config(Config(specprefill_model="of the command line"), first=False)
    found = (config.specprefill_model, config.specprefill_keep_pct, config.specprefill_threshold, config.specprefill)
    assert found == ("y", 0.5, 99, False)
    with pytest.raises(ConfigError, match=r"line 4: models.a.specprefill_keep_pct is wrong"):
        parse_catalogue(text.replace("0.5", "1.5"), Path("models.toml"))


@pytest.mark.parametrize("keep", [0.0, 1.01, -1.0])
def test_a_share_lies_between_nothing_and_all(keep: float) -> None:
    with pytest.raises(ConfigError, match="specprefill_keep_pct"):
        Config(specprefill_keep_pct=keep)
