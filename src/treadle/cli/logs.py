"""Where the server's log goes: to stderr, written by a thread of its own, so that a slow reader stops nobody."""

from __future__ import annotations

import atexit
import logging
import sys
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

from treadle.metrics.request_log import JsonFormatter

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(form: str) -> QueueListener:
    """Start logging in the form `text` or `json`. What was logged before the process ends is written."""
    written = logging.StreamHandler(sys.stderr)
    written.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    listener = QueueListener(lines, written)
    listener.start()
    atexit.register(listener.stop)
    logging.basicConfig(level=logging.WARNING, handlers=[Waiting(lines)])
    logging.getLogger("treadle").setLevel(logging.INFO)
    return listener


class Waiting(QueueHandler):
    """Hands records over as they are: they stay in this process, and the writer formats tracebacks."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record
