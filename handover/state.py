"""How far a request is at one rank, told alike on both sides."""

from enum import Enum


class State(Enum):
    """Of a request at one rank, on either side."""

    WAITING = "waiting"
    """Not every counterpart has asked (sender), or none has said anything (receiver)."""
    MOVING = "moving"
    OVER = "over"
    """Complete, or failed."""
