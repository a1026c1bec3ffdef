"""The sample of a secured cluster: daemons start with it, on an etcd with TLS and users, and answer by HTTPS."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.cli.tools.child import Child
from kvstore.security.tls.subjects import CLIENT, MASTER, NODE, CertificateSubject
from tests.credentials import JOIN, OPERATOR, tokens_file
from tests.deploy.rendering import DEPLOY
from tests.etcd_server import EtcdServer, found
from tests.ports import free_ports
from tests.security.tls.certified import HOSTS, Cluster
from tests.system.running import DEADLINE_S

pytestmark = pytest.mark.slow

SAMPLE = DEPLOY / "systemd" / "kvstore-tls.toml"
OPERATIONS = DEPLOY.parent / "docs" / "operations.md"
AS_ROOT = ("user add root:root", "role add root", "user grant-role root root")


@dataclass(frozen=True, slots=True)
class Secured:
    """Folder of the settings, and the HTTPS ports of master and node."""

    settings: Path
    master_port: int
    node_port: int


def with_users(etcd: EtcdServer) -> None:
    """Create root and the masters' user, as docs/operations.md does, and enable etcd's authentication."""
    cert, key = etcd.certificate
    [role] = [block for block in re.findall(r"^```sh\n(.*?)^```$", OPERATIONS.read_text(), re.M | re.S) if "grant-permission" in block]
    script = "\n".join([*(f"etcdctl {command}" for command in AS_ROOT), role, "etcdctl auth enable"])
    access = {"CACERT": str(cert), "CERT": str(cert), "KEY": str(key), "ENDPOINTS": f"https://{etcd.host_port}"}
    environment = os.environ | {"ETCDCTL_API": "3"} | {f"ETCDCTL_{name}": value for name, value in access.items()}
    environment["PATH"] = f"{Path(found('etcdctl')).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environment, check=True, capture_output=True, timeout=DEADLINE_S)


def files(folder: Path, etcd: EtcdServer) -> None:
    """All that the sample names below /etc/kvstore."""
    cluster = Cluster(folder / "made")
    subjects = {
        "master": CertificateSubject(MASTER),
        "node": CertificateSubject(NODE, "node-1"),
        "operator": CertificateSubject(CLIENT, "*"),
    }
    for name, subject in subjects.items():
        cert, key = cluster.file(subject, hosts=() if name == "operator" else HOSTS)
        shutil.copy(cert, folder / f"{name}.pem")
        shutil.copy(key, folder / f"{name}.key")
    shutil.copy(folder / "made" / "ca.pem", folder / "ca.pem")
    cert, key = etcd.certificate
    for made, name in ((cert, "etcd-ca.pem"), (cert, "etcd-client.pem"), (key, "etcd-client.key"), (cert, "https.pem"), (key, "https.key")):
        shutil.copy(made, folder / name)
    (folder / "revoked").write_text("")
    (folder / "etcd-password").write_text("secret\n")
    (folder / "join-token").write_text(f"{JOIN}\n")
    (folder / "http-token").write_text("scraper\n")
    tokens_file(folder)


@pytest.fixture
def secured(tmp_path: Path, etcd_server_factory: Callable[..., EtcdServer]) -> Secured:
    """The sample, with the paths, ports, names and sizes of this test in place of its own; nothing else is changed."""
    etcd = etcd_server_factory(tls=True)
    with_users(etcd)
    (tmp_path / "made").mkdir()
    files(tmp_path, etcd)
    listen, control, master_http, node, node_http, transfer = free_ports(6)
    ports = {7440: listen, 7441: control, 7442: master_http, 7450: node, 7452: node_http, 7460: transfer}
    text = SAMPLE.read_text()
    text = text.replace("etcd-1:2379,etcd-2:2379,etcd-3:2379", etcd.host_port).replace(
        "master-1:7440,master-2:7440,master-3:7440", "master-1:7440"
    )
    text = (
        text.replace("/etc/kvstore/", f"{tmp_path}/")
        .replace("/run/kvstore", f"{tmp_path}/run")
        .replace("/var/lib/kvstore/", f"{tmp_path}/")
    )
    text = text.replace("64GiB", "16MiB").replace("1TiB", "32MiB").replace('socket_group = "kvstore"\n', "")
    text = text.replace('"master-1', '"127.0.0.1').replace('"node-1:', '"127.0.0.1:').replace("0.0.0.0", "127.0.0.1")
    text = re.sub(r"\b(74\d\d)\b", lambda match: str(ports[int(match[1])]), text)
    settings = tmp_path / "kvstore.toml"
    settings.write_text(text)
    return Secured(settings, master_http, node_http)


@pytest.fixture
def running(secured: Secured) -> Iterator[Secured]:
    started: list[Child] = []
    try:
        for daemon in ("master", "store"):
            module, arguments = f"kvstore.{daemon}.daemon", ["--config", str(secured.settings)]
            started.append(Child(daemon, module, arguments, environment=os.environ, on_log=lambda *_: None, on_end=lambda _: None))
            started[-1].facts("ready", deadline_s=DEADLINE_S)
        yield secured
    finally:
        for child in reversed(started):
            child.kill()


def test_a_secured_cluster_starts_with_the_sample_and_answers(running: Secured) -> None:
    for port, token in ((running.master_port, OPERATOR), (running.node_port, "scraper")):
        assert answered(f"https://127.0.0.1:{port}/readyz", running) == 200
        assert answered(f"https://127.0.0.1:{port}/metrics", running, token) == 200
    environment = os.environ | {"KVSTORE_CONFIG": str(running.settings), "KVSTORE_CLIENT_TOKEN": OPERATOR}
    command = [sys.executable, "-m", "kvstore.cli.main", "status", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    status = json.loads(done.stdout)
    assert [(node["name"], node["state"]) for node in status["nodes"]] == [("node-1", "alive")]
    assert status["catalog"].startswith("etcd")


def answered(url: str, secured: Secured, token: str = "") -> int:
    context = ssl.create_default_context(cafile=str(secured.settings.parent / "https.pem"))
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return int(answer.status)
