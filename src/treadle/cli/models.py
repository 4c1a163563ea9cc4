"""`treadle models`: what is known and what is on the disk, and the file that names models for a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.cli import options
from treadle.models.catalogue import Entry, default_file, read_catalogue
from treadle.models.sources import KnownModel, check_source, known_models

Name = Annotated[str, typer.Argument(help="A name of models.toml.")]
NameOrSource = Annotated[str, typer.Argument(help="A name of models.toml, or a source as for `treadle serve`.")]
Source = Annotated[str, typer.Argument(help="A known name, a folder, a .gguf file or a Hugging Face id org/name.")]
Aliases = Annotated[list[str], typer.Option("--alias", help="A further name; repeatable.", show_default="none")]
Pinned = Annotated[bool, typer.Option("--pinned", help="Load it at the start and keep it.")]

models = typer.Typer(help="List, name and download models.", context_settings={"help_option_names": ["-h", "--help"]})


@models.callback(invoke_without_command=True)
def show_all(context: typer.Context, models_file: options.ModelsFile = None) -> None:
    """List the models of models.toml, the known ones and the downloaded ones, with sizes and paths.

    treadle models

    treadle models add coder org/name --alias gpt-4o
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "STATE", "SIZE", "ABOUT", "PATH"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("NAME", "STATE", "SIZE"))
    known = {model.name: model for model in known_models()}
    for entry in read_catalogue(models_file).entries:
        table.add_row(entry.name, *_state(entry, known), f"{entry.source}, in models.toml", _path(entry, known))
    for model in known.values():
        table.add_row(model.name, *_downloaded(model), model.about, str(model.path or "-"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 400  # never fold a line that another program reads
    console.print(table)


@models.command()
def add(
    name: Name,
    source: Source,
    aliases: Aliases = [],  # noqa: B006
    context_length: options.ContextLength = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    pinned: Pinned = False,
    models_file: options.ModelsFile = None,
) -> None:
    """Name a model in models.toml, so that a server loads it when it is asked for.

    treadle models add coder org/name --alias gpt-4o --temperature 0.2
    """
    from treadle.models.catalogue_file import add_entry

    check_source(source)
    folder = Path(source).expanduser()
    values: dict[str, Any] = {
        "source": str(folder.resolve()) if folder.exists() else source,
        "aliases": list(aliases) or None,
        "context_length": context_length,
        "pinned": pinned or None,
        "sampling": _given({"temperature": temperature, "top_p": top_p, "top_k": top_k}) or None,
    }
    path = _file(models_file)
    add_entry(path, name, _given(values))
    print(f"{name} is in {path} now.")


@models.command()
def remove(name: Name, models_file: options.ModelsFile = None) -> None:
    """Take a model out of models.toml; its files stay.

    treadle models remove coder
    """
    from treadle.models.catalogue_file import remove_entry

    path = _file(models_file)
    remove_entry(path, name)
    print(f"{name} is not in {path} any more.")


@models.command()
def pull(name: NameOrSource, models_file: options.ModelsFile = None) -> None:
    """Download a model now, so that a server need not.

    treadle models pull coder
    """
    from treadle.cli.progress import bars
    from treadle.models.sources import resolve

    entry = read_catalogue(models_file).find(name)
    with bars() as report:
        source = resolve(name if entry is None else entry.source, report)
    print(source.path)


@models.command()
def show(name: NameOrSource, models_file: options.ModelsFile = None) -> None:
    """Everything that is set for a model, and where it lies.

    treadle models show coder
    """
    entry = read_catalogue(models_file).find(name)
    if entry is None:
        check_source(name)
        entry = Entry(name, name)
    known = {model.name: model for model in known_models()}
    lines: dict[str, Any] = {"source": entry.source, "aliases": ", ".join(entry.aliases)}
    lines |= {"pinned": "yes" if entry.pinned else "", **entry.settings}
    lines |= {f"sampling.{key}": value for key, value in entry.sampling.items()}
    lines |= {"chat template": "its own" if entry.chat_template is None else "from models.toml"}
    lines |= dict(zip(("state", "size"), _state(entry, known), strict=True)) | {"path": _path(entry, known)}
    print(entry.name)
    for key, value in lines.items():
        if value != "":
            print(f"  {key:<22} {value}")


def _file(given: str | None) -> Path:
    return default_file() if given is None else Path(given).expanduser()


def _path(entry: Entry, known: Mapping[str, KnownModel]) -> str:
    """Where the source is, as far as that is known without the network."""
    model = known.get(entry.source)
    if model is not None:
        return str(model.path or "-")
    path = Path(entry.source).expanduser()
    return str(path) if path.exists() else "-"


def _state(entry: Entry, known: Mapping[str, KnownModel]) -> tuple[str, str]:
    """Whether it is here, and how large its files are."""
    model, path = known.get(entry.source), Path(entry.source).expanduser()
    if model is not None:
        return _downloaded(model)
    if not path.exists():
        return "-", "-"
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return "here", _size(sum(file.stat().st_size for file in files))


def _downloaded(model: KnownModel) -> tuple[str, str]:
    return "downloaded" if model.downloaded else "not downloaded", _size(model.num_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
