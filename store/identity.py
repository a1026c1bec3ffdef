"""Who a node is, as it tells masters and clients."""

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself. `instance` differs in every process; `host_id` is the `rpc.address.socket_id` of `unix`; `http` is "" for
    none."""

    name: str
    version: str
    host_id: str
    unix: str
    tcp: str
    instance: int
    http: str = ""
    takes_traces: bool = False
    """The Trace messages of its master."""


def new_instance() -> int:
    return secrets.randbits(63) | 1
