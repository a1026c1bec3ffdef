"""Unused reservations are cancelled at the master of a scripted cluster."""

from dataclasses import dataclass

from kvstore.protocol.errors import Unavailable
from kvstore.protocol.master_messages import CancelReservations
from tests.client.oracle import Oracle


@dataclass
class OverPut:
    key: bytes

    def unused(self) -> CancelReservations:
        return CancelReservations([self.key], [1])


def test_what_puts_that_are_over_did_not_use_is_given_back(oracle: Oracle) -> None:
    reservations = oracle.resources.reservations
    reservations.unused += [OverPut(b"a"), OverPut(b"b")]
    oracle.run(reservations.cancel_all_unused())
    assert [message.keys for message in oracle.sent(CancelReservations)] == [[b"a"], [b"b"]]
    assert not reservations.unused


def test_unsent_cancellations_are_left_to_expire(oracle: Oracle) -> None:
    reservations = oracle.resources.reservations
    reservations.unused.append(OverPut(b"a"))
    oracle.script[CancelReservations].append(Unavailable("gone"))
    oracle.run(reservations.cancel_all_unused())
    assert not reservations.unused


def test_failed_put_cancels_its_own_reservations(oracle: Oracle) -> None:
    """Each takes its time where the master is silent: of several threads whose puts ended together the last was late by all of theirs."""
    reservations, mine, others = oracle.resources.reservations, OverPut(b"a"), OverPut(b"b")
    reservations.unused += [others, mine]
    oracle.run(reservations.give_up(mine))
    assert [message.keys for message in oracle.sent(CancelReservations)] == [[b"a"]]
    assert list(reservations.unused) == [others]
