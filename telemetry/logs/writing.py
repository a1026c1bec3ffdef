"""How a line of the log looks, and from which level on there are any: for standard error, by the settings `log_level` and `log_format`."""

import json
import logging
import time
from typing import Any, Final

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
LEVEL_HELP: Final = "From which level on lines are logged, at run time by a POST to /debug/log-level: debug, info, warning, error."
FORMAT_HELP: Final = "How: text, or json, an object a line; events have the names and fields of docs/operations.md in both."
ROOT: Final = "kvstore"
"""The logger above all of ours."""


class TextLines(logging.Formatter):
    """`TIME LOGGER LEVEL TEXT`, and behind the text of an event its name and fields: `[node_died node=a node_id=1]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = super().formatMessage(record)
        event: str = getattr(record, "event", "")
        if not event:
            return text
        fields = "".join(f" {name}={_word(value)}" for name, value in record.__dict__["fields"].items())
        return f"{text} [{event}{fields}]"


class JsonLines(logging.Formatter):
    """An object a line: `time` (UTC), `level`, `logger`, `event` ("" for a line that is none), `message`, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", ""),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def write_logs(level: str, form: str) -> None:
    """Have the process's plain handlers, which `rpc.daemon.begin_logging` made, write so from now on."""
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:  # others are somebody's who embeds this
            handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.getLogger(ROOT).setLevel(level.upper())


def _word(value: object) -> str:
    """As one word: quoted where it is none."""
    text = str(value)
    return text if text and not set(text) & set(' "=[]\n\t') else json.dumps(text)
