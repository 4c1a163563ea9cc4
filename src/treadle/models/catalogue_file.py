"""Changes to `models.toml` that leave everything else in it as it is, comments too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from treadle.errors import ConfigError
from treadle.models.catalogue import Catalogue, parse_catalogue


def add_entry(path: Path, name: str, values: Mapping[str, Any]) -> None:
    """Add the model `name`; the file and its folder are made if need be. Raises ConfigError."""
    text = _read(path)
    if parse_catalogue(text, path).find(name) is not None:
        raise ConfigError(f"{path} has a model {name!r} already; remove it first.", param="name")
    document = tomlkit.parse(text)
    if "models" not in document:
        document["models"] = tomlkit.table(is_super_table=True)
    table = tomlkit.table()
    for key, value in values.items():
        table[key] = value
    if list(document)[-1] != "models":
        table.add(tomlkit.nl())
    document["models"][name] = table
    _write(path, tomlkit.dumps(document))


def remove_entry(path: Path, name: str) -> None:
    """Take the model `name` out. Raises ConfigError when it is not there under that name, or a rule needs it."""
    text = _read(path)
    catalogue = parse_catalogue(text, path)
    entry = next((entry for entry in catalogue.entries if entry.name == name), None)
    if entry is None:
        raise ConfigError(f"{path} has no model {name!r}{_known(catalogue)}.", param="name")
    for rule in catalogue.rules:
        if rule.target in entry.names:
            raise ConfigError(f"{rule.place}: rules.{rule.pattern} needs the model {name!r}.", param="name")
    document = tomlkit.parse(text)
    del document["models"][name]
    _write(path, tomlkit.dumps(document))


def _known(catalogue: Catalogue) -> str:
    names = ", ".join(entry.name for entry in catalogue.entries)
    return f"; it has {names}" if names else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", param="models_file") from error


def _write(path: Path, text: str) -> None:
    """Replace the file in one step, if what it will say is right."""
    parse_catalogue(text, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", param="models_file") from error
