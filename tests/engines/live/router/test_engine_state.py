"""Engine state as the scheduler sees it, with real vLLM servers: sleep, a cleared cache, and events that were lost on the way."""

import contextlib
import random
from functools import partial

import pytest

from kvstore.engines.kv_events.events import AllBlocksCleared, BlocksStored, Event
from kvstore.engines.kv_events.subscriber import Subscriber
from tests.engines.live.http_engine import PATIENCE_S
from tests.engines.live.router.comparing import ask, body_of
from tests.engines.live.router.fleet import Fleet, Server
from tests.engines.live.router.kinds import COMPLETIONS
from tests.engines.live.router.wire import Wire
from tests.engines.live.vllm.engines import prompt as random_prompt
from tests.system.running import until

BLOCKS = 6


FLEET = {"has_store": False}
prompt = partial(random_prompt, blocks=BLOCKS)


@pytest.fixture(scope="module", autouse=True)
def nodeless(fleet: Fleet) -> None:
    fleet.start_sidecars(node="")


def complete(server: Server, tokens: list[int]) -> None:
    """By the engine itself, past the router."""
    assert ask(server.url, COMPLETIONS, body_of({"prompt": tokens, "max_tokens": 1})).status == 200


def holder_of(fleet: Fleet, asked: list[int]) -> tuple[str, str]:
    """The engine that the router sent this prompt to, once the scheduler knows its blocks, and its answer."""
    before = fleet.own_blocks()
    first = fleet.ask(asked)
    holder = first.decision["prefill"]
    until(lambda: fleet.own_blocks()[holder] >= before[holder] + BLOCKS, "its blocks, at the scheduler", PATIENCE_S)
    assert fleet.ask(asked).decision["prefill"] == holder
    return holder, first.text


def test_sleeping_engine_is_not_preferred(fleet: Fleet) -> None:
    asked = prompt(1)
    holder, text = holder_of(fleet, asked)
    server = fleet.servers[int(holder[1:])]
    server.post("/sleep?level=1")
    until(lambda: holder not in fleet.own_blocks(), "the sleeping engine gone", PATIENCE_S)
    again = fleet.ask(asked)
    assert again.decision["prefill"] != holder
    assert again.text == text
    server.post("/wake_up")
    until(lambda: fleet.own_blocks().get(holder) == 0, "the engine back, without its blocks", PATIENCE_S)
    assert fleet.ask(asked).decision["prefill"] != holder


def test_cleared_cache_is_known_once_the_engine_runs_again(fleet: Fleet) -> None:
    """vLLM publishes that it cleared its cache with its next step, and not before."""
    holder, _ = holder_of(fleet, prompt(2))
    server = fleet.servers[int(holder[1:])]
    complete(server, prompt(3))
    until(lambda: fleet.own_blocks()[holder] >= 2 * BLOCKS, "two prompts", PATIENCE_S)
    server.post("/reset_prefix_cache")
    complete(server, prompt(4))
    until(lambda: fleet.own_blocks()[holder] == BLOCKS, "the last prompt alone", PATIENCE_S)


class Story:
    """Chains of stored blocks, "cleared" and "lost", as the subscriber hands them on."""

    def __init__(self) -> None:
        self.seen: list[int | str] = []

    def apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.seen.append(len(event.hashes))
            elif isinstance(event, AllBlocksCleared):
                self.seen.append("cleared")

    def lost(self) -> None:
        self.seen.append("lost")


def test_forced_gap_is_replayed_by_a_real_publisher(fleet: Fleet) -> None:
    server, story = fleet.servers[0], Story()
    with Wire(server.events) as wire:
        subscriber = Subscriber(wire.endpoint, server.replay, replay_timeout_s=PATIENCE_S)
        with contextlib.closing(subscriber):
            subscriber.catch_up(story.apply, story.lost)
            story.seen.clear()
            complete(server, prompt(5))

            def heard(chains: int) -> bool:
                subscriber.take(0.1, story.apply, story.lost)
                return sum(each != "cleared" for each in story.seen) >= chains

            until(lambda: heard(1), "the first prompt", PATIENCE_S)
            wire.cut()
            complete(server, prompt(6))
            wire.mend()

            def published() -> bool:
                complete(server, prompt(random.randrange(1 << 30)))
                return heard(3)

            until(published, "the prompt that was lost, and one after it", PATIENCE_S)
    assert "lost" not in story.seen
