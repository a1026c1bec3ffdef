"""How a cache of tensors speaks with its client: as generators of steps, which a thread or an event loop carries out.

A step is a call of the client, blocking or awaited as the client is, or `Work`, which copies and must not stop an event loop.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kvstore.client.aio import AsyncClient
from kvstore.client.async_driver import carry_out
from kvstore.client.core.effects import Work
from kvstore.client.sync import Client

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """What `function` asks of a client: its result."""

    function: Callable[[Any], Any]


Steps: TypeAlias = Generator[Call | Work, Any, T]


def run(steps: Steps[T], client: Client) -> T:
    """Carry out all of them here: their result. Raises what they raise, when nothing moves any more."""
    result = None
    try:
        while True:
            step = steps.send(result)
            result = step.function() if isinstance(step, Work) else step.function(client)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        steps.close()


async def run_async(steps: Steps[T], client: AsyncClient) -> T:
    """As `run`, for the loop that this is in; work of many bytes is done in a thread. A cancelled call ends when its copy has."""
    result = None
    try:
        while True:
            step = steps.send(result)
            result = await (carry_out(step) if isinstance(step, Work) else step.function(client))
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        steps.close()
