"""Gain of sending layer by layer: a prefill and a decode rank on two hosts, joined by one shaped rail. Part of `make bench-kvcache`.

The parent's side is `overlap_rows`; the ranks are processes: `python -m benchmarks.handover prefill|decode ADDRESS`. They report
to the parent in lines of JSON. Computation is a wait of fixed length for each layer; only the transfer is real. Both hosts share the
machine's monotonic clock, so their times compare.
"""

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.tools.bench import BenchRow, at_least
from kvstore.handover.config import HandoverSettings
from kvstore.handover.transceiver import CacheTransceiver
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from tests.namespaces import TwoHosts, why_not
from tests.transfer.paths.rails_child import answer_of, wait_until_up

RATES_GBIT_S: Final = (1, 2, 4, 8)
TOKENS: Final = 1024
SPEC: Final = CacheSpec.named("llama3-8b")
BLOCKS: Final = TOKENS // SPEC.block_tokens
LAYOUT: Final = CacheLayout(spec=SPEC, pool_blocks=BLOCKS)
LAYER_S: Final = 0.01
"""Of computing: 0.32 s for the prefill, about what an A100 takes for 1,024 tokens of this model at half of its peak rate."""
ROUNDS: Final = 3
DEADLINE_S: Final = 30.0
ROOT: Final = Path(__file__).resolve().parents[1]
LAYERWISE: Final = "layer by layer"
AT_ONCE: Final = "all at once"


def overlap_rows() -> Iterator[BenchRow]:
    """Nothing where two hosts cannot be had."""
    reason = why_not()
    if reason:
        print(f"the hand-over is not measured: {reason}", file=sys.stderr)
        return
    for rate in RATES_GBIT_S:
        with TwoHosts((rate,)) as hosts:
            wait_until_up(hosts)
            yield from _rows_at(rate, _Ranks(hosts))


def _rows_at(rate: int, ranks: "_Ranks") -> Iterator[BenchRow]:
    """The best of ROUNDS each, in turns."""
    wire_s = LAYOUT.region_bytes(0, 0) / (rate * 1e9 / 8)
    after_s: dict[str, float] = {}
    total_s: dict[str, float] = {}
    overlap = 0.0
    ranks.round(AT_ONCE)  # connections and pages are there from now on
    for _ in range(ROUNDS):
        for name in (AT_ONCE, LAYERWISE):
            found = ranks.round(name)
            after_s[name] = min(found["after_s"], after_s.get(name, DEADLINE_S))
            total_s[name] = min(found["total_s"], total_s.get(name, DEADLINE_S))
            overlap = max(overlap, found["overlap"])
    size = LAYOUT.region_bytes(0, 0) >> 20
    yield BenchRow(f"{rate} Gbit/s: {size} MiB on the wire take at least", wire_s * 1000, "ms")
    for name in (AT_ONCE, LAYERWISE):
        yield BenchRow(f"{rate} Gbit/s: {name}, decode waits after the prefill", after_s[name] * 1000, "ms")
    yield BenchRow(f"{rate} Gbit/s: all at once / its time on the wire", after_s[AT_ONCE] / wire_s, "ratio")
    yield BenchRow(f"{rate} Gbit/s: layer by layer, sent while the prefill ran", overlap, "share")
    least_s = max(SPEC.layers * LAYER_S + wire_s / SPEC.layers, LAYER_S + wire_s)
    yield BenchRow(f"{rate} Gbit/s: layer by layer, prefill and hand-over / the least possible", total_s[LAYERWISE] / least_s, "ratio")
    gain = total_s[AT_ONCE] / total_s[LAYERWISE]
    yield at_least(f"{rate} Gbit/s: prefill and hand-over, all at once / layer by layer", gain, "ratio", 1)


class _Ranks:
    """The parent's side of one pair; the processes end with their hosts."""

    def __init__(self, hosts: TwoHosts) -> None:
        pipe = subprocess.PIPE
        self._prefill, self._decode = (
            hosts.start(host, [sys.executable, "-m", "benchmarks.handover", name, address], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            for host, (name, address) in enumerate(zip(("prefill", "decode"), hosts.rails[0].addresses, strict=True))
        )
        description = answer_of(self._prefill)
        answer_of(self._decode)
        self._tell(self._decode, description)
        self._number = 0

    def round(self, name: str) -> dict[str, float]:
        self._number += 1
        order = {"id": self._number, "layerwise": name == LAYERWISE}
        self._tell(self._decode, order)
        answer_of(self._decode)  # it has asked for the request
        self._tell(self._prefill, order)
        sent, got = answer_of(self._prefill), answer_of(self._decode)
        assert got["right"], "the receiver's blocks are not those of the sender"
        return {
            "after_s": (got["over_ns"] - sent["computed_ns"]) / 1e9,
            "total_s": (got["over_ns"] - sent["begun_ns"]) / 1e9,
            "overlap": sent["overlap"],
        }

    def _tell(self, process: "subprocess.Popen[str]", what: Any) -> None:
        assert process.stdin is not None
        print(json.dumps(what), file=process.stdin, flush=True)


# --- the ranks' processes ---


def content(number: int) -> NDArray[np.uint8]:
    """Return the pool's content in that round."""
    return np.random.default_rng(number).integers(0, 256, LAYOUT.region_bytes(0, 0), np.uint8)


def rank(name: str, address: str) -> None:
    """One end, until its input ends."""
    settings = HandoverSettings(listen=f"{address}:0", way="push")
    with TransferEngine(name, TransferSettings(transports="tcp")) as engine:
        region = engine.allocate(LAYOUT.region_bytes(0, 0))
        with CacheTransceiver(LAYOUT, 0, [region], engine, settings) as transceiver:
            _say(base64.b64encode(transceiver.describe()).decode())
            pool = np.frombuffer(region.memory, np.uint8)
            (_prefill if name == "prefill" else _decode)(transceiver, pool)
        del pool


def _prefill(transceiver: CacheTransceiver, pool: NDArray[np.uint8]) -> None:
    for order in map(json.loads, sys.stdin):
        pool[:] = content(order["id"])
        sending = transceiver.send(_name(order), np.arange(BLOCKS), tokens=TOKENS, deadline_s=DEADLINE_S)
        begun_ns = time.monotonic_ns()
        for layer in range(SPEC.layers):
            left_s = LAYER_S * (layer + 1) - (time.monotonic_ns() - begun_ns) / 1e9
            threading.Event().wait(max(0.0, left_s))
            if order["layerwise"]:
                sending.layer_ready(layer)
        computed_ns = time.monotonic_ns()
        sending.all_ready()
        sending.wait()
        _say({"begun_ns": begun_ns, "computed_ns": computed_ns, "overlap": sending.overlap_bytes / sending.sent_bytes})


def _decode(transceiver: CacheTransceiver, pool: NDArray[np.uint8]) -> None:
    source = transceiver.connect([base64.b64decode(json.loads(sys.stdin.readline()))])
    for order in map(json.loads, sys.stdin):
        expected = content(order["id"])
        receiving = transceiver.receive(_name(order), np.arange(BLOCKS), tokens=TOKENS, source=source, deadline_s=DEADLINE_S)
        _say("asked")
        receiving.wait()
        over_ns = time.monotonic_ns()
        _say({"over_ns": over_ns, "right": bool(np.array_equal(pool, expected))})


def _name(order: dict[str, Any]) -> bytes:
    return f"round {order['id']}".encode()


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    rank(*sys.argv[1:])
