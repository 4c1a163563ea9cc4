"""The files that make the server a service, and the commands around them. Pure."""

from __future__ import annotations

import math
import plistlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.errors import BadRequest, TreadleError

LABEL = "treadle"
AFTER_DRAIN_S = 20  # the rest of a shutdown; then the system kills

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to run: `executable serve options` in `folder`; `drain_s` is how long running requests may take."""

    executable: Path
    options: Sequence[str]
    folder: Path  # what relative paths among the options start from
    environment: Mapping[str, str]
    drain_s: float

    @property
    def command(self) -> list[str]:
        return [str(self.executable), "serve", *self.options]

    @property
    def stop_s(self) -> int:
        return math.ceil(self.drain_s) + AFTER_DRAIN_S


@dataclass(frozen=True, slots=True)
class Service:
    """Where its file goes, what is in it, and how it is started, stopped and asked for."""

    path: Path
    text: Callable[[Job], str]
    start: tuple[Command, ...]
    stop: tuple[Command, ...]
    ask: Command  # exit code 0 when it runs


def service_of(platform: str, user: int, home: Path, config_home: Path | None = None) -> Service:
    """For `sys.platform`, a user's number, home folder and `$XDG_CONFIG_HOME`.

    Raises TreadleError where neither launchd nor systemd is.
    """
    if platform == "darwin":
        return _launchd(f"gui/{user}", home / "Library")
    if platform.startswith("linux"):
        return _systemd((config_home or home / ".config") / "systemd" / "user")
    raise TreadleError(f"Services are written for launchd and systemd, not for {platform}.")


def _launchd(domain: str, library: Path) -> Service:
    path = library / "LaunchAgents" / f"{LABEL}.plist"
    return Service(
        path,
        lambda job: plist(job, library / "Logs" / "treadle.log"),
        (("launchctl", "bootstrap", domain, str(path)),),
        (("launchctl", "bootout", f"{domain}/{LABEL}"),),
        ("launchctl", "print", f"{domain}/{LABEL}"),
    )


def _systemd(folder: Path) -> Service:
    unit = f"{LABEL}.service"
    control = ("systemctl", "--user")
    return Service(
        folder / unit,
        systemd_unit,
        ((*control, "daemon-reload"), (*control, "enable", unit), (*control, "start", unit)),
        ((*control, "disable", "--now", unit),),
        (*control, "is-active", "--quiet", unit),
    )


def plist(job: Job, log: Path) -> str:
    """A launchd agent: started at login, again when it fails, and stopped with time to drain."""
    agent = {
        "Label": LABEL,
        "ProgramArguments": job.command,
        "WorkingDirectory": str(job.folder),
        "EnvironmentVariables": dict(job.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": job.stop_s,
        "ProcessType": "Interactive",
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(agent, sort_keys=False).decode()


def systemd_unit(job: Job) -> str:
    """A user unit: started at login, again when it fails, and stopped with time to drain."""
    command = " ".join(quoted(part) for part in job.command)
    environment = "".join(f"Environment={assignment(*pair)}\n" for pair in job.environment.items())
    return f"""[Unit]
Description=Treadle, a local inference server
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={command}
WorkingDirectory={unbroken(str(job.folder))}
{environment}Restart=on-failure
RestartSec=5
TimeoutStopSec={job.stop_s}

[Install]
WantedBy=default.target
"""


def quoted(word: str) -> str:
    """One word of `ExecStart`, in which % and $ stand for themselves. Raises BadRequest for a line break."""
    escaped = _escaped(word).replace("$", "$$")
    plain = all(c.isalnum() or c in "-_./:,=@+%$" for c in escaped) and escaped
    return escaped if plain else f'"{escaped}"'


def assignment(name: str, value: str) -> str:
    """One `Environment=` setting; $ has no meaning there. Raises BadRequest for a line break."""
    return f'"{_escaped(name)}={_escaped(value)}"'


def unbroken(text: str) -> str:
    """As it is, with % standing for itself. Raises BadRequest for a line break."""
    if "\n" in text or "\r" in text:
        raise BadRequest(f"A service's options and environment cannot hold a line break: {text!r}.")
    return text.replace("%", "%%")


def _escaped(text: str) -> str:
    return unbroken(text).replace("\\", "\\\\").replace('"', '\\"')
