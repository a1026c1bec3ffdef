"""Mooncake's tests of its Python API, from a checkout of it that MOONCAKE_SRC names, run on kvstore under Mooncake's name."""

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Final

from tests.client.processes import cluster
from tests.engines.live.environments import python_of
from tests.engines.live.mooncake.package import install
from tests.ports import free_ports

RUN: Final = (
    "test_dataproto_catalog.py",
    "test_distributed_object_store.py",
    "test_import_structure.py",
    "test_mooncake_config.py",
    "test_put_get_tensor.py",
    "test_replicated_distributed_object_store.py",
    "test_safetensor_functions.py",
    "test_structured_object_store.py",
)
DAEMON: Final = "tests a program of Mooncake's around its store, not the Python API"
GPU: Final = "tests transfers of GPU memory, which need a GPU"
TIER: Final = "needs a Mooncake master whose eviction and SSD offload are set up for it; tiers are the nodes' affair here"
EXCLUDED_FILES: Final = {
    "test_batch_replica_clear.py": "batch_replica_clear is not offered: replicas are the store's own affair, and a put leaves no lease",
    "test_buffer_pool_native.py": "BufferPool, which cuts up the local buffer of Mooncake's client, is not offered",
    "test_cli.py": DAEMON,
    "test_distributed_object_store_cxl.py": "needs CXL memory",
    "test_dummy_client.py": "needs Mooncake's real client at a fixed port, and the layouts of TensorParallelism, which are not offered",
    "test_fast_copy.py": "tests a C extension of Mooncake's wheel",
    "test_http_metadata_server.py": DAEMON,
    "test_meta_server.py": DAEMON,
    "test_mooncake_ep.py": "tests Mooncake's expert parallelism on GPUs",
    "test_mooncake_store_service_api.py": DAEMON,
    "test_multi_dummy_clients.py": "needs Mooncake's real client at a fixed port",
    "test_offload_on_eviction.py": TIER,
    "test_promotion_on_hit.py": TIER,
    "test_regmr_overhead.py": "measures Mooncake's expert parallelism on GPUs",
    "test_release_wheel_tags.py": "tests the file names of Mooncake's wheels",
    "test_spdk_tgt_create.py": DAEMON,
    "test_ssd_offload_in_evict.py": TIER,
    "test_transfer_on_cuda.py": GPU,
    "test_transfer_on_hip.py": GPU,
}
EXCLUDED_TESTS: Final = {
    "test_distributed_object_store.py::TestDistributedObjectStoreSingleStore::test_client_tear_down": (
        "asks that what was put is gone once its writer has closed: here it lives in the nodes"
    ),
    "test_import_structure.py::TestImportStructure::test_top_level_buffer_pool_alias": "BufferPool is not offered",
    "test_structured_object_store.py::test_dataproto_helper_reads_rows_with_real_store_ranges": "BufferPool is not offered",
}


def test_mooncakes_own_tests_pass(tmp_path: Path) -> None:
    tests = Path(os.environ["MOONCAKE_SRC"]) / "mooncake-wheel" / "tests"
    assert tests.is_dir(), f"MOONCAKE_SRC is to be a checkout of Mooncake: there is no {tests}"
    unknown = {path.name for path in tests.glob("test_*.py")} - {*RUN, *EXCLUDED_FILES}
    assert not unknown, f"neither run nor excluded with a reason: {sorted(unknown)}"
    report = tmp_path / "report.xml"
    with cluster(tmp_path) as started:
        started.start_node("--dram", "1GiB")
        environment = {
            **os.environ,
            "PYTHONPATH": install(tmp_path),
            "MASTER_SERVER": started.address,
            "DEFAULT_KV_LEASE_TTL": "0",  # what they wait for leases of Mooncake's
            "KVSTORE_MOONCAKE_LEASE_S": "0",
        }
        command = [str(python_of("mooncake")), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--rootdir", str(tests.parent), "--junit-xml", str(report)]
        command += [f"--deselect=tests/{name}" for name in EXCLUDED_TESTS]
        found = subprocess.run([*command, *RUN], cwd=tests, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    assert int(suite.attrib["tests"]) - int(suite.attrib["skipped"]) >= 150, found.stdout
    assert "setup failed" not in report.read_text(), "some were skipped for they found no store"


def test_mooncakes_own_tests_of_its_transfer_engine_pass(tmp_path: Path) -> None:
    """Bytes of one process are written to another one's memory and read back, by single, batched and asynchronous calls."""
    tests = Path(os.environ["MOONCAKE_SRC"]) / "mooncake-wheel" / "tests"
    target_port, port = free_ports(2)
    environment = {
        **os.environ,
        "PYTHONPATH": install(tmp_path),
        "MC_METADATA_SERVER": "P2PHANDSHAKE",
        "TARGET_SERVER_NAME": f"127.0.0.1:{target_port}",
        "INITIATOR_SERVER_NAME": f"127.0.0.1:{port}",
        "CIRCLE": "200",
    }
    python = str(python_of("mooncake"))
    command = [python, "-u", str(tests / "transfer_engine_target.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as target:
        try:
            assert target.stdout is not None
            assert any("Target server ready" in line for line in target.stdout)
            test = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "transfer_engine_initiator_test.py"]
            found = subprocess.run(test, cwd=tests, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
        finally:
            target.kill()
    assert found.returncode == 0, found.stdout
    assert "6 passed" in found.stdout
