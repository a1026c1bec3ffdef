"""vLLM's own decoder reads the messages of kvstore-publisher as KV events."""

import json
import subprocess

from kvstore.engines.publisher.config import VLLM
from kvstore.engines.publisher.form import EventForm
from kvstore.kvcache.traces.event_file import REMOVED, STORED, BlockEvent, LostEvents
from tests.engines.live.environments import python_of

READ = """
import json, sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
found = msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(sys.argv[1]))
print(json.dumps([[type(event).__name__, getattr(event, "medium", None), getattr(event, "ownership", None)] for event in found.events]))
"""


def test_vllm_reads_what_is_published() -> None:
    keys = [b"a" * 16, b"b" * 16]
    payload = EventForm(VLLM).batch(
        [
            BlockEvent(STORED, 1.0, "n0", "", keys, [b"", keys[0]], [1, 1]),
            BlockEvent(REMOVED, 2.0, "n0", "", keys, [b"", keys[0]], [1, 1]),
            LostEvents(3.0, "n0", "", 5),
        ]
    )
    assert payload is not None
    done = subprocess.run([python_of("vllm"), "-c", READ, payload.hex()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        ["BlockStored", "STORAGE", "n0"],
        ["BlockRemoved", "STORAGE", "n0"],
        ["AllBlocksCleared", None, None],
    ]
