"""What a client asks of the cluster as a whole, by gRPC, which is loaded when it is asked for: who moves blocks needs none of it."""

from typing import Any

from kvstore.client.arguments import check_limit, namespace_text
from kvstore.client.config import ClientSettings
from kvstore.rpc.deadline import Deadline


def status(settings: ClientSettings, deadline: Deadline) -> dict[str, Any]:
    """All that the master knows of the cluster, as `kvstore status --json` prints it. Raises as Control.find."""
    from kvstore.client.control import as_dict, cluster_status

    return as_dict(cluster_status(settings, deadline))


def keys(settings: ClientSettings, deadline: Deadline, namespace: Any, limit: int | None) -> list[bytes]:
    """The tenant's keys. Raises InvalidArgument, and as Control.find and Control.keys."""
    from kvstore.client.control import Control

    check_limit(limit)
    text = None if namespace is None else namespace_text(namespace)
    with Control.find(settings, deadline) as control:
        return [stored.key for stored in control.keys(text, limit=limit or 0, deadline=deadline)]
