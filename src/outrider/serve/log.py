"""Log lines of the server and its engine: text for people, or one JSON object a line for machines.

A record's own facts are given as `extra={"facts": {...}}`; both forms show them. Never a key, never a prompt
unless the operator asked for prompts.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


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


def set_up_logging(form: str, level: str) -> None:
    """Everything to stderr in one form; other libraries only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    own = logging.getLogger("outrider")
    own.setLevel(level.upper())
