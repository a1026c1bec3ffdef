"""Registry of frame messages by type number, and which of them are responses."""

from typing import Final

from kvstore.protocol import catalog_messages, event_messages, handover_messages, master_messages, node_messages, session_messages
from kvstore.protocol.catalog_messages import HeartbeatResponse
from kvstore.protocol.event_messages import EventBatch
from kvstore.protocol.master_messages import Locations, NodeTable, ReserveReply
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import (
    ExportSlabsReply,
    MapSlabsReply,
    OpenSlotsReply,
    ReadBlocksReply,
    ReleaseHolds,
    ReleaseLeases,
)
from kvstore.protocol.session_messages import Count, Failure, Flags, Ok, Trace, Welcome

_MODULES: Final = (session_messages, master_messages, catalog_messages, node_messages, event_messages, handover_messages)
MESSAGES: Final[dict[int, type[Message]]] = {
    kind.TYPE: kind
    for module in _MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}
"""Type number to message."""

REPLIES: Final = frozenset(
    kind.TYPE
    for kind in (
        Welcome,
        Failure,
        Ok,
        Flags,
        Count,
        Locations,
        ReserveReply,
        NodeTable,
        OpenSlotsReply,
        ReadBlocksReply,
        MapSlabsReply,
        ExportSlabsReply,
        EventBatch,
        HeartbeatResponse,
    )
)
"""Types that answer a request. Both ends of one connection may send requests."""

NO_REQUESTS: Final = REPLIES | {Trace.TYPE}
"""Responses, and Trace, which precedes a request. All other types are requests."""

NOTICES: Final = frozenset({ReleaseLeases.TYPE, ReleaseHolds.TYPE})
"""One-way messages: no response, request id 0."""
