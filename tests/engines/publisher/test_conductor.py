"""Promises of conductor.py: requests as Mooncake's reference and its clients send them, and responses in which each finds its members."""

import struct
from typing import Any

import pytest

from kvstore.engines.publisher.conductor import matches, read_query, read_registration, read_unregistration, registered, unregistered
from kvstore.engines.publisher.prefix_table import Context, InstanceMatch, RankMatch, Service
from kvstore.protocol.errors import InvalidArgument

REFERENCE: dict[str, Any] = {
    "endpoint": "tcp://1.1.1.1:5557",
    "replay_endpoint": "tcp://1.1.1.1:5558",
    "type": "vLLM",
    "modelname": "deepseek",
    "lora_name": "sql-adapter",
    "tenant_id": "default",
    "instance_id": "vllm-prefill-node1",
    "block_size": 128,
    "dp_rank": 0,
    "additionalsalt": "w8a8",
}
"""A registration as the reference has it."""
PROXY: dict[str, Any] = {
    "endpoint": "tcp://10.0.0.1:5557",
    "type": "vLLM",
    "modelname": "qwen",
    "instance_id": "prefill-0",
    "block_size": 16,
    "dp_rank": 1,
    "tenant_id": "default",
    "lora_name": "",
    "hash_profile": {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"},
}
"""As Mooncake's example proxy sends it."""
QUERY: dict[str, Any] = {"model": "qwen", "block_size": 16, "token_ids": [101, 15, 100]}


def test_registrations_of_both_forms_are_read() -> None:
    context = Context("default", "deepseek", "sql-adapter", "w8a8", 128)
    assert read_registration(REFERENCE) == Service(context, "vllm-prefill-node1", 0, "tcp://1.1.1.1:5557", "tcp://1.1.1.1:5558")
    assert read_registration(PROXY) == Service(Context("default", "qwen", "", "", 16), "prefill-0", 1, "tcp://10.0.0.1:5557", "")


def test_queries_of_both_forms_are_read() -> None:
    query = read_query(QUERY | {"tenant_id": None, "lora_name": "a", "cache_salt": "s", "instance_id": "i"})
    assert (query.context, query.token_ids, query.instance) == (Context("default", "qwen", "a", "s", 16), [101, 15, 100], "i")
    packed = read_query(QUERY | {"token_ids": struct.pack("<3i", 101, 15, 100), "lora_name": ""})
    assert (packed.context, packed.token_ids, packed.instance) == (Context("default", "qwen", "", "", 16), [101, 15, 100], None)


def test_unregistrations_name_the_service() -> None:
    service = read_registration(PROXY)
    assert read_unregistration({"instance_id": "prefill-0", "dp_rank": 1}) == service.name == "prefill-0|default|1"
    assert registered(service) == {"status": "registered successfully", "instance_id": "prefill-0"}
    assert unregistered(service) == {"status": "unregistered successfully", "removed_instances": ["prefill-0|default|1"]}


def test_response_has_the_members_of_both_forms() -> None:
    match = InstanceMatch({0: RankMatch(128, 256, 256), 1: RankMatch(64, 64, 64)}, {"gpu": 128, "cpu": 192, "disk": 0})
    response = matches("default", {"node1": match})
    assert response["default"] == response["instances"]
    found = response["instances"]["node1"]
    assert {name: found[name] for name in ("longest_matched", "GPU", "DP", "CPU", "DISK")} == {
        "longest_matched": 256,
        "GPU": 128,
        "DP": {"0": 128, "1": 64},
        "CPU": 192,
        "DISK": 0,
    }
    assert {name: found[name] for name in ("dp", "rank_matches", "gpu", "cpu", "disk")} == {
        "dp": {"0": 128, "1": 64},
        "rank_matches": {"0": {"gpu": 128, "cpu": 256, "disk": 256}, "1": {"gpu": 64, "cpu": 64, "disk": 64}},
        "gpu": 128,
        "cpu": 256,
        "disk": 256,
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"type": "Mooncake"}, "type is 'Mooncake'"),
        ({"type": None}, "type is None"),
        ({"modelname": ""}, "modelname is ''"),
        ({"modelname": 5}, "modelname is 5"),
        ({"lora_name": 5}, "lora_name is 5"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "block_size is True"),
        ({"dp_rank": -1}, "dp_rank is -1"),
        ({"dp_rank": None}, "dp_rank is None"),
    ],
)
def test_malformed_registration_names_the_member(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        read_registration(REFERENCE | changed)


@pytest.mark.parametrize("tokens", [None, "1 2", [1.5], [True], [1 << 31], b"12345"])
def test_malformed_token_ids_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidArgument, match="token_ids"):
        read_query(QUERY | {"token_ids": tokens})


def test_body_that_is_no_object_is_refused() -> None:
    for read in (read_registration, read_unregistration, read_query):
        with pytest.raises(InvalidArgument, match="not an object"):
            read([])
