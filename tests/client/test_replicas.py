"""Promises of replicas.py, against a scripted master: what a put that asks for replicas says to it, and how long it waits."""

import pytest

from kvstore.client.metadata_requests import replicate
from kvstore.protocol.errors import DeadlineExceeded, Unavailable
from kvstore.protocol.master_messages import Replicate
from kvstore.protocol.message import REPLICAS_NO_BLOCK, REPLICAS_NO_NODES, REPLICAS_PENDING, REPLICAS_REACHED
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.deadline import Deadline
from tests.client.oracle import Oracle, OracleChannel


def run(oracle: Oracle, *answers: list[int], waits: bool, deadline_s: float = 5.0) -> list[list[bytes]]:
    """The keys of each question."""
    oracle.script[Replicate].extend(Flags(bytes(answer)) for answer in answers)
    oracle.run(replicate(oracle.resources.daemons, [b"a", b"b", b"a"], 2, Deadline(deadline_s), waits=waits))
    assert {message.count for message in oracle.sent(Replicate)} == {2}
    return [message.keys for message in oracle.sent(Replicate)]


def test_whoever_does_not_wait_asks_once_whatever_the_answer(oracle: Oracle) -> None:
    assert run(oracle, [REPLICAS_NO_NODES, REPLICAS_NO_BLOCK], waits=False) == [[b"a", b"b"]]
    assert oracle.slept_s == 0


def test_whoever_waits_asks_for_the_rest_until_all_are_there(oracle: Oracle) -> None:
    answers = [REPLICAS_PENDING] * 2, [REPLICAS_PENDING, REPLICAS_REACHED], [REPLICAS_PENDING], [REPLICAS_REACHED]
    assert run(oracle, *answers, waits=True) == [[b"a", b"b"], [b"a", b"b"], [b"a"], [b"a"]]
    assert oracle.slept_s == pytest.approx(0.001 + 0.002 + 0.004)


@pytest.mark.parametrize(("flag", "why"), [(REPLICAS_NO_NODES, "fewer than 2 nodes accept blocks"), (REPLICAS_NO_BLOCK, "evicted")])
def test_what_cannot_come_is_not_waited_for(oracle: Oracle, flag: int, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        run(oracle, [REPLICAS_REACHED, flag], waits=True)


def test_it_waits_no_longer_than_its_deadline(oracle: Oracle) -> None:
    def not_yet(_channel: OracleChannel, message: Replicate) -> Flags:
        oracle.script[Replicate].append(not_yet)
        return Flags(bytes((REPLICAS_PENDING,)) * len(message.keys))

    oracle.script[Replicate].append(not_yet)
    with pytest.raises(DeadlineExceeded):
        run(oracle, waits=True, deadline_s=0.02)
