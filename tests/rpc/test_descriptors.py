"""Promises of descriptors.py."""

import os
import resource
import sys

import pytest

from kvstore.rpc.descriptors import INTERVAL_NS, RefusalLog, SpareDescriptor, allow_many_descriptors, max_accepted, open_files_limit


def test_limit_is_raised_to_what_the_system_allows() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    try:
        allow_many_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_half_of_the_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((256, 128), (1, 1), (resource.RLIM_INFINITY, sys.maxsize // 2)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, soft=soft: (soft, soft))
        assert max_accepted() == expected
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (1700, 1700))
    assert open_files_limit().startswith("1,700 open files")


def test_spare_descriptor_is_free_while_it_is_given_up() -> None:
    spare = SpareDescriptor()
    before = len(os.listdir("/proc/self/fd"))
    with spare.given_up():
        assert len(os.listdir("/proc/self/fd")) == before - 1
    assert len(os.listdir("/proc/self/fd")) == before
    spare.close()
    spare.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.promise("failures-typed")
def test_refusals_of_a_minute_are_one_line_with_their_number() -> None:
    log = RefusalLog()
    assert log.count("full", 5) == "refusing connections: full"
    assert [log.count("full", 5 + number) for number in range(233)] == [""] * 233
    assert log.count("full", 5 + INTERVAL_NS) == "refusing connections, 234 since 60 s ago: full"
    assert log.count("full", 6 + INTERVAL_NS) == ""
    assert log.total == 236


def test_each_reason_has_its_line() -> None:
    log = RefusalLog()
    assert [bool(log.count(reason, 5)) for reason in ("full", "no descriptor", "full")] == [True, True, False]
