"""Tests of retention.py: messages of hints."""

from collections.abc import Sequence

import pytest

from kvstore.client import retention
from kvstore.client.sync import Client
from kvstore.protocol.message import Message
from kvstore.protocol.retention import Retention
from tests.client.embedded import embedded


@pytest.mark.promise("no-wait-for-peers")
def test_a_hint_of_many_blocks_is_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the node serves others in between."""
    sent, message = list[int](), retention._message

    def counted(keys: Sequence[bytes], hint: Retention, cause: int) -> Message:
        sent.append(len(keys))
        return message(keys, hint, cause)

    monkeypatch.setattr(retention, "_message", counted)
    keys = [b"%d" % number for number in range(4106)]
    with embedded() as cluster, Client(cluster.address) as client:
        client.put_batch(keys, [b"value"] * len(keys))
        assert client.retain(keys, Retention(reuse_s=20.0)) == len(keys)
    assert sent == [4096, 10]
