"""What a message or a call does, in words of a user, for refusals."""

from typing import Final

ACTIONS: Final = {
    "Lookup": "look blocks up",
    "Exists": "look blocks up",
    "MatchPrefix": "look blocks up",
    "Nodes": "read blocks",
    "Read": "read blocks",
    "Slabs": "read blocks in shared memory",
    "Slabs for writing": "put blocks",
    "OpenIndex": "read blocks in shared memory",
    "HoldBlocks": "hold blocks",
    "Events": "record what happens to blocks",
    "Reserve": "put blocks",
    "Put": "put blocks",
    "PutAhead": "put blocks",
    "Open": "put blocks",
    "OpenAhead": "put blocks",
    "Commit": "put blocks",
    "Flush": "put blocks",
    "Remove": "remove blocks",
    "RemoveMatching": "remove blocks by namespace or pattern",
    "Pin": "pin blocks",
    "PinFor": "pin blocks",
    "Replicate": "change the number of replicas",
    "Register": "join as a node",
    "Status": "see the cluster's status",
    "Topologies": "see the nodes' topologies",
    "Forget": "forget a node",
    "Drain": "drain a node",
    "SetQuota": "set quotas",
    "ClearQuota": "clear quotas",
    "ListKeys": "list keys",
    "Contents": "list namespaces",
    "ReportWeights": "report weights",
    "Weights": "list weights",
    "RetireWeights": "retire weights",
    "PinNamespace": "pin namespaces",
    "RemoveNamespace": "remove namespaces",
    "Report": "report an instance",
    "Leave": "report an instance",
    "Schedule": "have requests scheduled",
    "Instances": "list instances",
}
"""By the name of the message or call. Messages between daemons have none: their names are shown."""


def action(name: str) -> str:
    """As in "may not ..."."""
    return ACTIONS.get(name, f"send {name}")
