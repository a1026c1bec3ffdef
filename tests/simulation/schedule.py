"""Schedule of one simulated run, made from a seed: a cluster's shape, and timed steps, each an operation or a fault.

A schedule is plain values, so a schedule with a finding can be shrunk, written to a file and run again.
"""

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tests.simulation.cluster import Shape

TENANTS: Final = ("red", "blue")
OPERATIONS: Final = {"put": 38, "get": 34, "put_batch": 6, "get_batch": 8, "exists": 3, "remove": 9, "flush": 2}
"""Of a hundred."""
ACKS: Final = ("node", "cluster", "cluster", "replicas")
SIZES_BYTES: Final = (60, 300, 900, 1500, 2500)
"""Those above 1,024 go through slots where their node is on the writer's host, and are mapped by its readers."""
FAULTS: Final = {
    "kill_master": 12,
    "kill_node": 12,
    "stop_master": 12,
    "stop_node": 10,
    "end_node": 4,
    "kill_client": 4,
    "stop_client": 4,
    "cut": 14,
    "cut_one_way": 10,
    "cut_etcd": 12,
    "cut_etcd_all": 4,
    "reset": 10,
    "clock": 6,
    "vanish": 4,
    "slow": 6,
    "disk": 4,
}
"""Their weights."""
ENDED: Final = "end_master"
"""A fault that some of those that kill a master become."""
ENDED_SHARE: Final = 0.4
ASKED_AFTER_AN_END: Final = 6
TAKEOVER_MS: Final = (1, 5, 20, 50, 100, 200)
"""When the catalog has another owner that is ended, which not all nodes have found yet."""
PARTITIONS: Final = (1,) * 46 + (2, 4)
"""Of one seed of twenty-four the key space is cut: each partition has a link of each node, and a run takes so much longer."""
BATCHES: Final = 4
"""There more operations are batches, in which several partitions meet."""
PUT_AGAIN_SHARE: Final = 0.4
"""Of seeds: there what is removed is put again."""
AFTER_MS: Final = (0.05, 0.2, 0.5, 1, 2, 3, 5, 20, 150)
"""Faults strike so long after an operation began, and what is removed is put again."""
SPANS_MS: Final = (50, 300, 1000, 1800, 2200, 3500, 6000)
"""Durations of faults: parts and multiples of the leases (2 s of the catalog's owner, 3 s of a node)."""

ROUNDS: Final = 6
ROUND_KEYS: Final = 12
"""Of `make_demotions`: rounds, and blocks put in each. Its DRAM has space for four of them."""


@dataclass(frozen=True, slots=True)
class Step:
    """At `at_ms` since the cluster stood: `kind` is one of OPERATIONS or FAULTS, `args` what it takes."""

    at_ms: float
    kind: str
    args: tuple[Any, ...]

    @property
    def is_fault(self) -> bool:
        return self.kind in FAULTS or self.kind == ENDED

    def __str__(self) -> str:
        return f"{self.at_ms:>9.2f} ms {self.kind} {' '.join(map(str, self.args))}"


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    shape: Shape
    steps: tuple[Step, ...]

    def without(self, dropped: set[int]) -> "Schedule":
        """The steps but for those."""
        return replace(self, steps=tuple(step for index, step in enumerate(self.steps) if index not in dropped))

    def to_json(self) -> str:
        steps = ",\n  ".join(json.dumps([step.at_ms, step.kind, *step.args]) for step in self.steps)
        return f'{{"seed": {self.seed},\n "shape": {json.dumps(asdict(self.shape))},\n "steps": [\n  {steps}]}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        said = json.loads(text)
        steps = tuple(Step(at_ms, kind, tuple(args)) for at_ms, kind, *args in said["steps"])
        return cls(said["seed"], Shape(**said["shape"]), steps)


def make_schedule(seed: int, *, operations: int = 24, partitions: int = 0, density: int = 1) -> Schedule:
    """About so many operations over some seconds, and up to one fault for each four of them. Each seed has kinds of faults of its own, and
    more of some operations: what happens rarely where everything does happens often in some (swarm testing). `partitions`: so many, or
    as the seed has it (0); `density`: so many times as many operations in a second, with no more faults."""
    rng = random.Random(f"schedule {seed}")
    shape = Shape(
        masters=rng.choice((1, 2, 2, 3)),
        nodes=rng.choice((1, 2, 2, 3)),
        clients=rng.choice((1, 2, 3)),
        dram_bytes=rng.choice((12 << 10, 256 << 10, 256 << 10)),
        nvme_bytes=rng.choice((0, 0, 40 << 10, 1 << 20)),
        uses_index=rng.random() < 0.5,
        max_kept_removals=rng.choice((1, 100, 100)),
        policy=rng.choice(("lru", "lru", "lru", "prefix")),
        hot_copies=random.Random(f"hot copies {seed}").choice((0, 0, 1, 2)),  # own generator, so that the rest of a seed does not change
        partitions=partitions or random.Random(f"partitions {seed}").choice(PARTITIONS),
    )
    length_ms: int = operations * rng.choice((40, 150, 400)) // density
    key_count = max(rng.choice((1, 2, 2, 4, 10)), shape.partitions + 1 if shape.partitions > 1 else 0)
    keys = [b"%d" % index for index in range(key_count)]
    times = _times(rng, operations, length_ms)
    weights = {kind: weight * rng.choice((1, 1, 4)) for kind, weight in OPERATIONS.items()}
    if shape.partitions > 1:  # what is of several at once
        weights = {kind: weight * (BATCHES if kind.endswith("_batch") else 1) for kind, weight in weights.items()}
    steps = [_operation(rng, shape, keys, weights, at_ms) for at_ms in times]
    if rng.random() < PUT_AGAIN_SHARE:
        steps += [_put_again(rng, shape, step) for step in steps if step.kind == "remove"]
    kinds = rng.sample(list(FAULTS), rng.choice((1, 2, 3, 5, len(FAULTS))))
    fault_times = (rng.choice(times) + rng.choice(AFTER_MS) for _ in range(rng.randrange(operations // (4 * density) + 1)))
    steps += [_fault(rng, shape, kinds, at_ms) for at_ms in fault_times]
    steps = _with_ends(random.Random(f"ends {seed}"), shape, keys, steps)  # own generator, as for hot copies
    return Schedule(seed, shape, tuple(sorted(steps, key=lambda step: step.at_ms)))


def make_demotions(seed: int) -> Schedule:
    """Rounds at a single node: blocks are put until others go to its disk, some of those are removed at that moment, the node dies a little
    later, and all are read when it is back. In schedules of all operations that rarely meets."""
    rng = random.Random(f"demotions {seed}")
    shape = Shape(masters=1, nodes=1, clients=3, dram_bytes=12 << 10, nvme_bytes=1 << 20)
    steps, at_ms = list[Step](), 50.0
    for first in range(0, ROUNDS * ROUND_KEYS, ROUND_KEYS):
        keys = [str(number) for number in range(first, first + ROUND_KEYS)]
        for index, key in enumerate(keys):
            steps.append(Step(round(at_ms, 2), "put", (0, TENANTS[0], key, "cluster", SIZES_BYTES[-1])))
            at_ms += rng.random() * 4
            if index > 3 and rng.random() < 0.7:
                recent = rng.choice(keys[max(0, index - 5) : index])
                steps.append(Step(round(at_ms + rng.random() * 3, 2), "remove", (1, TENANTS[0], recent)))
        steps.append(Step(round(at_ms + rng.choice((0, *AFTER_MS)) * rng.random(), 2), "kill_node", (0, 300)))
        at_ms += 1500
        steps += [Step(round(at_ms + index, 2), "get", (2, TENANTS[0], key)) for index, key in enumerate(keys)]
        at_ms += ROUND_KEYS + 20
    return Schedule(seed, shape, tuple(sorted(steps, key=lambda step: step.at_ms)))


def _times(rng: random.Random, count: int, length_ms: int) -> list[float]:
    """Some of them at once, or nearly so: then they meet at a key."""
    times: list[float] = []
    for _ in range(count):
        times.append(round(rng.choice(times) + rng.random() * 3, 2) if times and rng.random() < 0.4 else rng.randrange(length_ms))
    return times


def _operation(rng: random.Random, shape: Shape, keys: list[bytes], weights: dict[str, int], at_ms: float) -> Step:
    kind = rng.choices(list(weights), list(weights.values()))[0]
    who = rng.randrange(shape.clients), rng.choice((TENANTS[0], TENANTS[0], TENANTS[1]))
    several = [key.decode() for key in rng.sample(keys, min(len(keys), rng.randrange(2, 5)))]
    one, ack, size = rng.choice(keys).decode(), rng.choice(ACKS if shape.nodes > 1 else ACKS[:-1]), rng.choice(SIZES_BYTES)
    match kind:
        case "put":
            return Step(at_ms, kind, (*who, one, ack, size))
        case "put_batch":
            return Step(at_ms, kind, (*who, several, rng.choice(("node", "cluster")), size))
        case "get_batch":
            return Step(at_ms, kind, (*who, several))
        case "flush":
            return Step(at_ms, kind, who)
    return Step(at_ms, kind, (*who, one))


def _put_again(rng: random.Random, shape: Shape, removal: Step) -> Step:
    """The key's next version, about when the removal ends or soon after: what is left of the last one anywhere must not be taken for it."""
    _, tenant, key = removal.args
    at_ms = round(removal.at_ms + rng.choice(AFTER_MS), 2)
    return Step(at_ms, "put", (rng.randrange(shape.clients), tenant, key, rng.choice(("node", "cluster")), rng.choice(SIZES_BYTES)))


def _with_ends(rng: random.Random, shape: Shape, keys: list[bytes], steps: list[Step]) -> list[Step]:
    """Some of the masters that are killed end by themselves instead, and what is there is asked for while another takes over."""
    found = []
    for step in steps:
        is_ended = step.kind == "kill_master" and rng.random() < ENDED_SHARE
        found.append(replace(step, kind=ENDED) if is_ended else step)
        for _ in range(ASKED_AFTER_AN_END if is_ended else 0):
            at_ms = round(step.at_ms + rng.choice(TAKEOVER_MS), 2)
            found.append(Step(at_ms, "exists", (rng.randrange(shape.clients), TENANTS[0], rng.choice(keys).decode())))
    return found


def _fault(rng: random.Random, shape: Shape, kinds: list[str], at_ms: float) -> Step:
    kind = rng.choices(kinds, [FAULTS[kind] for kind in kinds])[0]
    span_ms = rng.choice(SPANS_MS)
    hosts = max(shape.masters, shape.nodes, shape.clients)
    count = {"master": shape.masters, "node": shape.nodes, "client": shape.clients}.get(kind.rpartition("_")[2], hosts)
    at = rng.randrange(count)
    if kind in ("cut", "cut_one_way"):
        return Step(at_ms, kind, (at, rng.randrange(hosts), span_ms))
    if kind == "clock":
        return Step(at_ms, kind, (at, rng.choice((-3600, -30, 30, 3600))))
    if kind == "reset":
        return Step(at_ms, kind, (rng.randrange(1, 4),))
    if kind == "disk":
        return Step(at_ms, kind, (rng.randrange(shape.nodes), span_ms))
    return Step(at_ms, kind, (at, span_ms))
