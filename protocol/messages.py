"""Every message of the hot path and of the hand-over by its type number, and which of them are answers."""

from typing import Final

from kvstore.protocol.catalog_messages import (
    Claim,
    Coldest,
    Copied,
    Copy,
    Digests,
    Drain,
    Drop,
    Heard,
    Heartbeat,
    Hold,
    Publish,
    Revoke,
    Seek,
    TicketKey,
    Want,
)
from kvstore.protocol.event_messages import EventBatch, Events
from kvstore.protocol.handover_messages import Ask, Done, Greet, Part, Report, Show, Stop, Verdict
from kvstore.protocol.master_messages import (
    Cancel,
    Exists,
    Grants,
    Locations,
    Lookup,
    MatchPrefix,
    Nodes,
    NodeTable,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    Reserve,
)
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import (
    Abort,
    Blocks,
    Commit,
    Flush,
    HoldBlocks,
    Open,
    OpenAhead,
    Opened,
    OpenIndex,
    Put,
    PutAhead,
    Read,
    RegionList,
    Regions,
    Release,
    ReleaseHolds,
    SlabFds,
    Slabs,
)
from kvstore.protocol.session_messages import Count, Failure, Flags, Hello, Ok, Trace, Welcome

MESSAGES: Final[dict[int, type[Message]]] = {
    kind.TYPE: kind
    for kind in (
        Hello,
        Welcome,
        Failure,
        Ok,
        Flags,
        Count,
        Trace,
        Lookup,
        Locations,
        Exists,
        MatchPrefix,
        Reserve,
        Grants,
        Cancel,
        Remove,
        Pin,
        Nodes,
        NodeTable,
        RemoveMatching,
        PinFor,
        Replicate,
        Digests,
        Heartbeat,
        Heard,
        Seek,
        Want,
        Publish,
        Drop,
        Hold,
        Claim,
        Copy,
        Copied,
        Drain,
        TicketKey,
        Revoke,
        Coldest,
        Put,
        Open,
        Opened,
        Commit,
        Abort,
        Read,
        Blocks,
        Release,
        Slabs,
        SlabFds,
        Regions,
        RegionList,
        OpenIndex,
        Flush,
        HoldBlocks,
        ReleaseHolds,
        OpenAhead,
        PutAhead,
        Events,
        EventBatch,
        Greet,
        Ask,
        Show,
        Part,
        Stop,
        Report,
        Verdict,
        Done,
    )
}
"""Type number to message."""

REPLIES: Final = frozenset(
    kind.TYPE
    for kind in (Welcome, Failure, Ok, Flags, Count, Locations, Grants, NodeTable, Opened, Blocks, SlabFds, RegionList, EventBatch, Heard)
)
"""Types that answer a request. Both ends of one connection may ask."""

NO_REQUESTS: Final = REPLIES | {Trace.TYPE}
"""Types that ask for nothing: answers, and what is said ahead of a request. All others are requests."""

NOTICES: Final = frozenset({Release.TYPE, ReleaseHolds.TYPE})
"""Requests that have no answer, and 0 for their id."""
