"""Messages between the ranks of engines that hand KV cache over: who wants which blocks where, what has arrived, and what failed.

They carry no cache: bytes go by the transfer engine. Answers are Ok or Failure. A request id is the serving
system's own, 1 to 255 bytes, and travels whole.
"""

from typing import Final

from kvstore.protocol.message import U8, U32, U64, CountedBlobs, CountedU8s, CountedU64s, Message, Text, message

PUSH: Final = 1
"""The sender writes one-sided into the regions that Ask names."""
PULL: Final = 2
"""The receiver reads one-sided from the regions that Show names."""

MAX_REQUEST_ID_BYTES: Final = 255


@message
class RankHello(Message):
    """First message of a connection: `instance` is the run that the asker means to speak to, `description` the asker's own.

    Answer: Ok, or StaleHandle: the description that the asker has is of another run.
    """

    TYPE = 70
    instance: CountedU8s
    description: CountedU8s


@message
class RequestCache(Message):
    """Give me the request's cache, from `first_token` to `tokens`. Answer: Ok, at once; the sender need not know the request yet.

    `blocks` are the sequence's in the pools of the asker's executor, in order. `regions` (PUSH) are where to write: the rank's pool, or
    with `slot_bytes` its staging alone, of `slots` slots. The header's deadline is the request's.
    """

    TYPE = 71
    WIRE = ("tokens", "first_token", "dp", "way", "part_bytes", "slots", "request_id", "blocks", "regions")
    request_id: CountedU8s
    tokens: U64
    first_token: U64
    blocks: CountedU64s
    way: U8
    regions: CountedBlobs
    part_bytes: U64 = 0
    """Largest part that is gathered into staging; 0: parts go straight between the pools."""
    slots: U32 = 0
    dp: U32 = 0
    """The attention-DP group of the sender's that has the request."""


@message
class ExportRegions(Message):
    """Read the request's cache from here (PULL): the sender's pool, where the sequence's blocks are `blocks`, or its staging. Before the
    first Part. Answer: Ok."""

    TYPE = 72
    request_id: CountedU8s
    regions: CountedBlobs
    blocks: CountedU64s


@message
class PartReady(Message):
    """Layers [layer_start, layer_end) of one chunk are yours now: written (PUSH), or to be read (PULL).

    Answer: Ok, once they are in the receiver's blocks, and the slot of the staging, if one was used, is free again.
    """

    TYPE = 73
    WIRE = ("layer_start", "layer_end", "chunk", "slot", "size_bytes", "request_id")
    request_id: CountedU8s
    layer_start: U32
    layer_end: U32
    chunk: U32
    slot: U32
    size_bytes: U64


@message
class ReadsDone(Message):
    """From a sender whose blocks were read (PULL): all that was acknowledged was read while they were the request's. Answer: Ok.

    Nobody tells a reader that blocks became another request's under it; so it has nothing before this has come.
    """

    TYPE = 77
    request_id: CountedU8s


@message
class CancelRequest(Message):
    """The request has failed on this rank, for this reason: end it. Answer: Ok."""

    TYPE = 74
    WIRE = ("code", "text", "request_id")
    request_id: CountedU8s
    code: U32
    text: Text


@message
class RankReport(Message):
    """From a rank to rank 0 of its executor: the request has begun (state 1) or is over (2) here, with an error or none (code 0).

    The header's deadline is the request's. Answer: Ok.
    """

    TYPE = 75
    WIRE = ("state", "dp", "code", "text", "request_id")
    request_id: CountedU8s
    state: U8
    dp: U32 = 0
    code: U32 = 0
    text: Text = ""


@message
class RequestEnded(Message):
    """From rank 0 to the others: the request is over on all ranks (code 0), or has failed on one. Answer: Ok."""

    TYPE = 76
    WIRE = ("code", "text", "request_id")
    request_id: CountedU8s
    code: U32
    text: Text
