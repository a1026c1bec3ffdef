"""Promises of the hosts around a router that faults of networks are made with."""

import subprocess
import sys

import pytest

from kvstore.transfer.testing.waiting import PATIENCE_S
from tests.faults.hosts import StarHosts
from tests.namespaces import namespaces, run, why_not

TRY_S = 0.5
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7777), float(sys.argv[2])).close()"
LISTEN = """
import socket
listener = socket.create_server(("", 7777))
print("ready", flush=True)
while True:
    listener.accept()[0].close()
"""

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def reaches(hosts: StarHosts, source: int, target: int, *, timeout_s: float = PATIENCE_S) -> bool:
    try:
        run([*hosts.prefix(source), sys.executable, "-c", CONNECT, hosts.address(target), str(timeout_s)])
    except RuntimeError as error:
        if "timed out" not in str(error):
            raise
        return False
    return True


def test_hosts_reach_one_another_but_where_it_is_cut_until_it_is_mended() -> None:
    with StarHosts(3) as hosts:
        listeners = [
            subprocess.Popen([*hosts.prefix(host), sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) for host in range(3)
        ]
        try:
            for listener in listeners:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "ready\n"
            assert all(reaches(hosts, a, b) for a, b in hosts.ways(0))
            hosts.cut([(0, 1)])
            assert not reaches(hosts, 0, 1, timeout_s=TRY_S)
            assert not reaches(hosts, 1, 0, timeout_s=TRY_S), "the answer has no way back"
            assert reaches(hosts, 0, 2)
            hosts.cut(hosts.ways(0))
            assert not reaches(hosts, 0, 2, timeout_s=TRY_S)
            assert reaches(hosts, 1, 2)
            hosts.mend(hosts.ways(0))
            assert reaches(hosts, 2, 0)
            assert not reaches(hosts, 0, 1, timeout_s=TRY_S), "that way was cut twice"
            hosts.mend([(0, 1)])
            assert reaches(hosts, 0, 1)
        finally:
            for listener in listeners:
                with listener:
                    listener.kill()


def test_nothing_of_them_stays() -> None:
    with StarHosts(2) as hosts:
        names = set(hosts.names)
        assert names <= set(namespaces())
    assert not names & set(namespaces())
    hosts.close()


def test_a_process_can_go_to_a_host() -> None:
    script = "import sys; from tests.faults.hosts import StarHosts\nwith StarHosts(2) as hosts:\n    hosts.enter(1); import subprocess\n"
    script += "    sys.stdout.write(subprocess.run(['ip', '-4', '-o', 'address'], capture_output=True, text=True).stdout)\n"
    assert "10.88.1.2/24" in run([sys.executable, "-c", script])
