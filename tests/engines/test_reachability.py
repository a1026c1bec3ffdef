"""What an engine's log says of its store, of a real one and of none."""

import logging
import threading
from types import SimpleNamespace

import pytest

from kvstore.cli.tools.cluster import ClusterPlan
from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.engines.reachability import ReachabilityCheck, StoreHealth
from kvstore.protocol.errors import ConfigError, Full, KVStoreError, Unauthorized, Unreachable, Untrusted
from kvstore.testing.transfer.waiting import within
from tests.client.embedded import embedded
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
        return self

    def __exit__(self, *_: object) -> None:
        LOG.removeHandler(self)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (Unreachable("refused"), "cannot be reached (start it, or set `master`, and `tls_ca` if it needs TLS): Unreachable: refused"),
        (Unauthorized("no"), "refuses this engine (set `tenant` and `token`)"),
        (Untrusted("no"), "is not trusted"),
        (ConfigError("no"), "cannot be asked"),
        (Full("no"), "cannot be reached"),
    ],
)
def test_health_names_the_remedy(error: KVStoreError, remedy: str) -> None:
    with Lines() as lines:
        StoreHealth("kv:7440", LOG).saw(error)
        assert remedy in lines.lines[0]
        assert lines.lines[0].startswith("WARNING kvstore: the store at kv:7440 ")


def test_health_logs_changes_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    with Lines() as lines:
        health = StoreHealth("kv:7440", LOG)
        assert not health.is_away
        for error in (None, Unreachable("a"), Unreachable("b"), Unauthorized("c"), None, None, Unreachable("d")):
            health.saw(error)
    assert [line.split(": ")[0].split()[0] for line in lines.lines] == ["INFO"] + ["WARNING"] * 4
    assert [line.split(": ")[1].split(" (")[0] for line in lines.lines] == [
        "the store at kv:7440 answers",
        "the store at kv:7440 cannot be reached",
        "the store at kv:7440 refuses this engine",
        "the store at kv:7440 answers again",
        "the store at kv:7440 cannot be reached",
    ]


def test_check_of_a_wrong_address_warns_within_5_s() -> None:
    """Also where something accepts connections and does not answer."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with within(5), Client(address, settings=ClientSettings(connect_timeout_s=0.5)) as client, Lines() as lines:
        check = ReachabilityCheck(client, address, LOG)
        lines.wait(1, 60)
        assert check.is_away
        check.close()
    assert "cannot be reached" in lines.lines[0]


def test_check_says_once_when_the_store_is_back() -> None:
    with embedded(ClusterPlan(dram="16MiB", is_private=True)) as cluster, Client(cluster.address) as client, Lines() as lines:
        answers = iter([Unreachable("not yet"), Unreachable("still not")])

        def ping(*, deadline_s: float) -> object:
            if error := next(answers, None):
                raise error
            return client.ping(deadline_s=deadline_s)

        check = ReachabilityCheck(SimpleNamespace(ping=ping), cluster.address, LOG, interval_s=0.01)
        assert len(lines.wait(2, 60)) == 2
        assert not check.is_away
        check.close()
        check.close()
    assert "answers again" in lines.lines[1]


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


def test_check_of_a_broken_question_is_an_internal_error() -> None:
    def ping(*, deadline_s: float) -> None:
        raise ValueError("oops")

    with Lines() as lines:
        check = ReachabilityCheck(SimpleNamespace(ping=ping), "kv:1", LOG)
        assert "internal error: ValueError: oops" in lines.wait(1, 60)[0]
        check.close()
