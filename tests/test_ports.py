"""Promises of the ports that tests give to daemons."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.ports import RANGE_PORTS, free_ports


def test_ports_in_a_row_are_not_given_out_twice_before_all_others_were() -> None:
    given = [free_ports(2) for _ in range(RANGE_PORTS // 4)]
    assert all(second == first + 1 for first, second in given)
    assert len({port for pair in given for port in pair}) == 2 * len(given)


def test_a_port_in_use_is_left_out() -> None:
    [port] = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert all(port not in free_ports(1) for _ in range(RANGE_PORTS))


def test_two_processes_that_run_tests_have_no_port_in_common() -> None:
    program = "from tests.ports import free_ports; print(*free_ports(1), flush=True); input()"
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        ours = {port for _ in range(RANGE_PORTS) for port in free_ports(1)}
        other.stdin.close()
    assert theirs not in ours
