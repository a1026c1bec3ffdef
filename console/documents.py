"""Other documents of the page: hosts with their NICs and GPUs, and what the directory holds. Pure: from messages to what JSON takes."""

from typing import Any

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ProtocolError
from kvstore.transfer.topology.json_form import as_json, parse_topology


def host(found: pb.NodeTopology) -> dict[str, Any]:
    """A node's host: `topology` as the node told it (docs/topology.md), or null and in `note` why."""
    topology, note = None, ""
    if not found.topology:
        note = "it has not told its topology"
    else:
        try:
            topology = as_json(parse_topology(found.topology))
        except ProtocolError as error:  # one node of another release must not hide the others
            note = f"its topology cannot be read: {error}"
    return {"node": found.name, "state": found.state, "topology": topology, "note": note}


def contents(reply: pb.ContentsReply) -> dict[str, Any]:
    """Namespaces, and the tree of one of them as segments: `parent` is an index of the list, null for one that begins a prompt."""
    return {
        "namespaces": [
            {
                "tenant": one.tenant,
                "namespace": one.namespace,
                "pinned": one.pinned,
                "model": one.model,
                "layout": one.layout,
                "weights": one.weights,
                "read_age_s": one.read_age_s if one.HasField("read_age_s") else None,
                "users": list(one.users),
                "is_used": one.is_used,
                "is_retired": one.is_retired,
                **_held(one.held),
            }
            for one in reply.namespaces
        ],
        "segments": [
            {
                "parent": one.parent - 1 if one.parent else None,
                "key": one.key.hex(),
                "subtree_bytes": one.subtree_bytes,
                "branches": one.branches,
                "reads_per_s": one.reads_per_s,
                "subtree_reads_per_s": one.subtree_reads_per_s,
                **_held(one.held),
            }
            for one in reply.segments
        ],
    }


def slow_request(one: pb.SlowRequest) -> dict[str, Any]:
    """A slow request."""
    return {
        "tenant": one.tenant,
        "operation": one.operation,
        "duration_s": one.duration_us / 1e6,
        "time_s": one.time_s,
        "at": one.at,
        "peer": one.peer,
    }


def _held(held: pb.Held) -> dict[str, int]:
    return {
        "blocks": held.blocks,
        "bytes": held.bytes,
        "hbm_bytes": held.hbm_bytes,
        "dram_bytes": held.dram_bytes,
        "nvme_bytes": held.nvme_bytes,
    }
