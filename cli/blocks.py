"""Commands on single blocks: put, get, exists, rm, locate, pin, unpin, retain, end-session, keys.

A key on the command line is UTF-8 text, or `hex:` and hexadecimal digits for other bytes. Exit status 1: a block is missing or was not
removed.
"""

import binascii
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from kvstore.cli.options import client_options, console, echo_json, json_option
from kvstore.cli.tools.tables import new_table
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.frames import check_key
from kvstore.protocol.retention import DEFAULT_PRIORITY, Retention
from kvstore.protocol.settings import format_size

HEX: Final = "hex:"

ABSENT_STATUS = 1


class KeyType(click.ParamType[bytes]):
    """Click type of a KEY argument; converts to the key's bytes."""

    name = "KEY"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if isinstance(value, bytes):
            return value
        try:
            return parse_key(value)
        except (KVStoreError, ValueError) as error:
            self.fail(str(error), param, ctx)


KEY: Final = KeyType()
keys_argument = click.argument("keys", type=KEY, nargs=-1, required=True, metavar="KEY...")


def parse_key(text: str) -> bytes:
    """Return the key's bytes. Raises InvalidArgument for a length outside 1 to 255 bytes, ValueError for bad hex digits."""
    if text.startswith(HEX):
        try:
            key = bytes.fromhex(text.removeprefix(HEX))
        except (ValueError, binascii.Error):
            raise ValueError(f"{text!r} is not a key: write pairs of hexadecimal digits after {HEX}, such as {HEX}00ff") from None
    else:
        # Python decodes arguments that are not UTF-8 to surrogates; this restores the original bytes.
        key = text.encode("utf-8", "surrogateescape")
    check_key(key)
    return key


def show_key(key: bytes) -> str:
    """Format a key so that `parse_key` returns it unchanged."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return HEX + key.hex()
    return text if text.isprintable() and not text.startswith(HEX) else HEX + key.hex()


@click.command(short_help="Store a file under a key.")
@click.argument("key", type=KEY, metavar="KEY")
@click.argument("file", metavar="FILE|-")
@click.option("--namespace", default="", help="Namespace the block is listed under.")
@click.option("--parent", type=KEY, help="Key of the block before it in its prefix.")
@json_option
@client_options
def put(key: bytes, file: str, namespace: str, parent: bytes | None, as_json: bool, settings: ClientSettings) -> None:
    """Store FILE (- for standard input) under KEY. A key that exists keeps its value.

    KEY is text taken as UTF-8, or hex: followed by hexadecimal digits.
    """
    value = sys.stdin.buffer.read() if file == "-" else _read_file(file)
    with Client(settings=settings) as client:
        stored = client.put(key, value, namespace=namespace, parent=parent, ack="cluster")
    if as_json:
        echo_json({"key": show_key(key), "stored": stored, "size_bytes": len(value)})
    else:
        click.echo(f"{show_key(key)}: " + (f"stored {format_size(len(value))}" if stored else "already there"))


@click.command(short_help="Write a value to a file or to standard output.")
@click.argument("key", type=KEY, metavar="KEY")
@click.argument("file", default="", metavar="[FILE|-]")
@client_options
def get(key: bytes, file: str, settings: ClientSettings) -> None:
    """Write the value of KEY to FILE or to standard output. Exit status 1 if KEY does not exist.

    Binary data is written to a terminal only if FILE is -.
    """
    with Client(settings=settings) as client:
        value = client.get(key)
    if value is None:
        click.echo(f"{show_key(key)}: not there", err=True)
        sys.exit(ABSENT_STATUS)
    if not file and sys.stdout.isatty() and not _is_text(value):
        size = format_size(len(value))
        raise InvalidArgument(f"{show_key(key)} is {size} of binary data: name a FILE, or - to write it to the terminal anyway")
    if file in ("", "-"):
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return
    try:
        Path(file).write_bytes(value)
    except OSError as error:
        raise InvalidArgument(f"cannot write {file}: {error.strerror}") from None


@click.command(short_help="Show which keys can be read now.")
@keys_argument
@json_option
@client_options
def exists(keys: Sequence[bytes], as_json: bool, settings: ClientSettings) -> None:
    """Show which keys can be read now. Exit status 1 if any cannot. The lookup does not count as an access."""
    # The shared-memory index needs tickets, which operators cannot get: the masters would audit a refused request.
    with Client(settings=replace(settings, use_index=False)) as client:
        found = client.exists_batch(keys)
    _answer(keys, found, as_json, ("there", "not there"))


@click.command(short_help="Bring blocks into this host's node.")
@keys_argument
@click.option("--to", type=click.Choice(("dram", "local")), default="dram", help="dram: also from the node's NVMe. Default: dram.")
@json_option
@client_options
def prefetch(keys: Sequence[bytes], to: str, as_json: bool, settings: ClientSettings) -> None:
    """Have this host's node bring blocks into its DRAM, from its NVMe or other nodes, in the background.

    Prints how many it has queued, or requested from the masters, where those that no node has are found out later. Blocks in DRAM are
    neither.
    """
    with Client(settings=settings) as client:
        queued = client.prefetch(keys, to)
    if as_json:
        echo_json({"queued": queued, "asked": len(keys)})
    else:
        click.echo(f"queued {queued:,} of {len(keys):,}")


@click.command(short_help="Keep blocks from eviction.")
@keys_argument
@click.option("--ttl-s", type=float, help="Unpin after this many seconds.")
@json_option
@client_options
def pin(keys: Sequence[bytes], ttl_s: float | None, as_json: bool, settings: ClientSettings) -> None:
    """Keep blocks from eviction until `unpin`. Exit status 1 if any is not there."""
    with Client(settings=settings) as client:
        found = client.pin(keys, ttl_s=ttl_s)
    _answer(keys, found, as_json, ("pinned", "not there"))


@click.command(short_help="Hint which blocks to evict later, or first.")
@keys_argument
@click.option("--priority", type=int, default=DEFAULT_PRIORITY, help="0, evicted first, to 100. Default: 50, as without a hint.")
@click.option("--ttl-s", type=float, help="End the priority after this many seconds; the blocks stay.")
@click.option("--session", help="Session that uses the blocks; see end-session.")
@click.option("--reuse-s", type=float, help="Seconds until the blocks are expected to be read.")
@json_option
@client_options
def retain(
    keys: Sequence[bytes],
    priority: int,
    ttl_s: float | None,
    session: str | None,
    reuse_s: float | None,
    as_json: bool,
    settings: ClientSettings,
) -> None:
    """Send a hint for the order of eviction. Of several hints on a block the highest priority counts. Exit status 1 if any
    block is not there."""
    retention = Retention(priority, ttl_s, session, reuse_s)
    with Client(settings=settings) as client:
        retained = client.retain(keys, retention)
    if as_json:
        echo_json({"retained": retained, "asked": len(keys)})
    else:
        click.echo(f"retained {retained:,} of {len(keys):,}")
    if retained < len(set(keys)):
        sys.exit(ABSENT_STATUS)


@click.command("end-session", short_help="Evict a session's blocks first.")
@click.argument("session", metavar="NAME")
@json_option
@client_options
def end_session(session: str, as_json: bool, settings: ClientSettings) -> None:
    """End a session of retention hints: its blocks are evicted first, except those that other sessions used. Prints how many
    they are, over all nodes."""
    with Client(settings=settings) as client:
        freed = client.end_session(session)
    if as_json:
        echo_json({"freed": freed})
    else:
        click.echo(f"{freed:,} blocks are evicted first")


@click.command(short_help="Let pinned blocks be evicted again.")
@keys_argument
@json_option
@client_options
def unpin(keys: Sequence[bytes], as_json: bool, settings: ClientSettings) -> None:
    """Let blocks be evicted again. Exit status 1 if any is not there."""
    with Client(settings=settings) as client:
        found = client.unpin(keys)
    _answer(keys, found, as_json, ("unpinned", "not there"))


@click.command(short_help="Remove blocks everywhere.")
@click.argument("keys", type=KEY, nargs=-1, metavar="[KEY...]")
@click.option("--namespace", help="Instead of KEYs: all blocks of a namespace.")
@click.option("--pattern", help="Instead of KEYs: all blocks whose keys match, such as 'chat-*'.")
@click.option("--force", is_flag=True, help="Also remove pinned blocks and blocks that are being read.")
@json_option
@client_options
def rm(keys: Sequence[bytes], namespace: str | None, pattern: str | None, force: bool, as_json: bool, settings: ClientSettings) -> None:
    """Remove blocks everywhere. Exit status 1 if any KEY was not there, or is pinned or being read."""
    is_matching = namespace is not None or pattern is not None
    if bool(keys) == is_matching:
        raise click.UsageError("give either KEYs, or --namespace, --pattern or both")
    if is_matching:
        with Client(settings=settings) as client:
            removed = client.remove_matching(namespace=namespace, pattern=pattern, force=force)
        echo_json({"removed": removed}) if as_json else click.echo(f"removed {removed:,}")
        return
    distinct = list(dict.fromkeys(keys))
    with Client(settings=settings) as client:
        removed = client.remove(distinct, force=force)
        are_left = client.exists_batch(distinct) if removed < len(distinct) else [False] * len(distinct)
    kept = [show_key(key) for key, is_left in zip(distinct, are_left, strict=True) if is_left]
    if as_json:
        echo_json({"removed": removed, "asked": len(distinct), "kept": kept})
    else:
        absent = max(0, len(distinct) - removed - len(kept))
        click.echo(f"removed {removed:,} of {len(distinct):,}" + (f", {absent:,} not there" if absent else ""))
        for key in kept:
            click.echo(f"{key}: kept, because it is pinned or being read: `kvstore unpin`, or --force", err=True)
    if removed < len(distinct):
        sys.exit(ABSENT_STATUS)


@click.command(short_help="Show the nodes and tiers that hold blocks.")
@keys_argument
@json_option
@client_options
def locate(keys: Sequence[bytes], as_json: bool, settings: ClientSettings) -> None:
    """Show the nodes and tiers that hold blocks. Exit status 1 if no node holds one of them."""
    with Client(settings=settings) as client:
        found = client.locate(keys)
    if as_json:
        echo_json({show_key(key): [asdict(location) for location in locations] for key, locations in zip(keys, found, strict=True)})
    else:
        table = new_table("key", "node", "tiers", "size", "checksum", "generation")
        for key, locations in zip(keys, found, strict=True):
            for at in locations:
                row = (at.node, ", ".join(at.tiers), format_size(at.size_bytes), f"{at.checksum:016x}", str(at.generation))
                table.add_row(show_key(key), *row)
            if not locations:
                table.add_row(show_key(key), "-")
        console().print(table)
    if not all(found):
        sys.exit(ABSENT_STATUS)


@click.command(short_help="List a tenant's keys.")
@click.option("--namespace", help="List only this namespace.  [default: all]")
@click.option("--limit", type=click.IntRange(min=1), help="List at most this many keys.")
@json_option
@client_options
def keys(namespace: str | None, limit: int | None, as_json: bool, settings: ClientSettings) -> None:
    """List the tenant's keys, in no particular order. --json prints one object per line."""
    is_empty = True
    with Control.find(settings) as control:
        for stored in control.keys(namespace, limit=limit or 0):
            is_empty = False
            if as_json:
                echo_json({"key": show_key(stored.key), "size_bytes": stored.size_bytes, "namespace": stored.namespace})
            else:
                click.echo(show_key(stored.key))
    if is_empty and settings.tls_cert and not settings.tenant:
        click.echo("no key is stored without a tenant: name the tenant whose keys to list (--tenant NAME)", err=True)


def _answer(keys: Sequence[bytes], found: Sequence[bool], as_json: bool, words: tuple[str, str]) -> None:
    if as_json:
        echo_json({show_key(key): yes for key, yes in zip(keys, found, strict=True)})
    else:
        for key, yes in zip(keys, found, strict=True):
            click.echo(f"{show_key(key)}: {words[0] if yes else words[1]}")
    if not all(found):
        sys.exit(ABSENT_STATUS)


def _is_text(value: bytes) -> bool:
    """Return whether the value is UTF-8 without control characters that a terminal would act on."""
    try:
        return all(character.isprintable() or character in "\n\r\t" for character in value.decode())
    except UnicodeDecodeError:
        return False


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
