"""The doctor's checks of hosts, on fake hosts made of files and on this host."""

import contextlib
import datetime
import os
import pwd
import shutil
from pathlib import Path

import pytest

from kvstore.cli.tools import host_checks
from kvstore.cli.tools.host_checks import certificate_files, setting_of
from kvstore.cli.tools.transport_checks import Check, CheckVerdict
from kvstore.security.tls.authority import ValidityPeriod, issue, make_authority
from kvstore.security.tls.subjects import CertificateSubject
from tests.forks import told_by_child
from tests.users import NOBODY, become_another, common_folder, shut_out

NOW = datetime.datetime.now(datetime.UTC)

FILE = """
router = "no section"
[node]
nvme = "/mnt/nvme:1TiB"
tls_cert = "/etc/kvstore/node.pem"
http_tls_cert = "/etc/kvstore/node.pem"
[master]
http_tls_cert = "/etc/kvstore/master.pem"
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def judged(check: Check) -> tuple[CheckVerdict, str]:
    """Return verdict and finding, after checking that all but OK have advice."""
    assert bool(check.advice) == (check.verdict is not CheckVerdict.OK)
    return check.verdict, check.found


def test_pages_that_wander_between_numa_nodes_are_told_of(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    assert judged(host_checks.numa(tmp_path)) == (CheckVerdict.OK, "2 NUMA nodes")
    write(tmp_path / "proc/sys/kernel/numa_balancing", "1\n")
    assert judged(host_checks.numa(tmp_path))[0] is CheckVerdict.WARNING


def test_a_port_on_ethernet_needs_a_gid_of_roce_v2(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    assert judged(host_checks.gids(tmp_path))[0] is CheckVerdict.OK
    write(port / "link_layer", "Ethernet\n")
    write(port / "gid_attrs/types/0", "IB/RoCE v1\n")
    assert judged(host_checks.gids(tmp_path)) == (CheckVerdict.WARNING, "mlx5_0:1: RoCE v2 at index none")
    write(port / "gid_attrs/types/3", "RoCE v2\n")
    assert judged(host_checks.gids(tmp_path)) == (CheckVerdict.OK, "mlx5_0:1: RoCE v2 at index 3")


def disk(root: Path, folder: Path, kind: str, *, at: str = "", rotational: str = "0") -> None:
    """`folder` is on a file system of that kind."""
    write(root / "proc/mounts", f"/dev/a / ext4 rw 0 0\n/dev/b {at or folder} {kind} rw 0 0\n")
    device = folder.stat().st_dev
    write(root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/rotational", rotational)


def test_nvme_check_wants_existing_separate_disk(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "nvme"
    folder.mkdir()
    disk(root, folder, "xfs")
    verdict, found = judged(host_checks.nvme(f"{folder}:1MiB", root))
    assert (verdict, f"on xfs mounted at {folder}" in found) == (CheckVerdict.OK, True)
    assert judged(host_checks.nvme(str(folder / "made"), root))[0] is CheckVerdict.OK
    assert judged(host_checks.nvme("", root))[0] is CheckVerdict.OK
    assert judged(host_checks.nvme(f"{folder}/a/b:1MiB", root))[0] is CheckVerdict.WRONG
    assert judged(host_checks.nvme(f"{folder}:900000TiB", root))[0] is CheckVerdict.WARNING


def test_nvme_check_counts_the_bytes_that_the_tier_has(tmp_path: Path) -> None:
    """A tier that has filled its disk has the size that it was given."""
    root, folder = tmp_path / "root", tmp_path / "nvme"
    folder.mkdir()
    disk(root, folder, "xfs")
    with (folder / "values").open("wb") as values:
        os.posix_fallocate(values.fileno(), 0, 1 << 30)
    free_bytes = shutil.disk_usage(folder).free
    verdict, found = judged(host_checks.nvme(f"{folder}:{free_bytes + (1 << 29)}", root))
    assert (verdict, "GiB taken by the tier" in found) == (CheckVerdict.OK, True)
    assert judged(host_checks.nvme(f"{folder}:{free_bytes + (1 << 31)}", root))[0] is CheckVerdict.WARNING


def test_doctor_of_another_user_names_who_can_check() -> None:
    """An operator's own account may not look at what belongs to the daemons' user: neither a traceback nor a verdict on it."""
    with common_folder() as folder, contextlib.ExitStack() as stack:
        of_daemon = folder / "of-daemon"
        of_daemon.mkdir(mode=0o700)
        (of_daemon / "node.pem").write_text("")
        stack.enter_context(shut_out(of_daemon))

        def look() -> str:
            become_another(is_member=False)
            checks = [
                host_checks.nvme(f"{of_daemon}/nvme:1MiB"),
                host_checks.certificate(f"{of_daemon}/node.pem", NOW, "[node] tls_cert"),
            ]
            return "\n".join(f"{check.verdict.value}: {check.found}: {check.advice}" for check in checks)

        nvme, certificate = told_by_child(look).splitlines()
    who = f"run it as the user of the daemon: sudo -u {pwd.getpwuid(os.geteuid()).pw_name} kvstore doctor"
    assert nvme == f"warning: not checked: this user may not enter {of_daemon}: {who}"
    assert certificate == f"warning: not checked: cannot read {of_daemon}/node.pem: Permission denied: {who}"


@pytest.mark.parametrize(
    ("kind", "at", "rotational", "said"),
    [("nfs4", "", "0", "not a local disk"), ("ext4", "/", "0", "the root disk"), ("ext4", "", "1", "a rotating disk")],
)
def test_a_disk_that_is_no_good_for_it_is_told_of(tmp_path: Path, kind: str, at: str, rotational: str, said: str) -> None:
    root, folder = tmp_path / "root", tmp_path / "nvme"
    folder.mkdir()
    disk(root, folder, kind, at=at, rotational=rotational)
    verdict, found = judged(host_checks.nvme(str(folder), root))
    assert (verdict, said in found) == (CheckVerdict.WARNING, True)


def test_a_port_is_free_or_kvstores_or_somebody_elses(tmp_path: Path) -> None:
    table = "  sl  local_address rem_address st tx rx tr tm retrnsmt uid timeout inode\n"
    assert judged(host_checks.ports(tmp_path)) == (CheckVerdict.OK, "all free")
    listening = f"   0: 0100007F:{7440:04X} 00000000:0000 0A 0:0 0:0 0 {NOBODY.pw_uid} 0 77 1\n"
    write(tmp_path / "proc/net/tcp", table + listening)
    assert judged(host_checks.ports(tmp_path)) == (CheckVerdict.WARNING, "in use: 7440 of kvstore-master by a process of nobody")
    (tmp_path / "proc/12/fd").mkdir(parents=True)
    (tmp_path / "proc/12/fd/3").symlink_to("socket:[77]")
    write(tmp_path / "proc/12/cmdline", "nginx\0-g\0")
    assert "7440 of kvstore-master by nginx -g" in judged(host_checks.ports(tmp_path))[1]
    write(tmp_path / "proc/12/cmdline", "python\0/opt/kvstore/bin/kvstore-master\0")
    assert judged(host_checks.ports(tmp_path)) == (CheckVerdict.OK, "kvstore listens on 7440; the others are free")


def test_a_certificate_is_told_of_before_it_ends(tmp_path: Path) -> None:
    assert judged(host_checks.certificate("", NOW))[0] is CheckVerdict.OK
    make_authority(tmp_path)
    begin, end = NOW - datetime.timedelta(days=60), NOW + datetime.timedelta(days=30)
    file = str(issue(tmp_path, "n1", [CertificateSubject("node", "n1")], ["localhost"], valid=ValidityPeriod(begin, end))[0])
    for days, verdict in ((0, CheckVerdict.OK), (20, CheckVerdict.WARNING), (31, CheckVerdict.WRONG), (-61, CheckVerdict.WRONG)):
        assert judged(host_checks.certificate(file, NOW + datetime.timedelta(days=days)))[0] is verdict
    (tmp_path / "broken.pem").write_text("nothing")
    for broken in ("broken.pem", "absent.pem"):
        assert judged(host_checks.certificate(str(tmp_path / broken), NOW))[0] is CheckVerdict.WRONG


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "kvstore.toml"
    path.write_text(FILE)
    return str(path)


def test_setting_of_prefers_variable_over_file(config: str) -> None:
    assert setting_of("node", "nvme", config, {}) == "/mnt/nvme:1TiB"
    assert setting_of("node", "nvme", None, {"KVSTORE_CONFIG": config}) == "/mnt/nvme:1TiB"
    assert setting_of("node", "nvme", config, {"KVSTORE_NODE_NVME": "/elsewhere:1GiB"}) == "/elsewhere:1GiB"
    assert [setting_of(section, "nvme", config, {}) for section in ("sidecar", "master", "router")] == ["", "", ""]
    assert setting_of("node", "nvme", None, {}) == ""


def test_each_certificate_is_told_once_by_who_shows_it(config: str) -> None:
    shown = {"[master] http_tls_cert": "/etc/kvstore/master.pem", "[node] tls_cert": "/etc/kvstore/node.pem"}
    assert certificate_files(config, {}) == shown
    assert certificate_files(config, {"KVSTORE_SIDECAR_TLS_CERT": "s.pem"}) == shown | {"[sidecar] tls_cert": "s.pem"}
    assert certificate_files(None, {}) == {}
