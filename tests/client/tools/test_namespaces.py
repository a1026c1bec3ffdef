"""Promises of namespaces.py: which namespace a name is, and what is said of it."""

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from kvstore.client.tools.namespaces import Known, compared, details, details_table, find, known, namespaces_table
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

ONE = Namespace(model="llama", revision="base@v1", dtype="bf16", block_tokens=16, salt="pepper")
OTHER = replace(ONE, block_tokens=32)
HELD = pb.Held(blocks=1200, bytes=1 << 20)


def printed(shown: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def usage(name: str, tenant: str = "red") -> pb.NamespaceUsage:
    return pb.NamespaceUsage(tenant=tenant, namespace=name, held=HELD)


def of(namespace: Namespace, tenant: str = "red") -> Known:
    return Known(tenant, namespace.id.hex(), usage(namespace.id.hex(), tenant), namespace)


def form(namespace: Namespace, tenant: str = "red") -> pb.KnownNamespace:
    return pb.KnownNamespace(tenant=tenant, form=pb.NamespaceForm(id=namespace.id, form=namespace.canonical()))


def test_what_has_blocks_and_what_engines_reported_is_known() -> None:
    reply = pb.ContentsReply(namespaces=[usage(ONE.id.hex()), usage("a name")])
    found = known(reply, pb.WeightsTable(namespaces=[form(ONE), form(OTHER)]))
    assert [(one.name, one.usage.held.blocks, one.identity is not None) for one in found] == [
        (ONE.id.hex(), 1200, True),
        ("a name", 1200, False),
        (OTHER.id.hex(), 0, True),
    ]


def test_the_beginning_of_an_id_is_enough_and_a_name_is_taken_whole() -> None:
    among = [Known("red", name, usage(name), None) for name in ("abcd", "abce", "ab", "x" * 3)]
    assert find("abcd", among, "").name == "abcd"
    assert find("ABCD", among, "").name == "abcd"
    assert find("x", among, "").name == "xxx"
    assert find("ab", among, "").name == "ab", "all of a name comes before the beginning of others"
    with pytest.raises(InvalidArgument, match=r"'abc' begins several namespaces: abcd, abce; give more of it"):
        find("abc", among, "")
    for unknown in ("y", ""):
        with pytest.raises(InvalidArgument, match=f"there is no namespace {unknown!r}: kvstore namespaces lists"):
            find(unknown, among, "")
    many = [Known("red", f"a{number:02}", usage("a"), None) for number in range(10)]
    with pytest.raises(InvalidArgument, match=r"a07 and 2 more; give"):
        find("a", many, "")


def test_one_of_several_tenants_is_the_own_or_has_to_be_said() -> None:
    among = [of(ONE, "red"), of(ONE, "blue")]
    assert find(ONE.id.hex(), among, "blue").tenant == "blue"
    with pytest.raises(InvalidArgument, match=r"is of several tenants: 'red', 'blue'; say which by --tenant"):
        find(ONE.id.hex(), among, "")


def test_a_list_has_a_row_a_namespace() -> None:
    full = usage("abcd" * 8)
    full.MergeFrom(
        pb.NamespaceUsage(
            model="llama",
            layout="bf16, 16 tokens a block",
            weights="base@v1",
            users=["a", "b"],
            is_used=True,
            is_retired=True,
            read_age_s=7,
        )
    )
    text = printed(namespaces_table(pb.ContentsReply(namespaces=[full])))
    for part in ("abcdabcd", "llama", "bf16, 16 tokens a block", "base@v1 (retired)", "1,200", "1 MiB", "7 s ago", "a, b"):
        assert part in text
    assert "abcdabcda" not in text, "the beginning of an id is enough"
    assert "tenant" not in text
    unused = pb.NamespaceUsage(model="m", weights="base", users=["gone"])
    mixed = printed(namespaces_table(pb.ContentsReply(namespaces=[full, unused])))
    assert "tenant" in mixed
    assert "(none)" in mixed
    assert "gone" not in mixed


def test_details_have_all_fields_and_no_salt() -> None:
    told = details(of(ONE))
    assert (told["blocks"], told["read_age_s"], told["identity"]["block_tokens"], told["identity"]["salt"]) == (1200, None, "16", "set")
    read = usage("abcd")
    read.read_age_s = 3.0
    bare = Known("", "abcd", read, None)
    assert (details(bare)["read_age_s"], details(bare)["identity"]) == (3.0, None)
    text = printed(details_table(of(ONE)))
    for part in ("block_tokens", "version", "v1", "identity: tenant"):
        assert part in text
    assert "pepper" not in text
    assert "no engine has reported what it is made of" in printed(details_table(bare))


def test_a_comparison_says_why_engines_do_not_share() -> None:
    [line] = compared(of(ONE), of(OTHER))
    assert line.startswith(f"block_tokens is 16 in {ONE.id.hex()[:8]} and 32 in {OTHER.id.hex()[:8]}")
    assert compared(of(ONE), of(ONE)) == ["They are one namespace: engines that use it share blocks of equal tokens."]
    assert compared(of(ONE), of(ONE, "blue")) == ["The store's tenant is 'red' of one and 'blue' of the other. Tenants never share."]
    for pair in ((of(ONE), Known("", "n", usage("n"), None)), (Known("", "n", usage("n"), None), of(ONE))):
        with pytest.raises(InvalidArgument, match="nothing can be said of namespace n: no engine has reported"):
            compared(*pair)
