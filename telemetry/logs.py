"""Log lines of daemons on standard error: formats, levels, and named events for scripts.

Names and fields of events are stable; texts are not. No line contains a token, a value or a key.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

ROOT: Final = "kvstore"
"""Parent of all loggers of this project."""

EVENTS: Final = {
    "daemon_stops": "a daemon stops: `why`",
    "log_level": "an operator changed the level of a logger: `of`, `to`, `by`",
    "node_registered": "at a master, a node registered: `node`, `node_id`, `at`",
    "node_died": "at a master, a node missed its heartbeats, or its connection broke: `node`, `node_id`",
    "node_stopped": "at a master, a node shut down cleanly: `node`, `node_id`",
    "node_forgotten": "at a master, a dead node was removed because too many are dead: `node`, `why`",
    "node_drained": "at a master, a drain is complete, and the node can be stopped: `node`, `kept` blocks that return with its disk only",
    "audit": "at a master, a change or a refused request: `kind` and `actor` (operator, tenant, ... and the name of the token "
    "or certificate), `credential` (id of the token), `peer` (address), `via` (control, console, client, http, file, master), `action`, "
    "`target`, `old`, `new`, `result` (done, refused, failed), `detail`, `count` (0, or how many times within a minute)",
    "instance_died": "at a master, an inference engine stopped reporting: `instance`",
    "owner_elected": "a master became the owner of the catalog: `epoch`, `blocks`",
    "owner_deposed": "a master lost the ownership: `why`",
    "owner_followed": "a master follows another owner; an empty `owner`: the catalog has none: `owner`, `epoch`",
    "partition_given_up": "a master hands a partition over to another one: `partition`",
    "registered": "at a node, it registered with a master: `epoch`, `node_id`",
    "forgotten": "at a node, the cluster had removed it (`kvstore forget`), and its `blocks` are dropped",
    "master_lost": "at a node, no master accepts it: `why`; logged once per outage",
    "blocks_evicted": "at a node, evictions since the last line, once a minute and tier: `tier`, `blocks`, `for_table` of them "
    "because the block table was full, `for_quota` for their tenant's quota, `median_age_s` since their last access",
    "node_ends": "a node shuts down; its blocks: `saved`, `lost`",
}
"""Meaning and fields of each event, by name."""

LINE_FIELDS: Final = frozenset(("time", "level", "logger", "event", "message", "exception"))
"""Fields of every JSON line, beside those of its event."""


class TextLines(logging.Formatter):
    """Text format: `TIME LOGGER LEVEL TEXT`, followed by an event's name and fields: `[node_died node=a node_id=1]`."""

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
    """JSON format, an object per line: `time` (UTC), `level`, `logger`, `event` ("" if none), `message`, and the
    event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", ""),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_logs(level: str, form: str) -> None:
    """Set level and format of the handlers that `rpc.daemon.begin_logging` made."""
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:  # other handlers belong to an embedding program
            handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.getLogger(ROOT).setLevel(level.upper())


def _word(value: object) -> str:
    """As one word, quoted if it contains separators."""
    text = str(value)
    return text if text and not set(text) & set(' "=[]\n\t') else json.dumps(text)


def named(event: str, **fields: Any) -> dict[str, Any]:
    """`extra` of a log call: marks the line as this event, a key of EVENTS."""
    assert event in EVENTS, event
    assert not LINE_FIELDS & fields.keys(), "a field collides with one of every line"
    return {"event": event, "fields": fields}


@contextmanager
def stops(log: logging.Logger, what: str, came: Sequence[str]) -> Iterator[None]:
    """Context around a daemon's life: logs `daemon_stops` of this `what` at its end, with the signals in `came`, or
    with the error that ended it, which is re-raised."""
    why = ""
    try:
        yield
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        why = why or " ".join(came)
        log.info("this %s stops: %s", what, why, extra=named("daemon_stops", why=why))
