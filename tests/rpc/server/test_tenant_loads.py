"""Promises of tenant_loads.py."""

import pytest

from kvstore.protocol.errors import QuotaExceeded
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.node_messages import ReleaseLeases
from kvstore.rpc.server.tenant_loads import InFlight, TenantLoads
from kvstore.security.quotas.quota import Quota, Quotas


def test_connections_over_quota_are_refused_until_one_ends() -> None:
    loads = TenantLoads()
    loads.set_quotas(Quotas(tenants={"red": Quota(connections=2)}))
    assert loads.enter("a", "red") is loads.enter("b", "red")
    with pytest.raises(QuotaExceeded, match=r"tenant 'red' has 2 connections here, its quota \(connections\)"):
        loads.enter("c", "red")
    loads.enter("d", "blue")
    loads.enter("e", "blue")
    assert loads.enter("a", "red").connections == 2, "who says so again is no other one"
    loads.check_integrity()
    assert loads.tenants() == {"red", "blue"}
    assert (loads.of("red"), loads.of("blue"), loads.of("green")) == ((2, 0), (2, 0), (0, 0))
    loads.leave("a")
    loads.leave("c")
    loads.enter("c", "red")
    assert loads.refused() == {"connections": 1, "requests_in_flight": 0}


def test_requests_over_quota_are_refused_and_counted() -> None:
    loads, quotas = TenantLoads(), Quotas(Quota(requests_in_flight=1))
    load = loads.enter("a", "red")
    assert load.limit is None
    loads.set_quotas(quotas)
    loads.set_quotas(quotas)
    load.begin()
    with pytest.raises(QuotaExceeded, match=r"tenant 'red' has 1 requests in flight here, its quota \(requests_in_fl"):
        load.begin()
    assert (loads.of("red"), loads.refused()["requests_in_flight"]) == ((1, 1), 1)
    load.requests -= 1
    load.begin()
    loads.leave("a")
    assert loads.refused() == {"connections": 0, "requests_in_flight": 1}


def asked(request_id: int, kind: int = Exists.TYPE, body_bytes: int = 10) -> FrameHeader:
    return FrameHeader(kind, request_id, 0, body_bytes, 0)


def test_requests_count_once_at_their_tenant_until_answered() -> None:
    loads, mine = TenantLoads(), InFlight()
    mine.check(asked(0))
    mine.begin(asked(1))
    loads.set_quotas(Quotas(Quota(requests_in_flight=2)))
    red, blue = loads.enter("a", "red"), loads.enter("b", "blue")
    mine.belong_to(red)
    mine.check(asked(0, ReleaseLeases.TYPE))
    for request in (asked(1), asked(0, ReleaseLeases.TYPE), asked(2)):
        mine.begin(request)
    assert red.requests == 2, "what gets no answer is no request"
    with pytest.raises(QuotaExceeded):
        mine.begin(asked(3))
    mine.end(3)
    mine.end(1)
    assert red.requests == 1
    mine.belong_to(blue)
    mine.end(2)
    assert (red.requests, blue.requests) == (0, 0)
    mine.begin(asked(4))
    mine.belong_to(None)
    mine.begin(asked(5))
    assert blue.requests == 0


def test_uncounted_only_without_quota_and_waiting_requests() -> None:
    loads, mine = TenantLoads(), InFlight()
    assert not mine.is_uncounted, "nobody's"
    mine.belong_to(loads.enter("a", "red"))
    assert mine.is_uncounted
    mine.begin(asked(1))
    assert not mine.is_uncounted
    mine.end(1)
    assert mine.is_uncounted
    loads.set_quotas(Quotas(Quota(requests_in_flight=2)))
    assert not mine.is_uncounted
