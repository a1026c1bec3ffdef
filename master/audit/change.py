"""A change that an actor asks for, and the entry of the audit trail that it becomes."""

from dataclasses import dataclass
from typing import Final

from kvstore.master.directory.audit_log import clip
from kvstore.protocol import control_pb2 as pb
from kvstore.security.actor import Actor

LOGIN: Final = "login"
"""Action of a refused login."""
REQUEST: Final = "request"
"""Action of a refused message of a client or node that has logged in."""


@dataclass(frozen=True, slots=True)
class Change:
    """`target` is what it is about ("tenant red", "node n1"), `old` and `new` its value before and after, `detail` what else is known of
    the outcome. "" where there is none."""

    actor: Actor
    action: str
    target: str = ""
    old: str = ""
    new: str = ""
    detail: str = ""


def entry_of(change: Change, result: str, *, master: str, time_s: float, count: int = 0) -> pb.AuditEntry:
    """The entry without a number. `count` is 0 for a change, and how many times it happened for what repeats."""
    actor = change.actor
    return pb.AuditEntry(
        time_s=time_s,
        master=clip(master),
        kind=actor.kind,
        actor=clip(actor.name),
        credential=actor.credential,
        peer=clip(actor.peer),
        via=actor.via,
        action=change.action,
        target=clip(change.target),
        old=clip(change.old),
        new=clip(change.new),
        result=result,
        detail=clip(change.detail),
        count=count,
    )
