"""Of every folder of tests: how Hypothesis looks for examples, and a real etcd, shared by the session or one's own to kill."""

import gc
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.etcd_server import EtcdServer

pytest.register_assert_rewrite("tests.master.catalogs.conformance")

# Of torch, here and in programs that tests start: its threads spin for one another, ten times as slow where others use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# If a shell exports it, tables would be cut to it, also those of programs that tests start.
os.environ.pop("COLUMNS", None)

# The same examples each time, and none of Hypothesis' time limits: a test fails for what the code does, not for what else the machine does.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# pytest --hypothesis-profile=search: other examples each time.
settings.register_profile("search", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")


# In the background of a shell without job control SIGINT is ignored, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Imported and collected objects stay. Garbage collection over them takes a twentieth of the time of collecting tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Collections of garbage, some of which tests begin, need not walk what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """The session's etcd. Tests share it: each keeps to a prefix of its own, and none may stop it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), syncs=False)
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def etcd_url(etcd: EtcdServer) -> str:
    """`etcd://HOST:PORT` of the session's etcd; a test adds `/PREFIX`."""
    return f"etcd://{etcd.host_port}"


@pytest.fixture
def etcd_server_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EtcdServer]]:
    """Makes started servers of the test's own, to stop, kill and start again; takes EtcdServer's arguments but the folder."""
    servers: list[EtcdServer] = []

    def start(*extra_flags: str, tls: bool = False) -> EtcdServer:
        servers.append(EtcdServer(tmp_path_factory.mktemp("etcd"), *extra_flags, tls=tls, syncs=False))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.remove()
