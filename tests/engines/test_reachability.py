"""Log lines of an engine about its store, with a real store and with an unreachable one."""

import logging
import threading
from types import SimpleNamespace

import pytest

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.engines.reachability import ReachabilityCheck
from kvstore.protocol.errors import ConfigError, Full, Unauthorized, Unreachable, Untrusted
from kvstore.testing.transfer.awaited import within
from tests.ports import free_ports

LOG = logging.getLogger("test.reachability")


class Lines(logging.Handler):
    """A context manager: the lines that LOG is given, each as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._has_come = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._has_come:
            self.lines.append(f"{record.levelname} {record.getMessage()}")
            self._has_come.notify_all()

    def wait(self, count: int, deadline_s: float) -> list[str]:
        with self._has_come:
            assert self._has_come.wait_for(lambda: len(self.lines) >= count, deadline_s), self.lines
            return self.lines

    def __enter__(self) -> "Lines":
        LOG.addHandler(self)
        LOG.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        LOG.removeHandler(self)


def logged(*answers: Exception | None) -> list[str]:
    """Lines of a check whose pings end so, one after another."""
    left, is_over = iter(answers), threading.Event()

    def ping(*, deadline_s: float) -> None:
        error = next(left, is_over)
        if error is is_over:
            is_over.set()
        elif isinstance(error, Exception):
            raise error

    with Lines() as lines:
        check = ReachabilityCheck(SimpleNamespace(ping=ping), "kv:7440", LOG, interval_s=0.001)
        assert is_over.wait(60)
        check.close()
        check.close()
    return lines.lines


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (Unreachable("refused"), "cannot be reached (start it, or set `master`, and `tls_ca` if it needs TLS): Unreachable: refused"),
        (Unauthorized("no"), "refuses this engine (set `tenant` and `token`)"),
        (Untrusted("no"), "is not trusted"),
        (ConfigError("no"), "cannot be used"),
        (Full("no"), "cannot be reached"),
        (ValueError("oops"), "internal error: ValueError: oops"),
    ],
)
def test_check_names_the_remedy(error: Exception, remedy: str) -> None:
    line = logged(error)[0]
    assert remedy in line
    assert line.startswith("WARNING kvstore: the store at kv:7440 ")


def test_check_logs_changes_only() -> None:
    lines = logged(None, Unreachable("a"), Unreachable("b"), Unauthorized("c"), None, None, Unreachable("d"), None)
    assert [line.split(" (")[0] for line in lines] == [
        "INFO kvstore: the store at kv:7440 answers",
        "WARNING kvstore: the store at kv:7440 cannot be reached",
        "WARNING kvstore: the store at kv:7440 refuses this engine",
        "WARNING kvstore: the store at kv:7440 answers again",
        "WARNING kvstore: the store at kv:7440 cannot be reached",
        "WARNING kvstore: the store at kv:7440 answers again",
    ]


def test_check_of_a_wrong_address_warns_within_5_s() -> None:
    """Also where something accepts connections and does not answer."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with within(5), Client(address, settings=ClientSettings(connect_timeout_s=0.5)) as client, Lines() as lines:
        check = ReachabilityCheck(client, address, LOG)
        lines.wait(1, 60)
        assert check.is_unreachable
        check.close()
    assert "cannot be reached" in lines.lines[0]


def test_check_closed_during_a_ping_logs_nothing() -> None:
    entered, is_closing = threading.Event(), threading.Event()

    def ping(*, deadline_s: float) -> None:
        entered.set()
        assert is_closing.wait(10)
        raise ValueError("the client is closed")

    with Lines() as lines:
        check = ReachabilityCheck(SimpleNamespace(ping=ping), "kv:1", LOG)
        assert entered.wait(10)
        check._closed.set()
        is_closing.set()
        check.close()
    assert lines.lines == []
