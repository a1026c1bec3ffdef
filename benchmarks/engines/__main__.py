"""`make bench-engines`: real engines with the store, against the same engines without it and against other stores.

Engines run in environments of their own (`make engines`), one at a time. Ratios are of one run. Arguments name the parts to run; without
them it is all. Rows go to benchmarks/out/engines.json.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.engines import lmcache, mooncake, offload, router, share_tp, vllm, waiting_requests
from benchmarks.harness import run
from benchmarks.transfer_peers import Trouble

PARTS = {
    "copies": vllm.copy_rows,
    "share_tp": share_tp.rows,
    "vllm": vllm.rows,
    "waiting": waiting_requests.rows,
    "offload": offload.rows,
    "lmcache": lmcache.rows,
    "mooncake": mooncake.rows,
    "router": router.rows,
}

if __name__ == "__main__":
    sys.exit(run(PARTS, Path(__file__).parents[1] / "out" / "engines.json", may_lack=(Trouble, subprocess.TimeoutExpired)))
