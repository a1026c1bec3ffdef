"""The command `topology`: NUMA nodes, NICs, GPUs and preferred rails of the cluster's hosts or of this machine."""

import socket
from pathlib import Path
from typing import Any

import click

from kvstore.client.cli.options import client_options, console, echo_json, json_option
from kvstore.client.cli.topology_drawing import Subject, draw
from kvstore.client.cli.topology_tables import topology_view
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, InvalidArgument, ProtocolError
from kvstore.protocol.settings import load_settings
from kvstore.transfer.config import SECTION, TransferSettings
from kvstore.transfer.topology.discovery import Discovery
from kvstore.transfer.topology.json_form import as_json as topology_as_json
from kvstore.transfer.topology.json_form import parse_topology


@click.command(short_help="Show NICs, GPUs and NUMA nodes of the nodes' hosts.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option("--local", "is_local", is_flag=True, help="This machine as it is now, without asking a master.")
@click.option("--svg", metavar="FILE", help="Write a drawing to FILE; - is standard output.")
@json_option
@client_options
def topology(node: str | None, is_local: bool, svg: str | None, as_json: bool, settings: ClientSettings) -> None:
    """Show the topology of the nodes' hosts, as the nodes last said it: NICs with speed and state, GPUs, preferred rails.

    With --local or --node, --json prints the form that the setting `topology` of [transfer] reads; else a list of the nodes.
    """
    if is_local and node is not None:
        raise InvalidArgument("--local is this machine and --node one of the cluster: give one of them")
    if svg == "-" and as_json:
        raise InvalidArgument("--svg - and --json both write to standard output: give --svg a file")
    subjects = [_this_machine()] if is_local else _of_cluster(settings, node)
    if svg is not None:
        _write(svg, draw(subjects))
    if as_json:
        echo_json(_only(subjects) if is_local or node is not None else [_entry(subject) for subject in subjects])
    elif svg is None:
        for subject in subjects:
            console().print(topology_view(subject))


def _this_machine() -> Subject:
    settings = load_settings(TransferSettings, SECTION, flags={})
    return Subject(socket.gethostname(), Discovery.configured(settings).look())


def _of_cluster(settings: ClientSettings, node: str | None) -> list[Subject]:
    with Control.find(settings) as control:
        return [_subject(found) for found in sorted(control.topologies(node or ""), key=lambda found: found.name)]


def _subject(found: pb.NodeTopology) -> Subject:
    if not found.topology:
        return Subject(found.name, None, found.state, "it has not told its topology")
    try:
        return Subject(found.name, parse_topology(found.topology), found.state)
    except ProtocolError as error:  # one node of another release must not hide the others
        return Subject(found.name, None, found.state, f"its topology cannot be read: {error}")


def _entry(subject: Subject) -> dict[str, Any]:
    whole = topology_as_json(subject.topology) if subject.topology is not None else None
    return {"node": subject.name, "state": subject.state, "topology": whole, "note": subject.note}


def _only(subjects: list[Subject]) -> dict[str, Any]:
    (subject,) = subjects
    if subject.topology is None:
        raise ProtocolError(f"{subject.name}: {subject.note}")
    return topology_as_json(subject.topology)


def _write(file: str, text: str) -> None:
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the drawing to {file}: {error.strerror or error}") from None
