"""Shell blocks of the documentation, run by bash as printed, with the commands of an engine's environment in a network of their own.

Only what the page leaves to the reader is filled in: the model, flags for a slow CPU, and no installation, which the environment has.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.docs.shell_blocks import ROOT, SHELL, blocks
from tests.engines.live import process_group
from tests.engines.live.environments import python_of
from tests.namespaces import TwoHosts, two_hosts

PATIENCE_S: Final = 1500
CPU_FLAGS: Final = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024")
_HEAD: Final = """set -e -o pipefail
pip() { :; }
python3() { :; }
source() { :; }
python() { case "$2" in vllm.*) shift 2; "$PYTHON" -m vllm.entrypoints.openai.api_server "$@" $CPU_FLAGS;; *) "$PYTHON" "$@";; esac; }
"""


def block(page: str, part: str) -> str:
    """The one shell block of docs/`page` that has `part` in it."""
    (code,) = [each.code for each in blocks(ROOT / "docs" / page) if each.language == SHELL and part in each.code]
    return code


@contextlib.contextmanager
def running(script: str, folder: Path, **variables: str) -> Iterator[tuple[TwoHosts, "subprocess.Popen[bytes]"]]:
    """Run a script on a host of its own, in `folder`; its output goes to `folder`/said. All that it began is ended at the end."""
    python = python_of("vllm")
    others = ("KVSTORE_", "VLLM_", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)} | {
        "CPU_FLAGS": " ".join(CPU_FLAGS),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHON": str(python),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_RUNTIME_DIR": str(folder),
        # A slow machine must not turn a hit into a miss.
        "KVSTORE_VLLM_LOOKUP_DEADLINE_S": "30",
        "KVSTORE_VLLM_LOAD_DEADLINE_S": "60",
        **variables,
    }
    with two_hosts(0) as hosts, (folder / "said").open("wb") as said:
        bash = process_group.watched(
            hosts.start(
                0,
                ["bash", "-c", _HEAD + script],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        try:
            yield hosts, bash
        finally:
            process_group.end(bash)
