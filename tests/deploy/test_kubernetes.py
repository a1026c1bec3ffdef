"""The manifests: valid for Kubernetes, the same as the chart's, their settings settings, and a node empties before it ends."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.master.config import MasterSettings
from kvstore.protocol.ports import MASTER_HTTP, NODE_HTTP
from kvstore.protocol.settings import load_settings, parse_size
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import check_limit, plan_memory
from kvstore.store.storage import SHUTDOWN_TIMEOUT_S, check
from kvstore.tiers.memory_limit import MemoryLimit
from kvstore.transfer.config import TransferSettings
from tests.client.embedded import embedded
from tests.deploy.rendering import base, chart, overlay, values

pytestmark = pytest.mark.slow

VERSION = "1.30"
OVERLAYS = ("nvme", "hugepages", "rdma")
MADE = {"base": base, "chart": chart} | {name: lambda name=name: overlay(name) for name in OVERLAYS}


def one(documents: list[Any], kind: str) -> Any:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod(documents: list[Any], kind: str) -> Any:
    return one(documents, kind)["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", MADE)
def test_each_manifest_is_valid(name: str) -> None:
    for document in MADE[name]():
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_chart_with_its_own_values_is_the_base() -> None:
    def named(documents: list[Any]) -> dict[tuple[str, str], Any]:
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    assert named(chart()) == {key: document for key, document in named(base()).items() if key[0] != "Namespace"}


def test_a_value_of_the_chart_is_in_the_manifest() -> None:
    given = values()
    given["image"], given["masters"]["replicas"] = "elsewhere/kvstore:9", 5
    made = chart(given)
    assert one(made, "StatefulSet")["spec"]["replicas"] == 5
    for kind in ("StatefulSet", "DaemonSet"):
        assert pod(made, kind)["containers"][0]["image"] == "elsewhere/kvstore:9"


@pytest.mark.promise("documented")
@pytest.mark.parametrize("name", MADE)
def test_kubernetes_settings_valid_and_nodes_drain(name: str) -> None:
    documents = MADE[name]()
    environ = one(documents, "ConfigMap")["data"]
    load_settings(MasterSettings, "master", flags={}, environ=environ)
    load_settings(TransferSettings, "transfer", flags={}, environ=environ)
    node = load_settings(NodeSettings, "node", flags={"advertise": "10.0.0.1:7450"}, environ=environ)
    check(node)
    spec = pod(documents, "DaemonSet")
    (container,) = spec["containers"]
    empty_s = int(next(each["value"] for each in container["env"] if each["name"] == "EMPTY_SECONDS"))
    assert "kvstore drain" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "--cancel" in container["lifecycle"]["postStart"]["exec"]["command"][-1]
    assert spec["terminationGracePeriodSeconds"] >= empty_s + node.drain_s + SHUTDOWN_TIMEOUT_S


def test_a_pod_undoes_its_own_drain_and_no_operators(tmp_path: Path) -> None:
    """The very scripts of the manifest, on a cluster."""
    lifecycle = pod(base(), "DaemonSet")["containers"][0]["lifecycle"]
    mark = tmp_path / "drained"
    with embedded() as cluster, Control.find(ClientSettings(master=cluster.address)) as control:
        (name,) = (node.name for node in control.status().nodes)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given = {"KVSTORE_MASTER": cluster.address, "KVSTORE_NODE_NAME": name, "EMPTY_SECONDS": "60", "DRAINED_HERE": str(mark)}

        def hook(which: str) -> None:
            subprocess.run(lifecycle[which]["exec"]["command"], env=os.environ | given | {"PATH": path}, check=True, timeout=120)

        def is_drained() -> bool:
            return control.status().nodes[0].HasField("drain")

        hook("postStart")
        hook("preStop")
        assert (is_drained(), mark.exists()) == (True, True)
        hook("postStart")
        assert (is_drained(), mark.exists()) == (False, False)
        control.drain(name)
        hook("preStop")
        hook("postStart")
        assert (is_drained(), mark.exists()) == (True, False)


@pytest.mark.parametrize("name", MADE)
def test_kubernetes_probes_daemons_without_privileges(name: str) -> None:
    documents = MADE[name]()
    for kind, http in (("StatefulSet", MASTER_HTTP), ("DaemonSet", NODE_HTTP)):
        (container,) = pod(documents, kind)["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == http.number
        assert (container["livenessProbe"]["httpGet"], container["readinessProbe"]["httpGet"]) == (
            {"path": "/healthz", "port": "http"},
            {"path": "/readyz", "port": "http"},
        )
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod(documents, kind)["enableServiceLinks"] is False


def test_a_file_that_a_setting_names_is_in_a_secret() -> None:
    environ = one(base(), "ConfigMap")["data"]
    nodes = ["KVSTORE_NODE_JOIN_TOKEN_FILE", "KVSTORE_NODE_HTTP_TOKEN_FILE"]
    for kind, names in (("StatefulSet", ["KVSTORE_MASTER_TOKENS"]), ("DaemonSet", nodes)):
        spec = pod(base(), kind)
        secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
        (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] in secrets]
        files = {f"{mount['mountPath']}/{item['path']}" for item in secrets[mount["name"]]["items"]}
        assert {environ[name] for name in names} == files


@pytest.mark.parametrize("name", MADE)
def test_node_fits_into_the_limit_of_its_pod(name: str) -> None:
    documents = MADE[name]()
    resources = pod(documents, "DaemonSet")["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    node = load_settings(NodeSettings, "node", flags={}, environ=one(documents, "ConfigMap")["data"])
    plan = plan_memory(node)
    check_limit(node, plan, MemoryLimit(parse_size(resources["limits"]["memory"]), "the pod's"), has_reserved_pages=node.hugepages)
    if node.hugepages:
        assert parse_size(resources["limits"]["hugepages-2Mi"]) == plan.dram_bytes
    assert plan.dram_bytes > 15 << 30
