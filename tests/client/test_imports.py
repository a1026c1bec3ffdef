"""Imports of a program that only reads and writes: engines pin versions of gRPC, protobuf and torch, and none of them
is loaded."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from tests.client.embedded import embedded

HEAVY = ("grpc", "google.protobuf", "aiohttp", "prometheus_client", "opentelemetry", "torch", "transformers", "vllm", "sglang", "lmcache")
LAZY = (
    *("asyncio", "ssl", "click", "tomllib", "subprocess", "tempfile", "difflib"),
    *(
        "kvstore.transfer.engine",
        "kvstore.transfer.paths",
        "kvstore.transfer.topology",
        "kvstore.rpc.server.server",
        "kvstore.telemetry.tracing",
    ),
)
"""Modules that a blocking client imports on first use: for remote nodes, TLS and traces."""
PROGRAM = """
import importlib, sys
module, attribute = sys.argv[1].split(":")
getattr(importlib.import_module(module), attribute)
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


PUTS_AND_GETS = """
import sys
from kvstore.client import Client
with Client(sys.argv[1]) as client:
    values = {bytes([number] * 16): bytes([number]) * 500_000 for number in range(4)}
    assert all(client.put_batch(list(values), list(values.values())))
    assert client.get_batch(list(values)) == list(values.values())
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


def loaded(what: str, names: Sequence[str] = HEAVY) -> list[str]:
    """Those of `names` that a fresh interpreter has loaded once it has imported `module:attribute`."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, what, *names], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "what",
    [
        "kvstore.client:Client",
        "kvstore.client:AsyncClient",
        "kvstore.client.tensors.cache:TensorCache",
        "kvstore.kvcache.namespace:Namespace",
        "kvstore.handover.transceiver:CacheTransceiver",
        "kvstore.transfer:TransferEngine",
    ],
)
def test_neither_grpc_nor_protobuf_nor_torch_is_imported(what: str) -> None:
    assert loaded(what) == []


def test_a_blocking_client_loads_no_part_it_may_never_use() -> None:
    assert loaded("kvstore.client:Client", LAZY) == []


def test_puts_and_gets_on_one_host_load_nothing_of_other_hosts() -> None:
    with embedded() as cluster:
        arguments = [sys.executable, "-W", "error", "-c", PUTS_AND_GETS, cluster.address, *LAZY[:-1]]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "\n"


def test_what_is_lazy_has_modules_of_these_names() -> None:
    """A name that a rename left behind would never be imported, and pass the other tests."""
    assert loaded("kvstore.client.aio:asyncio", LAZY[:1]) == ["asyncio"]
    assert loaded("kvstore.transfer.engine:TransferEngine", LAZY[-5:-2]) == list(LAZY[-5:-2])
    assert [name for name in LAZY if find_spec(name) is None] == []


def test_the_control_plane_needs_grpc() -> None:
    assert loaded("kvstore.client.control:Control") == ["grpc", "google.protobuf"]
