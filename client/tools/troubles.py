"""What is wrong with a cluster, by its owner's status and its masters' answers, the worst first. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from kvstore.client.tools.masters import MasterTold
from kvstore.console.model import Model
from kvstore.protocol import control_pb2 as pb

ERROR: Final = "error"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that an operator should know, and what to do about it. `level` is "error" or "warning"."""

    level: str
    text: str
    todo: str = ""


def of(status: pb.StatusReply, told: Sequence[MasterTold] = ()) -> list[Trouble]:
    """The console's troubles, and the masters that were asked and do not answer."""
    found = [Trouble(one["level"], one["text"], one.get("todo", "")) for one in Model().document(status, at_s=0.0, wall_s=0.0)["troubles"]]
    found += [Trouble("warning", f"Master {one.address} does not answer: {one.trouble}") for one in told if one.trouble]
    return sorted(found, key=lambda one: one.level != ERROR)


def lines(found: Sequence[Trouble]) -> Text:
    """One line each, errors in red, and below it what to do."""
    shown = Text()
    for one in found:
        shown.append(f"{one.level}: {one.text}\n", "bold red" if one.level == ERROR else "yellow")
        shown.append(f"    {one.todo}\n" if one.todo else "")
    shown.rstrip()
    return shown
