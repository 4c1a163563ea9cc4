"""`treadle service` writes a file that launchd or systemd understands, and starts nothing by itself."""

from __future__ import annotations

import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import run
from treadle.cli import service
from treadle.cli.service_units import Job, assignment, plist, quoted, service_of, systemd_unit
from treadle.errors import BadRequest, TreadleError

JOB = Job(
    Path("/opt/my env/bin/treadle"),
    ["./model", "--cache-dir", 'a "b" $c 100% \\d', "--port", "9000"],
    Path("/home/me/50% off"),
    {"TREADLE_API_KEYS": 'se "cr$et%'},
    drain_s=30.0,
)


class Commands:
    """Stands for the system's: remembers what was run, and answers with a code by the first word after the tool."""

    def __init__(self, **codes: int) -> None:
        self.run: list[tuple[str, ...]] = []
        self._codes = codes

    def __call__(self, command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        self.run.append(command)
        code = next((n for word, n in self._codes.items() if word.replace("_", "-") in command), 0)
        return subprocess.CompletedProcess(command, code, "", "no bus")


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """A Linux home of its own, where no command reaches the real system."""
    commands = Commands()
    monkeypatch.setattr(service.subprocess, "run", commands)
    monkeypatch.setattr(service, "executable", lambda: Path("/venv/bin/treadle"))
    monkeypatch.setattr(service, "here", lambda: service_of("linux", 501, tmp_path))
    return commands


def unit(tmp_path: Path) -> Path:
    return tmp_path / ".config" / "systemd" / "user" / "treadle.service"


def test_installing_writes_a_private_file_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, system: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "service", "install", "--", "smollm2", "--port", "9000") == 0
    assert system.run == []
    written = unit(tmp_path)
    assert "ExecStart=/venv/bin/treadle serve smollm2 --port 9000\n" in written.read_text()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir()] == ["treadle.service"]
    assert "systemctl --user enable treadle.service" in capsys.readouterr().out


def test_print_shows_what_install_would_write(
    monkeypatch: pytest.MonkeyPatch, system: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--env", "HF_HOME=/models", "--", "--drain-s", "40")
    assert run(monkeypatch, "service", "install", "--print", *options) == 0
    printed = capsys.readouterr().out
    assert not unit(tmp_path).exists()
    assert run(monkeypatch, "service", "install", *options) == 0
    assert unit(tmp_path).read_text() == printed
    assert 'Environment="HF_HOME=/models"\n' in printed and "TimeoutStopSec=60\n" in printed


def test_start_replaces_what_runs(monkeypatch: pytest.MonkeyPatch, system: Commands) -> None:
    assert run(monkeypatch, "service", "install", "--start") == 0
    assert [command[2] for command in system.run] == ["disable", "daemon-reload", "enable", "start"]


def test_a_start_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, system: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    system._codes["start"] = 1
    assert run(monkeypatch, "service", "install", "--start") == 1
    assert capsys.readouterr().err == "treadle: `systemctl --user start treadle.service` failed: no bus\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--", "--prot", "9000"), 2, "--prot"),
        (("--", "--prefill-share", "3"), 2, "prefill_share must lie between 0 and 1"),
        (("--env", "NOTHING"), 2, "NAME=VALUE"),
        (("--", "--cache-dir", "a\nb"), 1, "line break"),
    ],
)
def test_what_could_not_run_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
    system: Commands,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    assert run(monkeypatch, "service", "install", *arguments) == code
    assert words in capsys.readouterr().err
    assert not unit(tmp_path).exists()


def test_uninstalling_stops_and_removes(
    monkeypatch: pytest.MonkeyPatch, system: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "service", "uninstall") == 1
    assert "nothing is installed" in capsys.readouterr().err
    run(monkeypatch, "service", "install")
    assert run(monkeypatch, "service", "uninstall", "--print") == 0
    assert unit(tmp_path).exists() and system.run == []
    assert run(monkeypatch, "service", "uninstall") == 0
    assert not unit(tmp_path).exists() and system.run == [
        ("systemctl", "--user", "disable", "--now", "treadle.service")
    ]


def test_status_tells_missing_stopped_and_running_apart(
    monkeypatch: pytest.MonkeyPatch, system: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "service", "status") == 1
    assert "Not installed" in capsys.readouterr().err
    run(monkeypatch, "service", "install")
    assert run(monkeypatch, "service", "status", "--print") == 0
    out = capsys.readouterr().out
    assert "It runs." in out and "[Service]" in out
    system._codes["is_active"] = 3
    assert run(monkeypatch, "service", "status") == 1
    assert "It does not run." in capsys.readouterr().err


def test_the_executable_is_that_of_this_environment() -> None:
    assert service.executable() == Path(sys.executable).parent / "treadle"


def test_an_agent_of_launchd_has_everything_word_by_word() -> None:
    agent = plistlib.loads(plist(JOB, Path("/log")).encode())
    assert agent["ProgramArguments"] == [str(JOB.executable), "serve", *JOB.options]
    assert agent["EnvironmentVariables"] == JOB.environment
    assert (agent["WorkingDirectory"], agent["StandardErrorPath"]) == (str(JOB.folder), "/log")
    assert (agent["ExitTimeOut"], agent["RunAtLoad"], agent["KeepAlive"]) == (50, True, {"SuccessfulExit": False})


def test_each_system_has_its_place() -> None:
    mac = service_of("darwin", 501, Path("/Users/me"))
    assert mac.path == Path("/Users/me/Library/LaunchAgents/treadle.plist")
    assert mac.start == (("launchctl", "bootstrap", "gui/501", str(mac.path)),)
    linux = service_of("linux", 501, Path("/home/me"), Path("/cfg"))
    assert linux.path == Path("/cfg/systemd/user/treadle.service")
    with pytest.raises(TreadleError, match="not for win32"):
        service_of("win32", 0, Path("/"))


def test_words_of_a_unit_stand_for_themselves() -> None:
    assert quoted("--port") == "--port"
    assert quoted("a b") == '"a b"'
    assert quoted("") == '""'
    assert quoted('"\\$%') == '"\\"\\\\$$%%"'
    assert assignment("A", 'x $y% "z') == '"A=x $y%% \\"z"'
    with pytest.raises(BadRequest):
        assignment("A", "x\ny")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here to ask")
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = tmp_path / "my env" / "treadle"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    job = Job(program, JOB.options, tmp_path, JOB.environment, 1.0)
    file = tmp_path / "treadle.service"
    file.write_text(systemd_unit(job))
    command = ["systemd-analyze", "verify", "--user", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
