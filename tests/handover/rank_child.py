"""One rank in a process of its own, for tests that stop or kill it: `python -m tests.handover.rank_child` with its arguments as JSON.

Tells its description on standard output, then answers lines of JSON on standard input with one line each.
"""

import json
import sys
from typing import Any

from kvstore.handover.config import HandoverSettings
from kvstore.handover.handles import Handover, SendHandle
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import KVStoreError
from tests.handover.scene import Rank


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    layout = CacheLayout.from_bytes(bytes.fromhex(arguments["layout"]))
    rank = Rank(layout, arguments["rank"], HandoverSettings(**arguments["settings"]), transports=arguments["transports"])
    for memory in rank.memory:
        memory[:] = arguments["fill"]
    transceiver, handovers = rank.transceiver, dict[str, Handover]()
    print(json.dumps(transceiver.describe().hex()), flush=True)
    for line in sys.stdin:
        word, request_id, blocks, tokens, descriptions = json.loads(line)
        peers = [bytes.fromhex(description) for description in descriptions]
        told: Any = None
        if word == "join":
            transceiver.join(peers)
        elif word == "send":
            handovers[request_id] = transceiver.send(request_id.encode(), blocks, tokens=tokens)
        elif word == "receive":
            source = transceiver.connect(peers)
            handovers[request_id] = transceiver.receive(request_id.encode(), blocks, tokens=tokens, source=source)
        elif word == "ready":
            given = handovers[request_id]
            assert isinstance(given, SendHandle)
            given.all_ready()
        elif word == "cancel":
            handovers[request_id].cancel()
        elif word == "is blocks":
            size = layout.spec.block_bytes
            told = all(bool((memory[block * size : (block + 1) * size] == tokens).all()) for memory in rank.memory for block in blocks)
        elif word == "is filled with":
            told = all(bool((memory == tokens).all()) for memory in rank.memory)
        else:
            try:
                handovers[request_id].wait()
            except KVStoreError as error:
                told = type(error).__name__
        print(json.dumps(told), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
