"""Messages between engine ranks that hand over KV cache: which blocks go where, what has arrived, what failed.

The cache itself goes by the transfer engine. Answers are Ok or Failure. Request ids are the serving system's, 1 to 255
bytes.
"""

from typing import Final

from kvstore.protocol.message import U8, U32, U64, CountedBlobs, CountedU8s, CountedU64s, Message, Text, message

PUSH: Final = 1
"""The sender writes one-sided into the regions of RequestCache."""
PULL: Final = 2
"""The receiver reads one-sided from the regions of ExportRegions."""

MAX_REQUEST_ID_BYTES: Final = 255


@message
class RankHello(Message):
    """First message of a connection: the instance (run) of the intended receiver, and the sender's own description.

    Answer: Ok, or StaleHandle if the receiver is another run than `instance`.
    """

    TYPE = 70
    instance: CountedU8s
    description: CountedU8s


@message
class RequestCache(Message):
    """Receiver to sender: request the cache of tokens [`first_token`, `tokens`).

    Answer: Ok, at once, even before the request exists there.

    `blocks`: the sequence's blocks in the receiver's pools, in order. `regions` (PUSH): destination, the rank's pool,
    or with `part_bytes` only its staging, of `slots` slots. The header's deadline is the request's.
    """

    TYPE = 71
    WIRE = ("tokens", "first_token", "dp", "mode", "part_bytes", "slots", "request_id", "blocks", "regions")
    request_id: CountedU8s
    tokens: U64
    first_token: U64
    blocks: CountedU64s
    mode: U8
    regions: CountedBlobs
    part_bytes: U64 = 0
    """Largest part that is gathered into staging; 0: parts go directly between the pools."""
    slots: U32 = 0
    dp: U32 = 0
    """The sender's attention-DP group that has the request."""


@message
class ExportRegions(Message):
    """Sender to receiver (PULL): regions to read from, the sender's pool with the sequence's `blocks`, or its staging.

    Answer: Ok.

    Sent before the first PartReady.
    """

    TYPE = 72
    request_id: CountedU8s
    regions: CountedBlobs
    blocks: CountedU64s


@message
class PartReady(Message):
    """Sender to receiver: layers [layer_start, layer_end) of one chunk were written (PUSH), or can be read (PULL).

    Answer: Ok, once they are in the receiver's blocks and the staging slot, if one was used, is free.
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
    """Sender to receiver (PULL): all acknowledged parts were read before the sender reused the request's blocks.

    Answer: Ok.

    A reader cannot detect a reused block; so it treats no part as valid before this message.
    """

    TYPE = 77
    request_id: CountedU8s


@message
class CancelRequest(Message):
    """The request failed on the sender of this message, with this error: end it. Answer: Ok."""

    TYPE = 74
    WIRE = ("code", "text", "request_id")
    request_id: CountedU8s
    code: U32
    text: Text


@message
class RankReport(Message):
    """Rank to rank 0 of its executor: the request began (state 1) or ended (2) on this rank, with an error or none
    (code 0).

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
    """Rank 0 to the others: the request ended on all ranks (code 0), or failed on one. Answer: Ok."""

    TYPE = 76
    WIRE = ("code", "text", "request_id")
    request_id: CountedU8s
    code: U32
    text: Text
