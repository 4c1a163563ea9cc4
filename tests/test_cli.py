"""The command line: its options are the configuration's fields, its errors one sentence."""

from __future__ import annotations

import asyncio
import inspect
import io
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine, Script, say, tokenizer
from treadle import __version__, cli
from treadle.cli import server
from treadle.cli.chat import Conversation
from treadle.cli.listener import listen
from treadle.cli.logs import log_to_stderr
from treadle.cli.progress import bars
from treadle.cli.serve import serve
from treadle.cli.session import Session
from treadle.config import Config
from treadle.errors import BadRequest, EngineFault, LoadError, TreadleError
from treadle.types import Finish, Request


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `treadle ARGUMENTS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["treadle", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextmanager
def session(engine: FakeEngine) -> Iterator[Session]:

    async def start() -> None:
        engine.start()

    with asyncio.Runner() as runner:
        runner.run(start())
        yield Session(engine, runner)
        runner.run(engine.stop())


def offline(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """Let `generate`, `chat` and `doctor` meet `engine`."""
    monkeypatch.setattr("treadle.cli.session.opened", lambda config: session(engine))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# serve


def test_every_field_of_the_configuration_is_an_option_with_its_default() -> None:
    parameters = inspect.signature(serve).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == asdict(Config())


def served(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """The configuration that `treadle serve ARGUMENTS` would run."""
    seen: list[Config] = []
    monkeypatch.setattr("treadle.cli.serve.listen", lambda host, port: nullcontext())
    monkeypatch.setattr(server, "run", lambda config, listener, logs: seen.append(config))
    assert run(monkeypatch, "serve", *arguments) == 0
    return seen[0]


def test_serve_without_options_is_the_default_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch) == Config()


GIVEN = {
    "host": "::1",
    "on_busy": "queue",
    "prefill_share": "0.25",
    "cache_quantization": "4",
    "cache_group_size": "32",
    "kv_bits": "8/4",
    "kv_group_size": "32",
    "cache_dir": "kept",
    "log_format": "json",
    "speculation": "draft",
    "compile": "on",
    "specprefill_keep_pct": "0.25",
}  # where 7 is no legal value
PATHS = ("cache_dir", "models_file", "specprefill_model")
REPEATED = {
    "api_keys": ("--api-key", ("one", "two")),
    "allowed_origins": ("--allowed-origin", ("https://a.example", "http://b:80")),
    "allowed_hosts": ("--allowed-host", ("box.lan", "::1")),
}


def test_every_option_of_serve_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {}
    arguments: list[str] = []
    for field in fields(Config):
        default = field.default
        if field.name == "model":
            wanted["model"] = "gemma3-270m"
            arguments.append("gemma3-270m")
        elif isinstance(default, bool):
            wanted[field.name] = not default
            arguments.append(("--no-" if default else "--") + field.name.replace("_", "-"))
        elif field.name in REPEATED:
            flag, wanted[field.name] = REPEATED[field.name]
            arguments += [part for value in wanted[field.name] for part in (flag, value)]
        else:
            text = GIVEN.get(field.name, "7")
            wanted[field.name] = text if isinstance(default, str) or field.name in PATHS else float(text)
            arguments += ["--" + field.name.replace("_", "-"), text]
    assert asdict(served(monkeypatch, *arguments)) == wanted


def test_keys_come_from_the_environment_unless_options_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEYS", " one, two,")
    assert served(monkeypatch).api_keys == ("one", "two")
    assert served(monkeypatch, "--api-key", "three").api_keys == ("three",)


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--api-key", "", "api_keys"),
        ("--api-key", "two words", "api_keys"),
        ("--allowed-origin", "example.com", "allowed_origins"),
        ("--allowed-origin", "https://example.com/path", "allowed_origins"),
        ("--allowed-host", "box:80", "allowed_hosts"),
        ("--rate-limit-per-minute", "0", "rate_limit_per_minute"),
    ],
)
def test_a_bad_security_setting_names_its_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str, key: str
) -> None:
    assert run(monkeypatch, "serve", flag, value) == 2
    assert capsys.readouterr().err.startswith(f"treadle: {key} must be ")


def test_a_key_is_not_part_of_a_printed_configuration() -> None:
    assert "secret" not in repr(Config(api_keys=("secret",)))


def test_a_bad_setting_is_one_sentence_that_names_its_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "--prefill-share", "2") == 2
    assert capsys.readouterr().err == "treadle: prefill_share must lie between 0 and 1, not 2.0.\n"
    assert run(monkeypatch, "serve", "--cache-quantization", "5") == 2
    assert capsys.readouterr().err == "treadle: cache_quantization must be one of off, 8, 4, not '5'.\n"
    assert run(monkeypatch, "serve", "--compile", "maybe") == 2
    assert capsys.readouterr().err == "treadle: compile must be one of auto, on, off, not 'maybe'.\n"
    assert run(monkeypatch, "serve", "--port", "eighty") == 2
    assert "--port" in capsys.readouterr().err


def test_a_port_in_use_is_reported_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "run", lambda *_: pytest.fail("went on without its port"))
    with listen("127.0.0.1", free_port()) as taken:
        port = taken.getsockname()[1]
        assert run(monkeypatch, "serve", "--port", str(port)) == 1
    expected = f"Port {port} on 127.0.0.1 is in use; stop the other program or choose another with --port."
    assert capsys.readouterr().err == f"treadle: {expected}\n"


def test_an_unknown_host_is_one_sentence() -> None:
    with pytest.raises(TreadleError, match=r"The host 'no\.such\.host\.invalid' is not known"):
        listen("no.such.host.invalid", 1)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "serve", "smolm2", "--port", str(free_port()), "--drain-s", "0") == 1
    assert capsys.readouterr().err.endswith("treadle: There is no model 'smolm2'; did you mean smollm2?\n")


def test_a_signal_drains_the_engine_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeEngine] = []

    def make(*_: object) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[0]

    def announce(engine: FakeEngine, host: str, port: int) -> None:
        assert engine.state == "ready"
        asyncio.get_running_loop().call_later(0.2, signal.raise_signal, signal.SIGTERM)

    monkeypatch.setattr(server, "Engine", make)
    monkeypatch.setattr(server, "_announce", announce)
    with listen("127.0.0.1", 0) as listener:
        server.run(Config(drain_s=0.1), listener, log_to_stderr("text"))
    assert engines[0].state == "stopped"


def test_a_signal_while_the_model_loads_is_no_failure_either(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(FakeEngine):
        """Its load lasts until it is stopped, and then has failed for that reason."""

        def start(self) -> None:
            asyncio.get_running_loop().call_later(0.2, signal.raise_signal, signal.SIGTERM)

        async def stop(self) -> None:
            self.failure, self.state = "The server is shutting down.", "stopping"
            await asyncio.sleep(0.2)

    monkeypatch.setattr(server, "Engine", lambda *_: Loading())
    monkeypatch.setattr(server, "_announce", lambda *_: pytest.fail("it was never ready"))
    with listen("127.0.0.1", 0) as listener:
        server.run(Config(drain_s=0.1), listener, log_to_stderr("text"))


# generate


def test_generate_prints_the_reply_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(say("hello world"))
    offline(monkeypatch, engine)
    assert run(monkeypatch, "generate", "-p", "hi", "--system", "Be kind.", "--stats") == 0
    out, err = capsys.readouterr()
    assert out == "hello world\n"
    assert err.startswith("prompt ") and err.count("\n") == 1
    assert prompt(engine) == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"


def prompt(engine: FakeEngine, index: int = -1) -> str:
    return str(tokenizer().decode(engine.requests[index].prompt))


def test_generate_hands_its_options_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(say("one two three"))
    offline(monkeypatch, engine)
    options = ["--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "42"]
    assert run(monkeypatch, "generate", "-p", "hi", *options) == 0
    (request,) = engine.requests
    sampling = request.sampling
    assert (request.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed) == (3, 42)


def test_generate_raw_continues_stdin_without_a_template_and_stops_before_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(say("one two three"))
    offline(monkeypatch, engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Count:"))
    assert run(monkeypatch, "generate", "--raw", "--stop", " three") == 0
    assert capsys.readouterr().out == "one two\n"
    assert prompt(engine) == "Count:"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--temperature", "9"], 1, "temperature"),
        (["--max-tokens", "0"], 1, "max_tokens"),
        (["--context-length", "-1"], 2, "context_length must be positive"),
        (["--raw", "--system", "x"], 2, "--system"),
        (["--no-such-option"], 2, "--no-such-option"),
    ],
)
def test_a_bad_option_of_generate_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    offline(monkeypatch, FakeEngine())
    assert run(monkeypatch, "generate", "-p", "hi", *arguments) == code
    assert sentence in capsys.readouterr().err


def test_generate_without_a_chat_template_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offline(monkeypatch, FakeEngine(tokenizer=tokenizer(None), chat_template=None))
    assert run(monkeypatch, "generate", "-p", "hi") == 1
    err = capsys.readouterr().err
    assert "chat template" in err and err.count("\n") == 1


def test_a_fault_of_the_engine_is_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(Script(finish=Finish.ERROR, error="The logits are not numbers."))
    with session(engine) as it, pytest.raises(EngineFault, match="not numbers"):
        it.chat({"messages": [{"role": "user", "content": "hi"}]}, lambda text: None)


def test_a_load_error_is_one_sentence_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "./nothing", "-p", "hi") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "treadle: There is no file or folder ./nothing.\n")


# chat


def echo(request: Request) -> Script:
    return say(f"reply to {len(request.prompt)}")


def test_a_conversation_remembers_until_it_is_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(say("yes"))
    with session(engine) as it:
        talk = Conversation(it, "Be brief.", {"temperature": 0.0})
        talk.take("one")
        talk.take("two")
        assert prompt(engine) == (
            "<|system|>Be brief.<|end|><|user|>one<|end|><|assistant|>yes<|end|><|user|>two<|end|><|assistant|>"
        )
        talk.take("/clear")
        talk.take("three")
        assert prompt(engine) == "<|system|>Be brief.<|end|><|user|>three<|end|><|assistant|>"
        talk.take("/unknown")
        talk.take("")
    assert len(engine.requests) == 3
    assert capsys.readouterr().out == "yes\nyes\nyes\n"


def test_ctrl_c_stops_the_reply_and_what_was_shown_stays_in_the_conversation(request: pytest.FixtureRequest) -> None:
    engine = FakeEngine(Script(steps=tuple((65 + i % 50,) for i in range(3000)), step_s=0.01))
    with session(engine) as it:
        talk = Conversation(it, None, {})
        shown: list[str] = []

        def interrupt(text: str) -> None:  # several steps may be shown at once
            shown.append(text)
            if len(shown) == 1:
                signal.raise_signal(signal.SIGINT)

        # As in a terminal: what a shell starts in the background ignores the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
        with pytest.raises(KeyboardInterrupt):
            it.chat({"messages": [{"role": "user", "content": "go on"}]}, interrupt)
        assert len(engine.aborted) == 1 and engine.streams == {}
        assert len(shown) < 10
        engine._plan = say("fine")
        talk.take("again")
        assert talk.messages[-1] == {"role": "assistant", "content": "fine"}


def test_a_stopped_reply_is_kept_as_far_as_it_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with session(FakeEngine()) as it:
        talk = Conversation(it, None, {})

        def stopped(values: dict[str, Any], show: Any, thought: Any) -> None:
            show("half a")
            raise KeyboardInterrupt

        monkeypatch.setattr(it, "chat", stopped)
        talk.take("question")
    assert talk.messages[-1] == {"role": "assistant", "content": "half a"}


def test_a_message_over_the_context_is_refused_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    with session(FakeEngine()) as it:
        talk = Conversation(it, None, {})
        talk.take("x" * 1000)
        assert talk.messages == []
    assert "/clear starts afresh" in capsys.readouterr().err


def test_a_bad_option_ends_the_chat() -> None:
    with session(FakeEngine()) as it, pytest.raises(BadRequest, match="temperature"):
        Conversation(it, None, {"temperature": 99.0}).take("hi")


def test_chat_reads_lines_until_exit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(echo)
    offline(monkeypatch, engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/exit\nnever\n"))
    assert run(monkeypatch, "chat") == 0
    assert len(engine.requests) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))  # and to the end of input
    assert run(monkeypatch, "chat") == 0
    assert len(engine.requests) == 2


# models, doctor, the rest


def test_models_lists_what_is_known_and_its_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    assert run(monkeypatch, "models") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "SIZE", "ABOUT", "PATH"]
    assert any(line.startswith("smollm2 ") and "not downloaded" in line for line in lines)


def test_doctor_describes_the_machine_and_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offline(monkeypatch, FakeEngine())
    assert run(monkeypatch, "doctor", "--model", "fake") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"system", "device", "memory", "BLAS", "mlx"} <= set(lines)
    assert lines["layers"] == "2 rows, 1 windowed; window 64 tokens"
    assert lines["batching"] == "ragged: proved by nothing: this model is a fake"
    assert lines["context"] == "256 tokens"


def test_doctor_fails_with_the_sentence_of_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise LoadError("mlx-lm lacks a hook.")

    monkeypatch.setattr("treadle.runtime.check_hooks", broken)
    assert run(monkeypatch, "doctor") == 1
    out, err = capsys.readouterr()
    assert "FAILED: mlx-lm lacks a hook." in out and err == "treadle: mlx-lm lacks a hook.\n"


def test_help_has_examples_and_the_version_is_the_package_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("serve", "chat", "generate", "models", "doctor"):
        assert run(monkeypatch, command, "--help") == 0
        assert f"treadle {command}" in capsys.readouterr().out.replace("Usage", "", 1)
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"treadle {__version__}\n"


def test_light_commands_import_nothing_heavy() -> None:
    code = (
        "import atexit, sys, treadle.cli; sys.argv = ['treadle', 'models']\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); treadle.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = set(done.stderr.split())
    assert "treadle.cli.models" in loaded
    assert not loaded & {"mlx.core", "transformers", "fastapi", "uvicorn", "numpy"}


def test_progress_draws_nothing_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bars() as report:
        report("downloading", 1, None)
        report("downloading", 5, 10)
    assert capsys.readouterr() == ("", "")
