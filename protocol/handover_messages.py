"""Messages between the ranks of engines that hand KV cache over: who wants which blocks where, what has arrived, and what failed.

They carry no cache: bytes go by the transfer engine or by a Connection. Answers are Ok or Failure. A request id is the serving
system's own, 1 to 255 bytes, and travels whole.
"""

from typing import Final

from kvstore.protocol.message import Ints, Message, message

PUSH: Final = 1
"""The sender writes one-sided into the regions that Ask names."""
PULL: Final = 2
"""The receiver reads one-sided from the regions that Show names."""
STREAM: Final = 3
"""The sender sends through a Connection that it opens to the receiver's listener."""

MAX_REQUEST_ID_BYTES: Final = 255
TICKET_BYTES: Final = 16
"""First part of a STREAM's connection: says to whose Ask it belongs."""


@message
class Greet(Message):
    """First message of a connection: `instance` is the run that the asker means to speak to, `description` the asker's own.

    Answer: Ok, or StaleHandle: the description that the asker has is of another run.
    """

    TYPE = 70
    FORM = (("instance", "count"), ("instance", "u8s"), ("description", "count"), ("description", "u8s"))
    instance: bytes
    description: bytes


@message
class Ask(Message):
    """Give me the request's cache, from `first_token` to `tokens`. Answer: Ok, at once; the sender need not know the request yet.

    `blocks` are the sequence's in the pools of the asker's executor, in order. `regions` (PUSH) are where to write: the rank's pool, or
    with `slot_bytes` its staging alone, of `slots` slots. The header's deadline is the request's.
    """

    TYPE = 71
    FORM = (
        ("tokens", "u64"),
        ("first_token", "u64"),
        ("dp", "u32"),
        ("way", "u8"),
        ("part_bytes", "u64"),
        ("slots", "u32"),
        ("request_id", "count"),
        ("request_id", "u8s"),
        ("blocks", "count"),
        ("blocks", "u64s"),
        ("regions", "count"),
        ("regions", "blobs"),
        ("ticket", "count"),
        ("ticket", "u8s"),
    )
    request_id: bytes
    tokens: int
    first_token: int
    blocks: Ints
    way: int
    regions: list[bytes]
    part_bytes: int = 0
    """Largest part that is gathered into staging; 0: parts go straight between the pools."""
    slots: int = 0
    dp: int = 0
    """The attention-DP group of the sender's that has the request."""
    ticket: bytes = b""


@message
class Show(Message):
    """Read the request's cache from here (PULL): the sender's pool, where the sequence's blocks are `blocks`, or its staging. Before the
    first Part. Answer: Ok."""

    TYPE = 72
    FORM = (
        ("request_id", "count"),
        ("request_id", "u8s"),
        ("regions", "count"),
        ("regions", "blobs"),
        ("blocks", "count"),
        ("blocks", "u64s"),
    )
    request_id: bytes
    regions: list[bytes]
    blocks: Ints


@message
class Part(Message):
    """Layers [layer_start, layer_end) of one chunk are yours now: written (PUSH), to be read (PULL), or on their way (STREAM).

    Answer: Ok, once they are in the receiver's blocks, and the slot of the staging, if one was used, is free again.
    """

    TYPE = 73
    FORM = (
        ("layer_start", "u32"),
        ("layer_end", "u32"),
        ("chunk", "u32"),
        ("slot", "u32"),
        ("size_bytes", "u64"),
        ("request_id", "count"),
        ("request_id", "u8s"),
    )
    request_id: bytes
    layer_start: int
    layer_end: int
    chunk: int
    slot: int
    size_bytes: int


@message
class Done(Message):
    """From a sender whose blocks were read (PULL): all that was acknowledged was read while they were the request's. Answer: Ok.

    Nobody tells a reader that blocks became another request's under it; so it has nothing before this has come.
    """

    TYPE = 77
    FORM = (("request_id", "count"), ("request_id", "u8s"))
    request_id: bytes


@message
class Stop(Message):
    """The request has failed on this rank, for this reason: end it. Answer: Ok."""

    TYPE = 74
    FORM = (("code", "u32"), ("text", "text"), ("request_id", "count"), ("request_id", "u8s"))
    request_id: bytes
    code: int
    text: str


@message
class Report(Message):
    """From a rank to rank 0 of its executor: the request has begun (state 1) or is over (2) here, with an error or none (code 0).

    The header's deadline is the request's. Answer: Ok.
    """

    TYPE = 75
    FORM = (
        ("state", "u8"),
        ("dp", "u32"),
        ("code", "u32"),
        ("text", "text"),
        ("request_id", "count"),
        ("request_id", "u8s"),
    )
    request_id: bytes
    state: int
    dp: int = 0
    code: int = 0
    text: str = ""


@message
class Verdict(Message):
    """From rank 0 to the others: the request is over on all ranks (code 0), or has failed on one. Answer: Ok."""

    TYPE = 76
    FORM = (("code", "u32"), ("text", "text"), ("request_id", "count"), ("request_id", "u8s"))
    request_id: bytes
    code: int
    text: str
