"""`models.toml`: the models that a server may be asked for by name, and what each of them is to be like.

    [models.coder]
    source = "org/name"           # as on the command line; "./folder" lies beside this file
    aliases = ["gpt-4o"]
    context_length = 32768
    sampling = { temperature = 0.2 }

    [rules]
    "claude-*" = "coder"          # names that nobody has

An entry that is a plain string is its source. Errors name the key and its line.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from treadle.config import DEFAULTS, Config
from treadle.errors import ConfigError
from treadle.models.toml_lines import line_of

FILE_NAME = "models.toml"
# Settings of the server that a model may have of its own, as far as this version has them.
OWN_SETTINGS = (
    "context_length",
    "kv_bits",
    "kv_group_size",
    "kv_recent",
    "draft_model",
    "speculation",
    "specprefill",
    "specprefill_model",
    "specprefill_threshold",
    "specprefill_keep_pct",
    "compile",
)
OF_ONE_MODEL = ("context_length", "draft_model", "specprefill_model")  # on the command line they are about its model
Number = Annotated[float, Field(allow_inf_nan=False)]


class SamplingTable(BaseModel):
    """What a request that leaves these out gets."""

    model_config = ConfigDict(strict=True, extra="forbid")

    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number | None = Field(default=None, gt=0, le=10)


class ModelTable(BaseModel):
    """One entry of the file, without the settings of `OWN_SETTINGS`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    source: str = Field(min_length=1)
    aliases: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    pinned: bool = False
    chat_template: str | None = Field(default=None, min_length=1)
    sampling: SamplingTable = Field(default_factory=SamplingTable)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model by a name. `settings` replace the server's own; `chat_template` is the text of one."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def config(self, config: Config, *, first: bool) -> Config:
        """The server's configuration with this model's own settings.

        What the command line says of its model holds for the `first` one alone, and wins there over the file.
        """
        if first:
            return replace(
                config, **{key: v for key, v in self.settings.items() if getattr(config, key) == DEFAULTS[key]}
            )
        return replace(config, **{key: DEFAULTS[key] for key in OF_ONE_MODEL} | dict(self.settings))


@dataclass(frozen=True, slots=True)
class Rule:
    """Names that fit `pattern`, where `*` stands for anything, are the model `target`. `place`: for messages."""

    pattern: str
    target: str
    place: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What the file says. The first rule that fits holds."""

    entries: tuple[Entry, ...] = ()
    rules: tuple[Rule, ...] = ()

    def find(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if name in entry.names), None)


def default_file() -> Path:
    """Where the file is looked for: `TREADLE_CONFIG` wins, then the platform's folder for settings."""
    override = os.environ.get("TREADLE_CONFIG")
    if override:
        return Path(override).expanduser() / FILE_NAME
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "treadle" / FILE_NAME
    xdg = os.environ.get("XDG_CONFIG_HOME")
    return (Path(xdg) if xdg else Path.home() / ".config") / "treadle" / FILE_NAME


def read_catalogue(file: str | None) -> Catalogue:
    """The catalogue of `file`; of the default one, if that is there, without. Raises ConfigError."""
    path = default_file() if file is None else Path(file).expanduser()
    if file is None and not path.exists():
        return Catalogue()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", param="models_file") from error
    return parse_catalogue(text, path)


def parse_catalogue(text: str, path: Path) -> Catalogue:
    """`path` is for messages, and the place that files named inside are relative to. Raises ConfigError."""
    return _Reader(text, path).catalogue()


class _Reader:
    """One text on its way to a catalogue."""

    def __init__(self, text: str, path: Path) -> None:
        self._text = text
        self._path = path

    def _bad(self, where: tuple[str, ...], reason: str) -> ConfigError:
        line = line_of(self._text, where)
        sentence = f"{self._path}, line {line}: {'.'.join(where)} {reason}"
        return ConfigError(sentence if sentence.endswith("?") else sentence + ".", param=".".join(where))

    def catalogue(self) -> Catalogue:
        try:
            values = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{self._path} is not valid TOML: {error}.", param="models_file") from error
        for key in values:
            if key not in ("models", "rules"):
                raise self._bad((key,), "is not known; expected models or rules")
        models, rules = self._table(values, "models"), self._table(values, "rules")
        entries = tuple(self._entry(name, value) for name, value in models.items())
        self._check_names(entries)
        return Catalogue(entries, tuple(self._rule(pattern, target) for pattern, target in rules.items()))

    def _rule(self, pattern: str, target: Any) -> Rule:
        where = ("rules", pattern)
        if not isinstance(target, str) or not target:
            raise self._bad(where, "must be the name of a model")
        return Rule(pattern, target, f"{self._path}, line {line_of(self._text, where)}")

    def _table(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        table = values.get(key, {})
        if not isinstance(table, dict):
            raise self._bad((key,), "must be a table")
        return table

    def _entry(self, name: str, value: Any) -> Entry:
        where = ("models", name)
        if not name:
            raise self._bad(where, "needs a name")
        if isinstance(value, str):
            value = {"source": value}
        if not isinstance(value, dict):
            raise self._bad(where, "must be a table, or a source as a string")
        settings = {key: value[key] for key in OWN_SETTINGS if key in value}
        rest = {key: item for key, item in value.items() if key not in settings}
        self._check_settings(where, settings)
        table = self._checked(where, rest)
        return Entry(
            name,
            str(self._path.parent / table.source) if table.source.startswith(".") else table.source,
            tuple(table.aliases),
            table.pinned,
            table.sampling.model_dump(exclude_none=True),
            self._template(where, table.chat_template),
            settings,
        )

    def _check_settings(self, where: tuple[str, ...], settings: dict[str, Any]) -> None:
        types = get_type_hints(Config)
        for key, value in settings.items():
            if key not in types:
                raise self._bad((*where, key), "is not supported yet")
            try:
                TypeAdapter[Any](types[key]).validate_python(value, strict=True)
                Config(**{key: value})
            except ConfigError as error:
                raise self._bad((*where, key), f"is wrong: {error.message.rstrip('.')}") from error
            except ValidationError as error:
                raise self._bad((*where, key), f"is wrong: {_lower(error.errors()[0]['msg'])}") from error
        try:
            Config(**settings)
        except ConfigError as error:  # each is right, but not all of them together
            key = error.param if error.param in settings else next(iter(settings))
            raise self._bad((*where, key), f"is wrong: {error.message.rstrip('.')}") from error

    def _checked(self, where: tuple[str, ...], values: dict[str, Any]) -> ModelTable:
        try:
            return ModelTable.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            path = tuple(str(part) for part in first["loc"] if not isinstance(part, int))
            if first["type"] == "extra_forbidden":
                raise self._bad((*where, *path), f"is not known{_similar(path)}") from error
            if first["type"] == "missing":
                raise self._bad((*where, *path), "is missing") from error
            raise self._bad((*where, *path), f"is wrong: {_lower(first['msg'])}") from error

    def _template(self, where: tuple[str, ...], given: str | None) -> str | None:
        """A text with template marks is one; anything else is the path of a file with one."""
        if given is None or "{{" in given or "{%" in given:
            return given
        path = self._path.parent / Path(given).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self._bad((*where, "chat_template"), f"names the file {path}, which cannot be read") from error

    def _check_names(self, entries: tuple[Entry, ...]) -> None:
        seen: dict[str, str] = {}
        for entry in entries:
            for name in entry.names:
                if name in seen:
                    key = ("models", entry.name, "aliases") if name in entry.aliases else ("models", entry.name)
                    raise self._bad(key, f"has the name {name!r}, which {seen[name]!r} has already")
                seen[name] = entry.name


def _similar(path: tuple[str, ...]) -> str:
    table = SamplingTable if len(path) > 1 else ModelTable
    close = difflib.get_close_matches(path[-1], [*table.model_fields, *OWN_SETTINGS], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
