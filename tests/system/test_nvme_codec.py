"""A node that quantises raw tensor values on their way to NVMe, in a process of its own: room, error, what stays exact, what outlives a
restart or a change of the codec, copies to another node, and what an operator sees of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.client.sync import Client
from kvstore.protocol import control_pb2 as pb
from tests.master.running import master_in_thread
from tests.store.tensors import after, numbers_of, tensor_value
from tests.system.history import value_of
from tests.system.running import System, running_system, until
from tests.system.test_copying import Cluster

SHAPE = (4, 2, 4, 16, 128)
"""128 KiB of bfloat16, and the header."""
TENSORS = {b"tensor-%d" % seed: tensor_value(seed, SHAPE) for seed in range(40)}
SIZE = len(TENSORS[b"tensor-0"])
PLAIN = {b"plain-%d" % number: value_of(b"plain-%d" % number, 0, SIZE) for number in range(8)}
VALUES = {**TENSORS, **PLAIN}
KEYS = list(VALUES)
ENCODED = 64 + 32 * (16 * 128 + 4)
DRAM_BYTES = 8 * SIZE
NVME_BYTES = 40 * ENCODED + 8 * SIZE + 1
"""Room for all of it, the tensors encoded: not for two thirds of these as they are."""
TENANT = "red"


def flags(folder: Path, codec: str) -> str:
    return f"--dram {DRAM_BYTES} --nvme {folder / 'nvme'}:{NVME_BYTES} --nvme-codec {codec}"


def put_all(client: Client) -> None:
    for key, value in VALUES.items():
        assert client.put(key, value)


def found_in(client: Client) -> dict[bytes, bytes | None]:
    return dict(zip(KEYS, client.get_batch(KEYS), strict=True))


def what_may_be(scheme: str, key: bytes) -> tuple[bytes, ...]:
    """Return the possible values of a key: the one that was put, and its encoding by the scheme."""
    return (VALUES[key], after(scheme, VALUES[key])) if key in TENSORS else (VALUES[key],)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A node that was given all of VALUES and is at rest. Tests read it only."""
    folder = tmp_path_factory.mktemp("filled")
    with running_system(folder, flags(folder, "fp8-head")) as started:
        with started.client() as client:
            put_all(client)
        started.await_settled()
        yield started


def test_codec_status_shows_decoded_and_encoded_size(filled: System) -> None:

    def shown(*arguments: str) -> str:
        result = CliRunner().invoke(kvstore, [*arguments, "--master", filled.address], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    dram, nvme = json.loads(shown("tiers", "--json"))
    assert (dram["codec"], dram["elements"], dram["effective_bits"]) == ("", 0, None)
    assert dram["logical_bytes"] == dram["used_bytes"]
    blocks = nvme["elements"] // (SIZE // 2 - 32)
    assert nvme["codec"] == "fp8-head"
    assert blocks >= len(TENSORS) - DRAM_BYTES // SIZE
    assert (nvme["payload_bytes"], nvme["metadata_bytes"]) == (nvme["elements"], blocks * (64 + 32 * 4))
    assert nvme["effective_bits"] == pytest.approx(8 * ENCODED * 2 / (SIZE - 64))
    assert nvme["logical_bytes"] == nvme["used_bytes"] + blocks * (SIZE - ENCODED)
    assert "fp8-head" in shown("tiers")
    assert "8.02 bits an element" in shown("status")


@pytest.mark.promise("codec-bounded")
def test_codec_holds_more_within_the_error_of_the_scheme(filled: System) -> None:
    with filled.client() as client:
        first = found_in(client)
        assert [key for key, value in first.items() if value is None] == [], "there is room for all"
        assert all(first[key] == value for key, value in PLAIN.items())
        changed = [key for key in TENSORS if first[key] != TENSORS[key]]
        assert len(changed) >= len(TENSORS) - DRAM_BYTES // SIZE
        for key in changed:
            assert first[key] == after("fp8-head", TENSORS[key])
            before, now = numbers_of(TENSORS[key]), numbers_of(first[key] or b"")
            assert np.abs(now - before).max() <= np.abs(before).max() / 16, "three bits of mantissa"
        for _ in range(2):  # promoted meanwhile, or dropped from DRAM again
            again = found_in(client)
            assert {key: again[key] for key in changed} == {key: first[key] for key in changed}


@pytest.mark.promise("codec-bounded")
def test_codec_change_keeps_old_values_readable(tmp_path: Path) -> None:
    with running_system(tmp_path, flags(tmp_path, "fp8-head")) as system:
        with system.client() as client:
            put_all(client)
            stored = _nvme(system)
            kept = [key for key, found in zip(KEYS, client.locate(KEYS), strict=True) if any("nvme" in one.tiers for one in found)]
            system.kill_node()
            system.start_node("n0", *flags(tmp_path, "int4/16").split())
            again = _nvme(system)
            assert (stored.codec, again.codec) == ("fp8-head", "int4/16")
            assert _accounts(again) == _accounts(stored), "nothing is encoded anew"
            for _ in range(3):
                found = {key: value for key, value in found_in(client).items() if value is not None}
                assert found == {key: what_may_be("fp8-head", key)[-1] for key in kept}


def _nvme(system: System) -> pb.TierStatus:
    return next(tier for tier in system.await_settled().tiers if tier.name == "nvme")


def _accounts(tier: pb.TierStatus) -> tuple[int, int, int]:
    return tier.payload_bytes, tier.metadata_bytes, tier.elements


@pytest.mark.promise("codec-bounded")
def test_codec_copy_has_the_version_of_its_source(tmp_path: Path) -> None:
    with (
        master_in_thread(tmp_path / "m", heartbeat_interval_s=0.05, node_ttl_s=60.0) as places,
        Cluster(tmp_path, places) as system,
    ):
        system.start_node("a", *flags(tmp_path, "fp8-head").split())
        with system.client(tenant=TENANT) as client:
            put_all(client)
            system.await_settled("a")
            given = found_in(client)
            system.start_node("b", "--dram", "32MiB")
            places.replicate(TENANT, KEYS, node_id=2, source_node_id=1)
            until(lambda: system.node_status("b").counters.get("copied_blocks") == len(KEYS), "all is copied")
            located = client.locate(KEYS)
            assert {len({(one.generation, one.checksum) for one in found}) for found in located} == {1}
            assert {len(found) for found in located} == {2}
            system.kill_node("a")
            with system.client(tenant=TENANT) as newcomer:
                copied = found_in(newcomer)
        assert all(copied[key] in what_may_be("fp8-head", key) for key in KEYS)
        assert sum(copied[key] == given[key] != VALUES[key] for key in TENSORS) > len(TENSORS) // 2
