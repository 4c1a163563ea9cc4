"""The `treadle` command. Modules of MLX and of the server are imported by the commands that need them."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from treadle import __version__
from treadle.cli import bench_serve, chat, doctor, generate, models, quality, serve, service, top
from treadle.errors import ConfigError, TreadleError

EXAMPLES = """
Examples:

  treadle serve                        the built-in model, on port 8080

  treadle serve ./my-model --port 9000

  treadle chat org/name                a model of the Hugging Face Hub

  treadle generate -p "Why is the sky blue?" --max-tokens 100

  treadle doctor --model smollm2       what works on this machine
"""

app = typer.Typer(
    name="treadle",
    help="A local inference server for language models on MLX.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"treadle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A local inference server for language models on MLX."""


for command in (serve.serve, chat.chat, generate.generate, doctor.doctor, top.top):
    app.command()(command)
app.add_typer(models.models, name="models")
bench_serve.bench.command()(quality.quality)
app.add_typer(bench_serve.bench, name="bench")
app.add_typer(service.service, name="service")


def console() -> None:
    """The process `treadle`: `main`, and then its end.

    MLX frees what Python owns from threads of its own. One that does so while the interpreter is taken down is ended in
    the middle of C++, which aborts the process (seen at the end of one run in thirty on a busy machine). So, when all
    else is done, the process leaves without that.
    """
    code = 1  # what Python says after an exception

    def leave() -> None:
        if "mlx.core" in sys.modules:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    atexit.register(leave)  # first, so that it comes last
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise


def main() -> None:
    """The command. Exit codes: 0; 1: an error, one sentence on stderr; 2: wrong usage; 130: Ctrl-C."""
    try:
        app()
    except TreadleError as error:
        print(f"treadle: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output is gone; the flush at exit must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
