"""Image files in the terminal: named by an option, typed, or dragged in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.chat import Conversation
from treadle.cli.images import image_part, split_files
from treadle.errors import BadRequest


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    file = tmp_path / "my photo.png"
    file.write_bytes(b"hi")
    return file


class Said:
    """A session that records what is asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self.error = error

    def chat(self, values: dict[str, Any], show: Callable[[str], None], thought: Callable[[str], None]) -> None:
        self.asked.append([dict(message) for message in values["messages"]])
        if self.error is not None:
            raise self.error
        show("fine")


def part() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}


@pytest.mark.parametrize("form", ["'{}'", '"{}"', "{escaped}", "file://{escaped}"])
def test_a_file_that_was_dragged_in_is_found_in_the_line(photo: Path, form: str) -> None:
    dragged = form.format(photo, escaped=str(photo).replace(" ", "\\ "))
    assert split_files(f"What is {dragged} about?") == ("What is about?", [photo])


@pytest.mark.parametrize("line", ["plain  words", "it's fine", "see /no/such.png", "a 'quoted' word"])
def test_a_line_without_a_file_stays_as_it_is(line: str) -> None:
    assert split_files(line) == (line, [])


def test_only_image_files_are_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert split_files(f"read {tmp_path}/notes.txt")[1] == []


def test_a_file_becomes_a_part_with_its_data(photo: Path) -> None:
    assert image_part(photo) == part()


def test_files_of_the_command_go_with_the_first_message_only(photo: Path) -> None:
    session = Said()
    talk = Conversation(session, None, {}, [photo])  # type: ignore[arg-type]
    talk.take("What is it?")
    talk.take("Sure?")
    assert session.asked[0] == [{"role": "user", "content": [part(), {"type": "text", "text": "What is it?"}]}]
    assert session.asked[1][-1] == {"role": "user", "content": "Sure?"}


def test_a_refused_image_is_told_and_the_chat_goes_on(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Said(BadRequest("This model cannot see images."))
    talk = Conversation(session, None, {}, [photo])  # type: ignore[arg-type]
    talk.take("What is it?")
    assert capsys.readouterr().err == "This model cannot see images.\n"
    assert talk.messages == []


def test_a_missing_file_is_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Said()
    Conversation(session, None, {}, [tmp_path / "gone.png"]).take("x")  # type: ignore[arg-type]
    assert "gone.png cannot be read: No such file" in capsys.readouterr().err
    assert session.asked == []
