"""Promises of ports.py: one host may run all of it, and defaults are what stands there."""

from kvstore.master.config import MasterSettings
from kvstore.protocol.ports import CONTROL, MASTER, PORTS, ROUTER, ports_table
from kvstore.router.config import RouterSettings


def test_no_two_ports_are_the_same_and_the_table_has_all() -> None:
    assert len({port.number for port in PORTS}) == len(PORTS)
    assert all(f"| {port.number} | `{port.daemon}` |" in ports_table() for port in PORTS)


def test_defaults_are_these_ports() -> None:
    """The control plane's is the one after, whatever `listen` is."""
    assert MasterSettings().listen == f"127.0.0.1:{MASTER.number}"
    assert (MasterSettings().control, MASTER.number + 1) == ("", CONTROL.number)
    assert RouterSettings().listen == f"127.0.0.1:{ROUTER.number}"
