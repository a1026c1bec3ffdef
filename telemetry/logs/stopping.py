"""A daemon's last word: that it stops, and why."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.telemetry.logs.events import named


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
