"""What a program pays for that only reads and writes: engines pin versions of gRPC, protobuf and torch, and none of them is loaded."""

import subprocess
import sys

import pytest

HEAVY = ("grpc", "google.protobuf", "aiohttp", "prometheus_client", "opentelemetry", "torch", "transformers", "vllm", "sglang", "lmcache")
PROGRAM = """
import importlib, sys
module, attribute = sys.argv[1].split(":")
getattr(importlib.import_module(module), attribute)
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


def loaded(what: str) -> list[str]:
    """Those of HEAVY that a fresh interpreter has loaded once it has imported `module:attribute`."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, what, *HEAVY], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "what",
    [
        "kvstore.client:Client",
        "kvstore.client:AsyncClient",
        "kvstore.client.connecting:connect",
        "kvstore.client.tensors.cache:TensorCache",
        "kvstore.kvcache.namespace:Namespace",
        "kvstore.handover.transceiver:CacheTransceiver",
        "kvstore.transfer:TransferEngine",
    ],
)
def test_neither_grpc_nor_protobuf_nor_torch_is_imported(what: str) -> None:
    assert loaded(what) == []


def test_the_control_plane_needs_grpc() -> None:
    assert loaded("kvstore.client.control:Control") == ["grpc", "google.protobuf"]
