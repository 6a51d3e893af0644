"""Log lines of both processes on standard error, plain or as JSON objects. Prompts, replies and keys are never logged.

A record may carry ``fields`` (``extra={"fields": {...}}``): members of the JSON object, ``name=value`` in plain lines.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

_ALWAYS = ("serve.requests", "serve.engine", "serve.model", "serve.drafter", "serve.kernels")
"""Loggers whose lines of level INFO plain logs hold too."""


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, message, the record's own fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class PlainFormatter(logging.Formatter):
    """``LEVEL logger: message name=value ...``; values with spaces are quoted."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        said = [f"{name}={_plain(value)}" for name, value in _fields(record).items() if value is not None]
        return " ".join([super().formatMessage(record), *said])


def set_up_logging(as_json: bool) -> None:
    """Both forms have a line for each answered request, and for what a start decided (which kernels, and why not the
    quicker ones); only JSON has one for everything else that was asked."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    logging.basicConfig(level=logging.INFO if as_json else logging.WARNING, handlers=[handler], force=True)
    for name in _ALWAYS:
        logging.getLogger(name).setLevel(logging.INFO)


def json_line(text: str, logger: str) -> str:
    """A line that a library or a crash report wrote, as a JSON line; one that is JSON stays as it is."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError:
        pass
    now = datetime.now(timezone.utc).timestamp()
    return json.dumps({"time": _timestamp(now), "level": "warning", "logger": logger, "message": text})


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _plain(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text) if " " in text else text
