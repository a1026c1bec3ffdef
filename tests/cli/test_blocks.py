"""Promises of blocks.py, through the command line, against a real cluster."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.blocks import KEY, parse_key, show_key
from kvstore.cli.main import kvstore
from kvstore.protocol.errors import InvalidArgument
from tests.client.embedded import embedded
from tests.credentials import OPERATOR, tokens_file
from tests.shell import functions
from tests.system.running import System


class Shell:
    """Runs `kvstore` with KVSTORE_CLIENT_MASTER set."""

    def __init__(self, master: str) -> None:
        self.master = master

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Result:
        return CliRunner().invoke(kvstore, arguments, input=stdin, env={"KVSTORE_CLIENT_MASTER": self.master}, catch_exceptions=False)


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with embedded() as cluster:
        yield Shell(cluster.address)


def test_what_is_put_is_got_back_byte_for_byte(shell: Shell, tmp_path: Path) -> None:
    value = bytes(range(256)) * 10
    (tmp_path / "in").write_bytes(value)
    assert shell("put", "file", str(tmp_path / "in")).output == "file: stored 2.5 KiB\n"
    assert shell("get", "file").stdout_bytes == value
    assert shell("get", "file", str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out").read_bytes() == value


def test_a_second_put_says_that_it_is_there(shell: Shell) -> None:
    assert json.loads(shell("put", "twice", "-", "--json", stdin=b"one").output) == {"key": "twice", "stored": True, "size_bytes": 3}
    assert shell("put", "twice", "-", stdin=b"two").output == "twice: already there\n"
    assert shell("get", "twice", "-").stdout_bytes == b"one"


def test_a_miss_is_said_and_is_status_1(shell: Shell) -> None:
    missed = shell("get", "nowhere")
    assert (missed.exit_code, missed.stdout, missed.stderr) == (1, "", "nowhere: not there\n")


def test_exists_is_status_1_if_any_is_missing(shell: Shell) -> None:
    shell("put", "hex:00ff", "-", stdin=b"x")
    assert (shell("exists", "hex:00ff").exit_code, shell("exists", "hex:00FF").output) == (0, "hex:00ff: there\n")
    both = shell("exists", "hex:00ff", "nowhere", "--json")
    assert (both.exit_code, json.loads(both.output)) == (1, {"hex:00ff": True, "nowhere": False})


def test_locate_tells_node_tiers_and_size(shell: Shell) -> None:
    shell("put", "found", "-", stdin=b"12345")
    located = shell("locate", "found", "nowhere", "--json")
    assert located.exit_code == 1
    place = json.loads(located.output)["found"][0]
    assert (place["node"], place["tiers"], place["size_bytes"]) == ("node-0", ["dram"], 5)
    shown = shell("locate", "found")
    assert shown.exit_code == 0
    assert "node-0" in shown.output
    assert shell("locate", "nowhere").exit_code == 1


def test_prefetch_tells_how_many_blocks_are_queued(shell: Shell) -> None:
    shell("put", "warm", "-", stdin=b"x")
    found = shell("prefetch", "warm")
    assert (found.exit_code, found.output) == (0, "queued 0 of 1\n")
    assert json.loads(shell("prefetch", "warm", "--to", "local", "--json").output) == {"queued": 0, "asked": 1}


def test_a_pinned_block_is_removed_by_force_only(shell: Shell) -> None:
    shell("put", "pinned", "-", stdin=b"x")
    assert shell("pin", "pinned").output == "pinned: pinned\n"
    shell("put", "free", "-", stdin=b"x")
    refused = shell("rm", "pinned", "free", "nowhere")
    assert (refused.exit_code, refused.stdout) == (1, "removed 1 of 3, 1 not there\n")
    assert refused.stderr == "pinned: kept, because it is pinned or being read: `kvstore unpin`, or --force\n"
    assert json.loads(shell("rm", "pinned", "--json").output) == {"removed": 0, "asked": 1, "kept": ["pinned"]}
    assert shell("exists", "pinned").exit_code == 0
    assert shell("rm", "pinned", "--force").output == "removed 1 of 1\n"
    assert shell("pin", "pinned").exit_code == 1


def test_an_unpinned_block_is_removed_and_counted_once(shell: Shell) -> None:
    shell("put", "freed", "-", stdin=b"x")
    shell("pin", "freed")
    assert json.loads(shell("unpin", "freed", "--json").output) == {"freed": True}
    removed = shell("rm", "freed", "freed", "--json")
    assert (removed.exit_code, json.loads(removed.output)) == (0, {"removed": 1, "asked": 1, "kept": []})


def test_blocks_are_removed_by_namespace_and_pattern(shell: Shell) -> None:
    for name in ("chat-1", "chat-2", "doc-1"):
        shell("put", name, "-", "--namespace", "rooms", stdin=b"x")
    assert shell("rm", "--namespace", "rooms", "--pattern", "chat-*").output == "removed 2\n"
    assert json.loads(shell("rm", "--pattern", "doc-?", "--json").output) == {"removed": 1}
    assert shell("rm", "--namespace", "rooms").output == "removed 0\n"
    for arguments in ((), ("key", "--namespace", "rooms")):
        assert shell("rm", *arguments).exit_code == 2


def test_a_pin_with_a_time_ends_by_itself(shell: Shell) -> None:
    shell("put", "soft", "-", stdin=b"x")
    assert shell("pin", "soft", "--ttl-s", "0.001").output == "soft: pinned\n"
    while shell("rm", "soft").exit_code:
        pass


def test_keys_lists_a_namespace(shell: Shell) -> None:
    shell("put", "child", "-", "--namespace", "space", "--parent", "mother", stdin=b"xyz")
    listed = shell("keys", "--namespace", "space", "--json").output.splitlines()
    assert [json.loads(line) for line in listed] == [{"key": "child", "size_bytes": 3, "namespace": "space"}]
    assert "child" in shell("keys").output.splitlines()
    assert len(shell("keys", "--limit", "1").output.splitlines()) == 1


def test_files_that_cannot_be_used_are_one_error(shell: Shell, tmp_path: Path) -> None:
    absent = shell("put", "x", str(tmp_path / "absent"))
    assert (absent.exit_code, absent.stderr) == (2, f"kvstore: error: cannot read {tmp_path / 'absent'}: No such file or directory\n")
    shell("put", "y", "-", stdin=b"y")
    assert "cannot write" in shell("get", "y", str(tmp_path)).stderr


def test_binary_data_is_kept_from_a_terminal(shell: Shell) -> None:
    for key, value in ((b"binary", bytes(range(256))), (b"escape", b"\x1b]0;title\x07"), (b"text", "Grüße\n".encode())):
        shell("put", key.decode(), "-", stdin=value)

    def shown(*arguments: str) -> tuple[int, bytes]:
        """As on a terminal: what it got, its line ends as the terminal makes them."""
        main, child = pty.openpty()
        command = ["bash", "-c", head + 'kvstore "$@"', "bash", "get", *arguments, "--master", shell.master]
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=child, stderr=subprocess.DEVNULL, check=False).returncode
        os.write(child, b"END")
        os.close(child)
        said = b""
        while not said.endswith(b"END"):
            said += os.read(main, 4096)
        os.close(main)
        return status, said.removesuffix(b"END")

    with functions() as head:
        assert shown("binary") == shown("escape") == (2, b"")
        assert shown("text") == (0, "Grüße\r\n".encode())
        assert shown("escape", "-") == (0, b"\x1b]0;title\x07")


def test_a_refusal_names_the_action_and_what_it_needs(tmp_path: Path) -> None:
    more = '[[tenants.blue]]\ntoken = "reads"\nrole = "read"\n'
    with System(tmp_path) as system:
        system.start_master(0, "--tokens", tokens_file(tmp_path, {"red": "secret"}, more))
        system.start_node("n0", "--dram", "16MiB")
        with system.client(tenant="red", token="secret") as red:
            red.put(b"key", b"value")

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(kvstore, [*arguments, "--master", system.address])

        reader = ("--tenant", "blue", "--token", "reads")
        refused = run("rm", "--pattern", "*", *reader)
        wanted = "tenant 'blue' with role read may not remove blocks by namespace or pattern: it needs a tenant's token"
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"kvstore: error: {wanted}")
        nobody = run("keys", "--token", OPERATOR)
        assert (nobody.exit_code, nobody.stdout) == (2, "")
        assert nobody.stderr == "kvstore: error: an operator has no keys: name the tenant whose keys to list (--tenant NAME)\n"
        needed = "kvstore: error: an operator has no blocks of its own: name the tenant whose blocks are meant (--tenant NAME)\n"
        for command in (("rm", "--pattern", "*"), ("rm", "key"), ("exists", "key"), ("pin", "key"), ("pin", "key", "--ttl-s", "9")):
            nobodys = run(*command, "--token", OPERATOR)
            assert (nobodys.exit_code, nobodys.stdout, nobodys.stderr) == (2, "", needed)
        assert run("keys", "--token", OPERATOR, "--tenant", "red").stdout == "key\n"
        assert run("exists", "key", "--token", OPERATOR, "--tenant", "red").stdout == "key: there\n"
        assert "may not look nodes up" not in run("audit", "--refused", "--token", OPERATOR).stdout


@given(st.binary(min_size=1, max_size=255))
def test_every_key_shown_is_read_back(key: bytes) -> None:
    shown = show_key(key)
    assert shown.isprintable()
    assert parse_key(shown) == key


@pytest.mark.parametrize(
    ("text", "key"),
    [("greeting", b"greeting"), ("Grüße", "Grüße".encode()), ("hex:00fF", b"\x00\xff"), ("hex", b"hex"), ("\udcff", b"\xff")],
)
def test_text_is_utf_8_and_hex_is_bytes(text: str, key: bytes) -> None:
    assert parse_key(text) == key


@pytest.mark.parametrize(("text", "complaint"), [("", "1 to 255 bytes"), ("x" * 256, "1 to 255 bytes"), ("hex:", "1 to 255 bytes")])
def test_a_key_of_a_wrong_length_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        parse_key(text)


def test_as_an_argument_a_bad_key_is_a_usage_error() -> None:
    with pytest.raises(click.BadParameter, match="hexadecimal"):
        KEY.convert("hex:0", None, None)
    assert KEY.convert(b"as it is", None, None) == b"as it is"


def test_retain_and_end_session_count_blocks(shell: Shell) -> None:
    shell("put", "hinted", "-", stdin=b"x")
    found = shell("retain", "hinted", "absent", "--priority", "90", "--ttl-s", "60", "--session", "chat")
    assert (found.exit_code, found.output) == (1, "retained 1 of 2\n")
    assert json.loads(shell("retain", "hinted", "--reuse-s", "5", "--json").output) == {"retained": 1, "asked": 1}
    assert json.loads(shell("end-session", "chat", "--json").output) == {"freed": 1}
    assert shell("end-session", "chat").output == "0 blocks are evicted first\n"
