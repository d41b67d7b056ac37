"""Log lines of the server and its engine: text for people, or one JSON object a line for machines.

A record's own facts are given as `extra={"facts": {...}}`; both forms show them. Never a key, never a prompt
unless the operator asked for prompts.

A thread writes. A reader of stderr that takes nothing, a terminal that is held or a pipe into a stopped program, would
otherwise stop the event loop, and with it every stream and every signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

QUEUED = 4096  # lines that may wait to be written
CLOSE_SECONDS = 1.0  # for the last of them


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_shown(value)}" for name, value in getattr(record, "facts", {}).items())
        line = f"{_stamp(record)} {record.levelname.lower():7} {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(value: object) -> str:
    """Some of it was written by clients: it must not look like a line, or a fact, of ours."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _stamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class StderrLines(logging.Handler):
    """Never waits: where stderr takes nothing, lines wait in a bounded queue and then are dropped and counted."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write what is held, within a moment."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            _write(line)
            if self._dropped and self._lines.empty():
                dropped, self._dropped = self._dropped, 0
                _write(f"{dropped} lines of the log were dropped: stderr took none")


def _write(line: str) -> None:
    """By its descriptor: a thread that holds the lock of `sys.stderr` would end the interpreter with an abort."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # full, gone or closed
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]


def set_up_logging(form: str, level: str) -> None:
    """Everything to stderr in one form; other libraries only when something is wrong."""
    handler = StderrLines()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    own = logging.getLogger("outrider")
    own.setLevel(level.upper())
