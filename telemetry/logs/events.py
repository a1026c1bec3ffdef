"""The events of the logs that a script may look for: their names and fields stay, whatever the text beside them says.

A line that is none of these is for people. Nothing secret is in any: no token, no value, no key.
"""

from typing import Any, Final

EVENTS: Final = {
    "daemon_stops": "a daemon ends: `why`",
    "log_level": "an operator changed the level of a logger: `of`, `to`, `by`",
    "node_registered": "at a master, a node is known from now on: `node`, `node_id`, `at`",
    "node_died": "at a master, a node was silent for too long, or its link broke: `node`, `node_id`",
    "node_stopped": "at a master, a node's process ended in an orderly way: `node`, `node_id`",
    "node_forgotten": "at a master, a dead node is removed because too many are away: `node`, `why`",
    "node_drained": "at a master, nothing is left of a drain, and the node can be stopped: `node`, `kept` blocks that come back with its "
    "disk only",
    "audit": "at a master, somebody changed something or was refused: `kind` and `actor` (operator, tenant, ... and the name of the token "
    "or certificate), `credential` (id of the token), `peer` (address), `via` (control, console, client, http, file, master), `action`, "
    "`target`, `old`, `new`, `result` (done, refused, failed), `detail`, `count` (0, or how many times within a minute)",
    "instance_died": "at a master, an inference engine was silent for too long: `instance`",
    "owner_elected": "a master owns the catalog from now on: `epoch`, `blocks`",
    "owner_deposed": "a master owns it no longer: `why`",
    "owner_followed": "a master follows another one, or, with an empty `owner`, nobody owns the catalog: `owner`, `epoch`",
    "partition_given_up": "a master gives up what it owns and is another one's share: `partition`",
    "registered": "at a node, a master knows it from now on: `epoch`, `node_id`",
    "forgotten": "at a node, the cluster had forgotten it (`kvstore forget`), and the `blocks` that it holds are dropped",
    "master_lost": "at a node, no master takes it: `why`; once until one does",
    "blocks_evicted": "at a node, at most once a minute and tier, what left since the line before: `tier`, `blocks`, `for_table` of them "
    "for want of room in the table, `for_quota` for their tenant's quota, `median_age_s` since they were read or put last",
    "node_ends": "a node ends, and what becomes of its blocks: `saved`, `lost`",
}
"""By name; what it means, and its fields."""

OF_EACH_LINE: Final = frozenset(("time", "level", "logger", "event", "message", "exception"))
"""What a line in JSON has beside the fields of its event."""


def named(event: str, **fields: Any) -> dict[str, Any]:
    """For a logger's `extra`: this line is that event, one of EVENTS."""
    assert event in EVENTS, event
    assert not OF_EACH_LINE & fields.keys(), "a field would take the place of what each line has"
    return {"event": event, "fields": fields}
