"""`treadle bench quality`: what fewer bits for keys and values cost a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle import runtime
from treadle.cli import options
from treadle.errors import ConfigError


def quality(
    model: options.Model = options.DEFAULTS["model"],
    text: Annotated[Path | None, typer.Option(help="A text to read instead of Python's own documentation.")] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it to read.", min=512)] = 20_000,
    context: Annotated[int, typer.Option(help="Tokens of one window.", min=512)] = 4096,
) -> None:
    """Measure perplexity, needles and speed with packed keys and values; `--kv-bits auto` goes by the result.

    treadle bench quality smollm2

    treadle bench quality ./my-model --text novel.txt
    """
    runtime.prepare()
    from treadle.bench.quality import measure
    from treadle.models.load import load_model
    from treadle.models.quality import store
    from treadle.models.sources import resolve

    if text is not None and not text.is_file():
        raise ConfigError(f"There is no file {text}.", param="text")
    loaded = load_model(resolve(model, None), None)
    read = None if text is None else text.read_text()
    found = measure(loaded, read, tokens, context, lambda line: typer.echo(line, err=True))
    device = runtime.device_facts().name
    typer.echo(f"{loaded.name} on {device}, {found.tokens} tokens, exact perplexity {found.perplexity:.4f}")
    for name, one in found.formats.items():
        typer.echo(
            f"{name:>4} bits: perplexity {one.delta_percent:+.3f} %, needles {one.needle:.0%}, "
            f"decoding at {one.speed:.2f} of the exact speed at {one.context} tokens"
        )
    typer.echo(f"kept in {store(loaded.revision, device, found)}")
