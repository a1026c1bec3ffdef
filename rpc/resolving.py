"""A host's addresses, looked up outside of the loop: a name server may take its time, and the loop has others to serve."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from kvstore.rpc.address import Address, not_a_name
from kvstore.rpc.reactor import Reactor

Found = list[tuple[int, Any]]
"""(family, the address as its sockets take it), the preferred first; at least one."""


def resolve(reactor: Reactor, address: Address, on_found: Callable[[Found | OSError], None]) -> None:
    """Call `on_found` once, in the loop: at once for an IP address, else after a thread has asked the system's resolver, which limits how
    long that takes. Not at all if the reactor is closed by then. For the loop's thread."""
    try:
        on_found(_look_up(address, socket.AI_NUMERICHOST))
    except (socket.gaierror, UnicodeError):
        threading.Thread(target=_ask, args=(reactor, address, on_found), name="resolve", daemon=True).start()


def _ask(reactor: Reactor, address: Address, on_found: Callable[[Found | OSError], None]) -> None:
    found: Found | OSError
    try:
        found = _look_up(address, 0)
    except UnicodeError as error:
        found = not_a_name(error)
    except OSError as error:
        found = error
    reactor.call_soon(lambda: on_found(found))


def _look_up(address: Address, flags: int) -> Found:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, name) for family, _, _, _, name in found]
