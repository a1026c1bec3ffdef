"""Promises of namespaces.py, through the command line, against a real cluster."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from kvstore.cli.main import kvstore
from kvstore.cli.namespaces import ListedNamespace, compared, find, known
from kvstore.client.instances.weights import WeightsReporter
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from tests.credentials import OPERATOR, tokens_file
from tests.system.running import System, until

ONE = Namespace(model="llama", revision="base", dtype="bf16", block_tokens=16, salt="pepper")
OTHER = replace(ONE, block_tokens=32, revision="base@v1")

FIRST = Namespace(model="llama", revision="base@v1", dtype="bf16", block_tokens=16, salt="pepper")
SECOND = replace(FIRST, block_tokens=32)
STORED = pb.StorageUsage(blocks=1200, bytes=1 << 20)


def run(system: System, *arguments: str) -> Result:
    return CliRunner().invoke(kvstore, ["namespaces", *arguments, "--master", system.address])


def listed(system: System, *arguments: str) -> dict[str, Any]:
    return {one["namespace"]: one for one in json.loads(run(system, "--json", *arguments).stdout)}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path) as system:
        system.start_master()
        system.start_node("n0", "--dram", "16MiB")
        yield system


def test_what_is_in_the_store_is_listed_shown_and_compared(started: System) -> None:
    system = started
    with system.client() as client, closing(WeightsReporter(client, "engine-1")) as reporter:
        client.put(b"k", bytes(1000), namespace=ONE)
        client.put(b"l", bytes(1000), namespace="a name")
        reporter.use("base", "", [ONE.canonical(), OTHER.canonical()])
        until(lambda: listed(system).get(OTHER.id.hex(), {}).get("is_used", False), "the engine has reported")
        found = listed(system)
        one, other, bare = found[ONE.id.hex()], found[OTHER.id.hex()], found["a name"]
        assert (one["model"], one["weights"], one["blocks"], one["users"], one["read_age_s"]) == ("llama", "base", 1, ["engine-1"], None)
        assert (other["blocks"], bare["model"], bare["users"]) == (0, "", [])
        assert one["layout"].endswith("16 tokens a block")
        assert (bare["layout"], one["layout"] == other["layout"]) == ("", False)
        assert client.get(b"k") is not None
        until(lambda: listed(system)[ONE.id.hex()]["read_age_s"] is not None, "the node tells when it was read")
        assert listed(system)[ONE.id.hex()]["read_age_s"] < 60
        assert "llama" in run(system).stdout
        shown = run(system, "show", ONE.id.hex()[:6]).stdout
        assert "block_tokens" in shown
        assert "pepper" not in shown
        assert json.loads(run(system, "show", ONE.id.hex(), "--json").stdout)["identity"]["salt"] == "set"
        compared = run(system, "diff", ONE.id.hex()[:6], OTHER.id.hex()[:6]).stdout
        assert compared.count("\n") == 2
        assert "block_tokens is 16 in" in compared
        assert "version is that of the files in" in compared
        assert len(json.loads(run(system, "diff", ONE.id.hex(), OTHER.id.hex(), "--json").stdout)) == 2
        wrong = run(system, "show", "nowhere")
        assert (wrong.exit_code, "no namespace 'nowhere'" in wrong.stderr) == (2, True)


def test_an_operator_sees_all_tenants_and_a_tenant_its_own(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, {"red": "r", "blue": "b"})
    with System(tmp_path) as system:
        system.start_master(0, "--tokens", tokens)
        system.start_node("n0", "--dram", "16MiB")
        for tenant, token in (("red", "r"), ("blue", "b")):
            with system.client(tenant=tenant, token=token) as client:
                client.put(b"k", bytes(100), namespace=f"of {tenant}")
        assert set(listed(system, "--token", OPERATOR)) == {"of red", "of blue"}
        assert set(listed(system, "--tenant", "red", "--token", "r")) == {"of red"}


def printed(shown: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def usage(name: str, tenant: str = "red") -> pb.NamespaceUsage:
    return pb.NamespaceUsage(tenant=tenant, namespace=name, stored=STORED)


def of(namespace: Namespace, tenant: str = "red") -> ListedNamespace:
    return ListedNamespace(tenant, namespace.id.hex(), usage(namespace.id.hex(), tenant), namespace)


def form(namespace: Namespace, tenant: str = "red") -> pb.KnownNamespace:
    return pb.KnownNamespace(tenant=tenant, form=pb.NamespaceForm(id=namespace.id, form=namespace.canonical()))


def test_what_has_blocks_and_what_engines_reported_is_known() -> None:
    reply = pb.ContentsReply(namespaces=[usage(FIRST.id.hex()), usage("a name")])
    found = known(reply, pb.WeightsTable(namespaces=[form(FIRST), form(SECOND)]))
    assert [(one.name, one.usage.stored.blocks, one.identity is not None) for one in found] == [
        (FIRST.id.hex(), 1200, True),
        ("a name", 1200, False),
        (SECOND.id.hex(), 0, True),
    ]


def test_find_takes_id_prefix_and_exact_name() -> None:
    among = [ListedNamespace("red", name, usage(name), None) for name in ("abcd", "abce", "ab", "x" * 3)]
    assert find("abcd", among, "").name == "abcd"
    assert find("ABCD", among, "").name == "abcd"
    assert find("x", among, "").name == "xxx"
    assert find("ab", among, "").name == "ab", "all of a name comes before the beginning of others"
    with pytest.raises(InvalidArgument, match=r"'abc' matches several namespaces: abcd, abce; give more digits"):
        find("abc", among, "")
    for unknown in ("y", ""):
        with pytest.raises(InvalidArgument, match=f"no namespace {unknown!r}: `kvstore namespaces` lists"):
            find(unknown, among, "")
    many = [ListedNamespace("red", f"a{number:02}", usage("a"), None) for number in range(10)]
    with pytest.raises(InvalidArgument, match=r"a07 and 2 more; give"):
        find("a", many, "")


def test_one_of_several_tenants_is_the_own_or_has_to_be_said() -> None:
    among = [of(FIRST, "red"), of(FIRST, "blue")]
    assert find(FIRST.id.hex(), among, "blue").tenant == "blue"
    with pytest.raises(InvalidArgument, match=r"belongs to several tenants: 'red', 'blue'; choose one with --tenant"):
        find(FIRST.id.hex(), among, "")


def test_a_comparison_says_why_engines_do_not_share() -> None:
    [line] = compared(of(FIRST), of(SECOND))
    assert line.startswith(f"block_tokens is 16 in {FIRST.id.hex()[:8]} and 32 in {SECOND.id.hex()[:8]}")
    assert compared(of(FIRST), of(FIRST)) == ["They are one namespace: engines that use it share blocks of equal tokens."]
    assert compared(of(FIRST), of(FIRST, "blue")) == ["The store's tenant is 'red' of one and 'blue' of the other. Tenants never share."]
    for pair in ((of(FIRST), ListedNamespace("", "n", usage("n"), None)), (ListedNamespace("", "n", usage("n"), None), of(FIRST))):
        with pytest.raises(InvalidArgument, match="namespace n cannot be compared: no engine has reported"):
            compared(*pair)
