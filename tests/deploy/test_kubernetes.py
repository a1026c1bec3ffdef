"""The manifests: valid for Kubernetes, the same as the chart's, their settings settings, and a node empties before it ends."""

import os
import re
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
from kvstore.security.credentials import read_credentials
from kvstore.security.identity import Kind
from kvstore.store.config import NodeSettings
from kvstore.store.memory_plan import check_limit, plan_memory
from kvstore.store.storage import check
from kvstore.store.tuning import TUNING
from kvstore.tiers.memory_limit import MemoryLimit
from kvstore.transfer.config import TransferSettings
from tests.client.embedded import embedded
from tests.deploy.rendering import DEPLOY, base, chart, overlay, values

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


@pytest.mark.parametrize("name", MADE)
def test_the_settings_are_settings_and_a_node_ends_when_it_is_empty(name: str) -> None:
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
    assert spec["terminationGracePeriodSeconds"] >= empty_s + node.drain_s + TUNING.shutdown_timeout_s


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
def test_daemons_are_asked_for_their_health_and_have_no_privileges(name: str) -> None:
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


def test_a_disruption_leaves_a_majority_of_masters() -> None:
    assert one(base(), "PodDisruptionBudget")["spec"]["minAvailable"] * 2 > one(base(), "StatefulSet")["spec"]["replicas"]


def test_engines_of_a_host_reach_the_nodes_socket() -> None:
    spec = pod(base(), "DaemonSet")
    (run,) = [volume for volume in spec["volumes"] if volume["name"] == "run"]
    assert run["hostPath"]["path"] == "/run/kvstore"
    assert {"name": "run", "mountPath": "/run/kvstore"} in spec["containers"][0]["volumeMounts"]


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


@pytest.mark.parametrize(("name", "resource"), [("hugepages", "hugepages-2Mi"), ("rdma", "rdma/hca_shared_devices_a")])
def test_an_overlay_asks_for_what_it_is_for(name: str, resource: str) -> None:
    assert resource in pod(overlay(name), "DaemonSet")["containers"][0]["resources"]["limits"]
    assert resource not in pod(base(), "DaemonSet")["containers"][0]["resources"]["limits"]


def test_the_steps_make_each_thing_before_what_needs_it(tmp_path: Path) -> None:
    """As deploy/README.md prints them, with a kubectl that notes what it is told and refuses a file that is not there."""
    steps = (DEPLOY / "README.md").read_text().partition("## Kubernetes")[2]
    script = re.findall(r"^```sh\n(.*?)^```$", steps, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "deploy").symlink_to(DEPLOY)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        "#!/bin/bash\nset -eu\n"
        'for word; do case $word in --from-file=*) [ -s "${word#--from-file=}" ];; esac; done\n'
        f'printf "%s\\n" "$*" >> {tmp_path / "calls"}\n'
    )
    kubectl.chmod(0o755)
    path = f"{kubectl.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    order = (
        "apply -f deploy/kubernetes/base/namespace.yaml",
        "create secret generic kvstore-tokens",
        "label node",
        "apply -k",
        "rollout status",
    )
    assert [word in call for word, call in zip(order, calls, strict=True)] == [True] * len(order)
    applied = calls[3].rpartition(" ")[2]
    assert (tmp_path / applied / "kustomization.yaml").is_file()
    operator = (tmp_path / "operator-token").read_text().strip()
    assert f"--from-literal=operator-token={operator}" in calls[1]
    credentials = read_credentials(str(tmp_path / "tokens.toml"))
    shown = {name: (tmp_path / name).read_text().strip() for name in ("join-token", "http-token", "operator-token")}
    kinds = {name: credentials.identify("", token, now_s=0).kind for name, token in shown.items()}
    assert kinds == {"join-token": Kind.NODE, "http-token": Kind.OPERATOR, "operator-token": Kind.OPERATOR}
    wanted = {item["key"] for item in pod(base(), "DaemonSet")["volumes"][-1]["secret"]["items"]}
    assert all(f"--from-file={name}" in calls[1] for name in wanted | {"tokens.toml"})
