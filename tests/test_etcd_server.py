"""Promises of the etcd that tests run on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer


def test_without_the_etcd_program_the_error_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="`make test` installs it"):
        EtcdServer(tmp_path)


def test_an_etcd_that_does_not_start_quotes_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        EtcdServer(tmp_path, "--no-such-flag").start()


def test_restart_keeps_the_ports_and_makes_a_new_process(etcd_server_factory: Callable[..., EtcdServer]) -> None:
    server = etcd_server_factory()
    pid, host_port = server.pid, server.host_port
    server.restart()
    assert server.pid != pid
    assert server.host_port == host_port
