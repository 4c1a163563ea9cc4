"""`treadle chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli import options
from treadle.cli.generate import show
from treadle.cli.images import image_part, split_files
from treadle.config import Config
from treadle.errors import BadRequest, ContextLengthExceeded, TreadleError

if TYPE_CHECKING:
    from treadle.cli.session import Session

HELP = (
    "/exit or Ctrl-D ends, /clear forgets the conversation, Ctrl-C stops a reply; "
    "image files named in a message are shown to a model that sees."
)
Message = dict[str, Any]


def chat(
    model: options.Model = options.DEFAULTS["model"],
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image file for the first message; repeat it for several.")
    ] = None,
    context_length: options.ContextLength = options.DEFAULTS["context_length"],
    memory_limit_gb: options.MemoryLimit = options.DEFAULTS["memory_limit_gb"],
) -> None:
    """Talk to a model in the terminal.

    treadle chat

    treadle chat ./my-model --system "Answer in one sentence." --temperature 0

    treadle chat ./my-vision-model --image photo.jpg
    """
    from treadle.cli.session import opened

    values = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }
    config = Config.of(model=model, context_length=context_length, memory_limit_gb=memory_limit_gb)
    with opened(config) as session:
        _line_editing()
        _note(f"{session.model.name}, context {session.model.caps.context_length} tokens. {HELP}")
        Conversation(session, system, values, image or ()).run()


class Conversation:
    """The messages so far, and what each line that is typed does to them."""

    def __init__(
        self, session: Session, system: str | None, values: dict[str, Any], images: Sequence[Path] = ()
    ) -> None:
        self._session = session
        self._images = list(images)  # for the next message
        self._values = values
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._first)

    def run(self) -> None:
        """Read lines until the end of input or /exit."""
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                _note(f"\n{HELP}")
                continue
            if line == "/exit":
                return
            self.take(line)

    def take(self, line: str) -> None:
        """One typed line: a command or a message."""
        if line == "/clear":
            self.messages = list(self._first)
            _note("The conversation starts afresh.")
        elif line.startswith("/") and " " not in line:
            _note(f"There is no command {line}. {HELP}")
        elif line:
            self._say(line)

    def _say(self, line: str) -> None:
        """A message, with the image files that it names or that wait for it."""
        text, named = split_files(line)
        files, self._images = [*self._images, *named], []
        try:
            parts = [image_part(file) for file in files]
        except OSError as error:
            _note(f"{error.filename} cannot be read: {error.strerror}.")
            return
        self._answer([*parts, {"type": "text", "text": text}] if parts else line)

    def _answer(self, content: str | list[Message]) -> None:
        """Stream a reply. What was shown of a stopped one is kept, a refused message is not."""
        pieces: list[str] = []

        def both(text: str) -> None:
            pieces.append(text)
            show(text)

        self.messages.append({"role": "user", "content": content})
        try:
            self._session.chat({"messages": self.messages, **self._values}, both, _think)
        except KeyboardInterrupt:
            _note("\n(stopped)")
        except ContextLengthExceeded as error:
            self.messages.pop()
            _note(f"{error.message} /clear starts afresh.")
            return
        except BadRequest as error:
            if isinstance(content, str):
                raise  # an option or the model itself: it would fail each time
            self.messages.pop()
            _note(error.message)
            return
        except TreadleError as error:
            self.messages.pop()
            _note(error.message)
            return
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def _note(text: str) -> None:
    """A remark of the program, apart from the model's text."""
    print(text, file=sys.stderr, flush=True)


def _think(text: str) -> None:
    """Reasoning: dimmed on a terminal, and never part of the history."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)


def _line_editing() -> None:
    """Arrow keys and history in `input`, where this Python was built with readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
