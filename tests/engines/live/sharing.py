"""Tests of engines that share prefixes through a store.

In every state of the store, an engine answers a prompt as an engine without a store does.
"""

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from kvstore.client import Client
from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster
from tests.engines.live.full import filled
from tests.engines.live.vllm.engines import PATIENT, check_all, expected, start_node
from tests.ports import free_ports


class Sharing:
    """Subclasses are the tests of one kind.

    Their fixtures: `plain` has no store, and is what others are held to; `first` and `second` share one of a node, `store`.
    """

    engine: ClassVar[Callable[..., Any]]
    """Makes one."""
    cached: ClassVar[int]
    """Tokens of a prompt that are found once it was computed."""

    def prompt(self, seed: int) -> list[int]:
        """Another one for each seed."""
        raise NotImplementedError

    def salted(self, salt: str) -> dict[str, Any]:
        """Arguments of `generate`."""
        raise NotImplementedError

    def keys(self, client: Client, engine: Any, asked: list[int]) -> list[bytes]:
        """Of the prompt's blocks, which the engine has not computed yet."""
        raise NotImplementedError

    def recover(self, engine: Any) -> None:
        """Once another node has taken the place of one that is gone."""

    def test_a_prompt_that_one_engine_computed_is_another_s(self, plain: Any, first: Any, second: Any) -> None:
        asked = self.prompt(1)
        (right,) = expected(plain, asked)
        first.save(asked)[0].check_same(right, cached=0)
        first.forget()
        for engine in (first, second):
            engine.generate(asked)[0].check_same(right, cached=self.cached)

    def test_blocks_of_a_salted_request_are_for_those_with_its_salt(self, plain: Any, first: Any, second: Any) -> None:
        asked = self.prompt(2)
        (right,) = expected(plain, asked)
        first.save(asked, **self.salted("one"))
        for how, cached in (({}, 0), (self.salted("another"), 0), (self.salted("one"), self.cached)):
            second.generate(asked, **how)[0].check_same(right, cached=cached)

    def test_two_engines_may_compute_the_same_prompts_at_once(self, plain: Any, first: Any, second: Any) -> None:
        asked = [self.prompt(seed) for seed in range(30, 34)]
        right = expected(plain, *asked)
        for engine in (first, second):
            engine.begin(*asked)
        for engine in (first, second):
            check_all(engine.answers(), right)
            engine.flush()
        for engine in (first, second):
            engine.forget()
            check_all(engine.save(*asked), right, cached=self.cached)

    def test_an_engine_of_another_element_type_shares_nothing(self, model: Path, store: Cluster, first: Any) -> None:
        asked = self.prompt(40)
        first.save(asked)
        with type(self).engine(model, store=PATIENT | {"master": store.address}, dtype="bfloat16") as other:
            for cached in (0, self.cached):
                assert other.save(asked)[0].cached == cached
                other.forget()

    def test_an_engine_may_begin_without_the_store(self, plain: Any, model: Path) -> None:
        asked = self.prompt(45)
        (right,) = expected(plain, asked)
        with type(self).engine(model, store={"master": f"127.0.0.1:{free_ports(1)[0]}"}) as lonely:
            for _ in range(2):
                lonely.generate(asked)[0].check_same(right, cached=0)
                lonely.forget()

    def test_a_full_store_costs_only_what_it_does_not_take(self, plain: Any, store: Cluster, first: Any, second: Any) -> None:
        asked = self.prompt(50)
        (right,) = expected(plain, asked)
        with Client(store.address) as client, filled(client):
            first.save(asked)[0].check_same(right)
            (answer,) = second.generate(asked)
            answer.check_same(right)
            assert answer.cached < self.cached

        def is_shared() -> bool:
            """Recompute the prompt. Return True once the store has space for it and has stored it."""
            for engine in (first, second):
                engine.forget()
                (answer,) = engine.save(asked)
                answer.check_same(right)
            return bool(answer.cached == self.cached)

        eventually(is_shared, "what there is room for is stored")

    def test_a_master_that_is_killed_costs_only_what_it_knows(self, plain: Any, store: Cluster, first: Any, second: Any) -> None:
        asked, known, later = (self.prompt(seed) for seed in (60, 61, 62))
        right_known, right_later = expected(plain, known, later)
        (right,) = expected(plain, asked, tokens=200)
        first.save(known)
        second.begin(asked, tokens=200)
        store.master.stop(signal.SIGKILL)
        check_all(second.answers(), [right])
        for engine in (first, second):
            engine.forget()
            engine.generate(known)[0].check_same(right_known)
        store.start_master()

        def is_shared() -> bool:
            """Recompute the prompt. Return True once the engine has reconnected to the master and stored it."""
            for engine in (first, second):
                engine.forget()
                (answer,) = engine.generate(later)
                answer.check_same(right_later)
            return bool(answer.cached == self.cached)

        eventually(is_shared, "both engines have found the master again")

    def test_a_node_that_is_killed_comes_back_with_what_was_on_nvme(self, plain: Any, store: Cluster, first: Any, second: Any) -> None:
        asked, meanwhile = self.prompt(70), self.prompt(71)
        right, right_meanwhile = expected(plain, asked, meanwhile)
        numbers = itertools.count()
        with Client(store.address) as client:
            keys = self.keys(client, first, asked)

            def is_down() -> bool:
                """Other blocks push them out of DRAM; those that were lost on the way are computed again."""
                if not all(client.locate(keys)):
                    first.forget()
                    first.save(asked)
                client.put_batch([f"other-{next(numbers)}".encode() for _ in range(16)], [bytes(1 << 17)] * 16)
                client.flush(deadline_s=60)
                return all(places and "nvme" in places[0].tiers for places in client.locate(keys))

            eventually(is_down, "the prompt's blocks are on NVMe")
        store.nodes[-1].stop(signal.SIGKILL)
        second.generate(meanwhile)[0].check_same(right_meanwhile)
        start_node(store)

        def is_found() -> bool:
            second.forget()
            (answer,) = second.generate(asked)
            answer.check_same(right)
            return bool(answer.cached == self.cached)

        eventually(is_found, "the blocks that were on NVMe are loaded")
        for engine in (first, second):
            self.recover(engine)
