"""Arguments are checked before anything is sent: the first effect would be I/O, the error comes before it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.operations import Operations
from kvstore.protocol.errors import InvalidArgument


@pytest.fixture
def operations() -> Operations:
    return Operations(ClientSettings(master="127.0.0.1:1", tenant="tenant", token="token", deadline_s=5.0))


def put(operations: Operations, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"keys": [b"k"], "values": [b"v"], "namespace": "", "parents": None, "ack": None, "deadline_s": None}
    arguments |= changes
    return operations.put(arguments.pop("keys"), arguments.pop("values"), **arguments)


REFUSED: list[Callable[[Operations], Any]] = [
    lambda o: put(o, keys=[b""]),
    lambda o: put(o, keys=[b"x" * 256]),
    lambda o: put(o, keys=["text"]),
    lambda o: put(o, keys=b"k"),
    lambda o: put(o, values=[]),
    lambda o: put(o, values=[b""]),
    lambda o: put(o, values=[np.ones((2, 3)).T]),
    lambda o: put(o, parents=[]),
    lambda o: put(o, namespace=7),
    lambda o: put(o, ack="soon"),
    lambda o: put(o, deadline_s=0),
    lambda o: o.get([b""], deadline_s=None),
    lambda o: o.get_into([b"k"], [], deadline_s=None),
    lambda o: o.get_into([b"k"], [b"read-only"], deadline_s=None),
    lambda o: o.open_view(b"", deadline_s=None),
    lambda o: o.exists([b""], deadline_s=None),
    lambda o: o.match_prefix([b""], deadline_s=None),
    lambda o: o.locate([b""], deadline_s=None),
    lambda o: o.remove([b""], force=False, deadline_s=None),
    lambda o: o.pin([b""], pinned=True, deadline_s=None),
]


@pytest.mark.parametrize("start", REFUSED)
def test_a_bad_argument_is_refused_before_anything_is_sent(operations: Operations, start: Callable[[Operations], Any]) -> None:
    with pytest.raises(InvalidArgument):
        next(start(operations))


@pytest.mark.parametrize("deadline_s", [0, -1, 3601, "soon", float("nan")])
def test_a_deadline_is_a_positive_number_of_at_most_an_hour(deadline_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="deadline_s"):
        Operations(ClientSettings(deadline_s=deadline_s))


def test_the_hello_names_the_tenant(operations: Operations) -> None:
    assert (operations.hello.tenant, operations.hello.token, operations.settings.deadline_s) == ("tenant", "token", 5.0)
