"""Promises of quota.py, through the command line, against a real cluster."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli.main import kvstore
from kvstore.cli.quota import QuotaRow, excesses, is_known, known_tenants, rows
from kvstore.protocol import control_pb2 as pb
from tests.credentials import OPERATOR, tokens_file
from tests.system.running import System, until

STATUS = pb.StatusReply(
    nodes=[
        pb.NodeStatus(name="n2", tenants=[pb.TenantUse(tenant="red", dram_bytes=1024, blocks=2, connections=1)]),
        pb.NodeStatus(name="n1", tenants=[pb.TenantUse(tenant="blue", nvme_bytes=5, dram_slabs=3)]),
    ],
    quotas=pb.Quotas(default=pb.TenantQuota(blocks=9), tenants={"red": pb.TenantQuota(dram_bytes=1024, pins=3)}),
    quota_origins={"red": pb.QuotaOrigins(operator=["pins", "connections"], file=["dram_bytes"])},
    grants=[pb.TenantGrants(tenant="red", pins=2, reservations=1)],
)

RED = pb.TenantUse(tenant="red", dram_bytes=3 << 20, blocks=966, connections=9)
HELD = pb.StatusReply(
    nodes=[
        pb.NodeStatus(name="b", state="alive", tenants=[RED]),
        pb.NodeStatus(name="a", state="dead", tenants=[RED]),
    ],
    grants=[pb.TenantGrants(tenant="green")],
    quotas=pb.Quotas(tenants={"blue": pb.TenantQuota()}),
)


def run(system: System, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["quota", command, "--master", system.address, *arguments])


def show(system: System, *arguments: str) -> Result:
    return run(system, "show", *arguments)


@pytest.mark.promise("tenant-quotas")
def test_quota_show_is_for_operators_not_tenants(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text('[tenants.red]\ndram_bytes = "1MiB"\npins = 7\n')
    tokens = tokens_file(tmp_path, {"red": "token"})
    with System(tmp_path) as system:
        system.start_master(0, "--quotas", str(quotas), "--tokens", tokens)
        system.start_node("n0", "--dram", "16MiB")
        with system.client(tenant="red", token="token") as red:
            assert red.put(b"key", bytes(1 << 16))
            assert red.pin([b"key"]) == [True]

            def is_told() -> bool:
                rows = json.loads(show(system, "--json", "--token", OPERATOR).stdout)
                wanted = [("n0", "dram_bytes", 1 << 16, 1 << 20), ("n0", "blocks", 1, None), ("master", "pins", 1, 7)]
                told = [tuple(row[name] for name in ("at", "what", "used", "quota")) for row in rows if row["tenant"] == "red"]
                return all(row in told for row in wanted)

            until(is_told, "red's use and quota")
        shown = show(system, "--token", OPERATOR).stdout
        assert "64 KiB  1 MiB" in shown
        refused = show(system, "--tenant", "red", "--token", "token")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "are for operators only" in refused.stderr


@pytest.mark.promise("tenant-quotas")
def test_quota_set_and_clear_show_their_origin(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.toml"
    quotas.write_text("[default]\nconnections = 50\n[tenants.red]\npins = 7\nreservations = 5\n")

    def told(system: System) -> dict[str, tuple[int | None, str]]:
        found = json.loads(show(system, "--json").stdout)
        return {row["what"]: (row["quota"], row["origin"]) for row in found if (row["tenant"], row["at"]) == ("red", "master")}

    with System(tmp_path) as system:
        system.start_master(0, "--quotas", str(quotas))
        default = {"connections": (50, "default"), "reservations": (5, "file")}
        assert told(system) == {**default, "pins": (7, "file")}
        done = run(system, "set", "red", "--dram-bytes", "8GiB", "--pins", "none", "--requests-in-flight", "9", "--dram-slabs", "60")
        assert done.output == "red: dram_bytes 8 GiB, pins none, requests_in_flight 9, dram_slabs 60\n"
        assert told(system) == {**default, "pins": (None, "operator"), "requests_in_flight": (9, "operator")}
        assert run(system, "clear", "red", "requests-in-flight").output == "red: requests_in_flight as in the quotas file\n"
        assert told(system) == {**default, "pins": (None, "operator")}
        assert run(system, "clear", "red").output == "red: all limits as in the quotas file\n"
        assert told(system) == {**default, "pins": (7, "file")}
        assert run(system, "set", "", "--pins", "1").output == "requests without a tenant: pins 1\n"
        assert run(system, "clear", "").output == "requests without a tenant: all limits as in the quotas file\n"


@pytest.mark.promise("tenant-quotas")
def test_bad_limits_are_one_line_and_change_nothing(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0)
        for command, arguments, text in (
            ("set", ("red",), "no limit is given: set at least one of hbm_bytes, dram_bytes, "),
            ("set", ("red", "--pins", "8GiB"), "pins: '8GiB' is no limit; write a whole number from 0 on, or \"none\""),
            ("set", ("t" * 129, "--pins", "1"), "a tenant's name is at most 128 bytes long, not 129"),
            ("clear", ("red", "dram"), "there is no limit 'dram'; there are: hbm_bytes, "),
        ):
            refused = run(system, command, *arguments)
            assert (refused.exit_code, refused.stdout) == (2, "")
            assert refused.stderr.startswith(f"kvstore: error: {text}")
        assert json.loads(show(system, "--json").stdout) == []


@pytest.mark.promise("observable")
def test_a_limit_below_what_a_tenant_holds_asks_before_it_evicts(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0)
        system.start_node("n0", "--dram", "16MiB")
        with system.client() as client:
            client.put_batch([b"%d" % number for number in range(20)], [bytes(1 << 16)] * 20)
        system.await_counters(publish_backlog=0)

        def held() -> int:
            return sum(use.blocks for use in system.node_status().tenants)

        until(lambda: held() == 20, "the master hears what the tenant holds")
        refused = run(system, "set", "", "--blocks", "4")
        assert refused.exit_code == 2
        assert "requests without a tenant at n0: 16 of 20 exceed the new blocks of 4, and will be evicted" in refused.stderr
        assert refused.stderr.endswith("kvstore: error: no limit was changed: pass --yes to evict the blocks above the new limits\n")
        assert json.loads(show(system, "--json").stdout)[0]["quota"] is None

        command = [sys.executable, "-m", "kvstore.cli.main", "quota", "set", "", "--blocks", "4", "--master", system.address]
        for answer, status, left in (("n", 1, 20), ("y", 0, 4)):
            assert answered(command, answer) == status
            until(lambda left=left: held() == left, f"{left} blocks")  # type: ignore[misc]
        assert run(system, "set", "", "--blocks", "1", "--yes").exit_code == 0
        until(lambda: held() == 1, "one block")


def answered(command: list[str], answer: str) -> int:
    """The exit status of a command that asks on a terminal, and is answered so."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        assert process.stderr is not None
        assert b"evict these?" in process.stderr.read()
        status = process.wait(120)
    os.close(ours)
    return status


def test_a_tenant_that_nobody_has_seen_is_a_warning(tmp_path: Path) -> None:
    with System(tmp_path) as system:
        system.start_master(0)
        done = run(system, "set", "purpel", "--pins", "5")
        assert (done.exit_code, done.stdout) == (0, "purpel: pins 5\n")
        assert done.stderr == "warning: no node or master has seen tenant 'purpel' yet; tenants seen: none\n"
        assert run(system, "set", "purpel", "--pins", "6").stderr == ""


def test_rows_cover_usage_and_limits_at_each_daemon() -> None:
    assert rows(STATUS) == [
        QuotaRow("blue", "n1", "nvme_bytes", 5, None, ""),
        QuotaRow("blue", "n1", "dram_slabs", 3, None, ""),
        QuotaRow("blue", "n1", "blocks", 0, 9, "default"),
        QuotaRow("red", "n1", "dram_bytes", 0, 1024, "file"),
        QuotaRow("red", "n1", "connections", 0, None, "operator"),
        QuotaRow("red", "n2", "dram_bytes", 1024, 1024, "file"),
        QuotaRow("red", "n2", "blocks", 2, None, ""),
        QuotaRow("red", "n2", "connections", 1, None, "operator"),
        QuotaRow("red", "master", "pins", 2, 3, "operator"),
        QuotaRow("red", "master", "reservations", 1, None, ""),
        QuotaRow("red", "master", "connections", 0, None, "operator"),
    ]


def test_what_lies_above_a_new_limit_is_told_by_living_node() -> None:
    found = excesses(HELD, "red", {"dram_bytes": 1 << 20, "blocks": 4, "nvme_bytes": None, "hbm_bytes": 0})
    assert [(one.at, one.what) for one in found] == [("b", "dram_bytes"), ("b", "blocks")]
    assert list(map(str, found)) == [
        "2 MiB of 3 MiB in 966 blocks exceed the new dram_bytes of 1 MiB, and will be evicted",
        "962 of 966 exceed the new blocks of 4, and will be evicted",
    ]


def test_tenants_are_known_by_what_they_hold_and_by_their_limits() -> None:
    assert known_tenants(HELD) == ["blue", "green", "red"]
    assert [is_known(HELD, name) for name in ("green", "purple")] == [True, False]
