"""`treadle service`: the server as a service of the user, through launchd or systemd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.options import settings
from treadle.cli.serve import serve
from treadle.cli.service_units import Job, Service, service_of
from treadle.config import Config
from treadle.errors import TreadleError

service = typer.Typer(help="Run the server as a service of your user account.", no_args_is_help=True)


@service.callback()
def root() -> None:
    """Run the server as a service of your user account (launchd on macOS, systemd elsewhere)."""


@service.command()
def install(
    serve_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="What follows `treadle serve`, after --.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Show the file instead of writing it.")] = False,
    start: Annotated[bool, typer.Option("--start", help="Also start it, now and at every login.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for its environment, such as TREADLE_API_KEYS; repeatable.", show_default="none"),
    ] = None,
) -> None:
    """Write the service's file, readable by you alone; nothing is started unless asked.

    treadle service install -- smollm2 --port 9000

    treadle service install --start --env TREADLE_API_KEYS=secret
    """
    found = here()
    options = serve_options or []
    text = found.text(Job(executable(), options, Path.cwd(), dict(map(pair, env or [])), config_of(options).drain_s))
    if print_only:
        print(text, end="")
        return
    write_private(found.path, text)
    print(f"Wrote {found.path}.")
    if start:
        for command in found.stop:
            subprocess.run(command, check=False, capture_output=True)  # an earlier one, if it runs
        for command in found.start:
            _run(command)
        print("Started.")
    else:
        print("Start it with `treadle service install --start` and the same options, or yourself:")
        for command in found.start:
            print(f"  {' '.join(command)}")


@service.command()
def uninstall(
    print_only: Annotated[bool, typer.Option("--print", help="Show what would be done instead.")] = False,
) -> None:
    """Stop the service and remove its file."""
    found = here()
    if print_only:
        for command in found.stop:
            print(" ".join(command))
        print(f"rm {found.path}")
        return
    if not found.path.exists():
        raise TreadleError(f"There is no {found.path}; nothing is installed.")
    for command in found.stop:
        # It may not run; that is no reason to keep its file.
        subprocess.run(command, check=False, capture_output=True)
    found.path.unlink()
    print(f"Removed {found.path}.")


@service.command()
def status(
    print_only: Annotated[bool, typer.Option("--print", help="Show the installed file too.")] = False,
) -> None:
    """Whether the service is installed and runs; exit code 1 when it does not."""
    found = here()
    if not found.path.exists():
        raise TreadleError(f"Not installed: there is no {found.path}.")
    print(f"Installed: {found.path}")
    if print_only:
        print(found.path.read_text(encoding="utf-8"), end="")
    try:
        running = subprocess.run(found.ask, check=False, capture_output=True).returncode == 0
    except FileNotFoundError as error:
        raise TreadleError(f"{found.ask[0]} is not on this machine, so nothing can run the service.") from error
    if not running:
        raise TreadleError("It does not run.")
    print("It runs.")


def here() -> Service:
    """The one of this system and user."""
    config_home = os.environ.get("XDG_CONFIG_HOME")
    return service_of(sys.platform, os.getuid(), Path.home(), Path(config_home) if config_home else None)


def config_of(options: list[str]) -> Config:
    """What `treadle serve OPTIONS` would run, so that a bad option is refused here and not in a log at night."""
    app = typer.Typer(add_completion=False)
    app.command("treadle serve")(serve)
    given = typer.main.get_command(app).make_context("treadle serve", list(options)).params
    return Config.of(**settings(given, {}))


def pair(text: str) -> tuple[str, str]:
    """Raises BadParameter unless it is NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise typer.BadParameter(f"--env wants NAME=VALUE, not {text!r}.")
    return name, value


def write_private(path: Path, text: str) -> None:
    """Its options may hold a key: nobody else reads it, at no moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(path.name + ".new")
    with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    made.replace(path)


def executable() -> Path:
    """The `treadle` of this Python environment. Raises TreadleError when it has none."""
    found = Path(sys.executable).parent / "treadle"
    if not found.is_file():
        raise TreadleError(f"There is no {found}; install Treadle into this environment first.")
    return found


def _run(command: tuple[str, ...]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise TreadleError(f"{command[0]} is not on this machine; the file is written, but not started.") from error
    if done.returncode:
        raise TreadleError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
