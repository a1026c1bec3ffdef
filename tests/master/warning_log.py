"""Waiting until the master's log says something, so that a test knows without sleeping that a retry is under way."""

import logging
import threading
from types import TracebackType


class WarningLog(logging.Handler):
    """While entered, watches `kvstore.master` for a message that contains `text`."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.WARNING)
        self._text = text
        self._said = threading.Event()

    def wait(self, *, deadline_s: float = 20.0) -> None:
        assert self._said.wait(deadline_s), f"{self._text!r} was not logged within {deadline_s} s"

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._said.set()

    def __enter__(self) -> "WarningLog":
        logging.getLogger("kvstore.master").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        logging.getLogger("kvstore.master").removeHandler(self)
