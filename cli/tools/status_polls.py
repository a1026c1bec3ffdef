"""Repeated requests of the cluster's status, across failovers of masters."""

import time
from collections.abc import Iterator

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Unavailable


def poll_status(settings: ClientSettings, *, answered_s: float) -> Iterator[pb.StatusReply | None]:
    """Yield the cluster's status at each poll, across failovers of masters; None while no master is reachable.

    `answered_s`: monotonic time at which a master answered before. Raises Unavailable once deadline_s without an answer are over.
    """
    while True:
        try:
            with Control.find(settings) as control:
                while True:
                    status = control.status()
                    answered_s = time.monotonic()
                    yield status
        except Unavailable:
            if time.monotonic() > answered_s + settings.deadline_s:
                raise
        yield None
