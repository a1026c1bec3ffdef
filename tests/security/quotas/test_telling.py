"""Promises of telling.py."""

import pytest

from kvstore.protocol import control_pb2 as pb
from kvstore.security.quotas.quota import NAMES, UNLIMITED, Quota, Quotas
from kvstore.security.quotas.telling import as_message, from_message

ALL = Quota(**{name: number for number, name in enumerate(NAMES)})


@pytest.mark.parametrize("quotas", [UNLIMITED, Quotas(ALL), Quotas(Quota(pins=0), {"red": ALL, "blue": Quota()})])
def test_what_is_told_is_what_is_heard(quotas: Quotas) -> None:
    message = pb.Quotas.FromString(as_message(quotas, quotas.version).SerializeToString())
    assert from_message(message) == quotas
    assert message.version == quotas.version
