"""Lines that daemons log to standard error: their form and level, the events that scripts may look for, the last line of a daemon.

Names and fields of events stay, whatever the text beside them says. Nothing secret is in any: no token, no value, no key.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

ROOT: Final = "kvstore"
"""The logger above all of ours."""

EVENTS: Final = {
    "daemon_stops": "a daemon ends: `why`",
    "log_level": "an operator changed the level of a logger: `of`, `to`, `by`",
    "node_registered": "at a master, a node is known from now on: `node`, `node_id`, `at`",
    "node_died": "at a master, a node was silent for too long, or its link broke: `node`, `node_id`",
    "node_stopped": "at a master, a node's process ended in an orderly way: `node`, `node_id`",
    "node_forgotten": "at a master, a dead node is removed because too many are away: `node`, `why`",
    "node_drained": "at a master, nothing is left of a drain, and the node can be stopped: `node`, `kept` blocks that come back with its "
    "disk only",
    "audit": "at a master, somebody changed something or was refused: `kind` and `actor` (operator, tenant, ... and the name of the token "
    "or certificate), `credential` (id of the token), `peer` (address), `via` (control, console, client, http, file, master), `action`, "
    "`target`, `old`, `new`, `result` (done, refused, failed), `detail`, `count` (0, or how many times within a minute)",
    "instance_died": "at a master, an inference engine was silent for too long: `instance`",
    "owner_elected": "a master owns the catalog from now on: `epoch`, `blocks`",
    "owner_deposed": "a master owns it no longer: `why`",
    "owner_followed": "a master follows another one, or, with an empty `owner`, nobody owns the catalog: `owner`, `epoch`",
    "partition_given_up": "a master gives up what it owns and is another one's share: `partition`",
    "registered": "at a node, a master knows it from now on: `epoch`, `node_id`",
    "forgotten": "at a node, the cluster had forgotten it (`kvstore forget`), and the `blocks` that it holds are dropped",
    "master_lost": "at a node, no master takes it: `why`; once until one does",
    "blocks_evicted": "at a node, at most once a minute and tier, what left since the line before: `tier`, `blocks`, `for_table` of them "
    "for want of room in the table, `for_quota` for their tenant's quota, `median_age_s` since they were read or put last",
    "node_ends": "a node ends, and what becomes of its blocks: `saved`, `lost`",
}
"""By name; what it means, and its fields."""

OF_EACH_LINE: Final = frozenset(("time", "level", "logger", "event", "message", "exception"))
"""What a line in JSON has beside the fields of its event."""


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


def named(event: str, **fields: Any) -> dict[str, Any]:
    """For a logger's `extra`: this line is that event, one of EVENTS."""
    assert event in EVENTS, event
    assert not OF_EACH_LINE & fields.keys(), "a field would take the place of what each line has"
    return {"event": event, "fields": fields}


@contextmanager
def stops(log: logging.Logger, what: str, came: Sequence[str]) -> Iterator[None]:
    """Around what a daemon does until it ends: log the event `daemon_stops` of this `what`, for the names of the signals that `came` by
    then, or for the error that it ends by, which is raised on."""
    why = ""
    try:
        yield
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        why = why or " ".join(came)
        log.info("this %s stops: %s", what, why, extra=named("daemon_stops", why=why))
