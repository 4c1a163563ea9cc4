"""One line in the log for every request that ends. Prompts are written only by `log_prompt`, which is asked for."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.metrics.snapshot import FinishedRequest
    from treadle.types import Request

log = logging.getLogger("treadle.request")

FIELDS = "fields"  # the attribute of a log record that holds structured values


def log_finished(record: FinishedRequest) -> None:
    """Counts, times and the end of one request."""
    log.info("%s", finished_line(record), extra={FIELDS: asdict(record)})


def finished_line(record: FinishedRequest) -> str:
    """`id=... model=... prompt=120 cached=100 out=45 ttft=0.120s speed=85.3/s finish=stop`; `-` where not known."""
    ttft = "-" if record.ttft_s is None else f"{record.ttft_s:.3f}s"
    speed = "-" if record.decode_tokens_per_s is None else f"{record.decode_tokens_per_s:.1f}/s"
    return (
        f"id={record.id} model={record.model} prompt={record.prompt_tokens} cached={record.cached_tokens} "
        f"out={record.generated_tokens} ttft={ttft} speed={speed} finish={record.finish}"
    )


def log_prompt(tokenizer: Any, request: Request) -> None:
    """The text that the model sees, markers included."""
    text = tokenizer.decode(request.prompt.tolist(), skip_special_tokens=False)
    log.info("id=%s prompt: %s", request.id, json.dumps(text, ensure_ascii=False), extra={FIELDS: {"prompt": text}})


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object in one line: `time`, `level`, `logger`, `message`, and its structured values."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps(values | getattr(record, FIELDS, {}), ensure_ascii=False, default=str)
