"""Promises of requests.py."""

from kvstore.protocol.errors import Full, KVStoreError
from kvstore.protocol.master_messages import MatchPrefix
from kvstore.protocol.session_messages import Ok
from kvstore.telemetry.metrics.requests import OPERATIONS, Requests, in_words


def test_operations_are_named_by_their_messages() -> None:
    assert OPERATIONS[MatchPrefix.TYPE] == "match_prefix"
    assert Ok.TYPE not in OPERATIONS
    assert in_words("KVStoreError") == "kvstore_error"


def test_answers_are_counted_by_operation_and_refusals_by_reason() -> None:
    requests = Requests()
    for _ in range(2):
        requests.answered(MatchPrefix.TYPE, 1000)
    requests.answered(250, 1000)  # nothing that anybody can ask
    requests.refused(Full("no room"))
    requests.refused(Full("no room"))
    requests.refused(KVStoreError("internal"))
    assert {name: sum(counts.counts) for name, counts in requests.durations().items()} == {("match_prefix",): 2}
    assert requests.refusals() == {("full",): 2, ("kvstore_error",): 1}
