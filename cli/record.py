"""`kvstore record`: records block events of a cluster into a file, from which `kvstore lab` reconstructs prompts."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import click

from kvstore.cli.exit_signals import ending_signals
from kvstore.cli.options import client_options, echo_json, json_option
from kvstore.client.config import ClientSettings
from kvstore.client.recorder import Recorder
from kvstore.kvcache.traces.event_file import EventWriter

POLL_INTERVAL_S: Final = 0.1
"""A node buffers 131,072 events for a recorder, so none are lost below a million a second."""


@click.command(short_help="Record block events for `kvstore lab`.")
@click.argument("file", metavar="FILE")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="How long.  [default: until Ctrl-C]")
@json_option
@client_options
def record(file: str, duration: float | None, as_json: bool, settings: ClientSettings) -> None:
    """Record the events of the tenant's blocks on all nodes into FILE: stored, read, removed.

    FILE is overwritten. It has one JSON object per line and only whole lines at any time; `kvstore lab FILE` replays its prompts. Nodes
    are not slowed down: events that are not fetched in time are lost, and the file and the summary count them. The recording continues when
    nodes join or leave and when a master is unreachable; standard error reports these.
    """
    began_s = time.monotonic()
    with interrupts() as interrupted, Recorder(settings, _say) as recorder, EventWriter(file) as writer:
        names = ", ".join(recorder.nodes) or "none yet"
        _say(f"recording nodes: {names}; " + ("Ctrl-C ends it" if duration is None else f"for {duration:g} s"))
        while True:
            left_s = POLL_INTERVAL_S if duration is None else min(POLL_INTERVAL_S, began_s + duration - time.monotonic())
            is_over = left_s <= 0 or interrupted.wait(left_s)
            writer.write(recorder.poll())
            if is_over:
                break
    _summarise(file, recorder, seconds=time.monotonic() - began_s, as_json=as_json)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Context in which Ctrl-C, SIGTERM and SIGHUP only set the event, so that the recording ends with whole lines. Main thread only."""
    interrupted = threading.Event()

    def note(number: int, frame: Any) -> None:
        interrupted.set()

    before = {number: signal.signal(number, note) for number in ending_signals()}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _summarise(file: str, recorder: Recorder, *, seconds: float, as_json: bool) -> None:
    counts = recorder.counts
    if as_json:
        echo_json({"file": file, "seconds": round(seconds, 3), **dataclasses.asdict(counts)})
        return
    click.echo(f"{file}: {counts.stored} blocks stored, {counts.read} read, {counts.removed} removed in {seconds:.1f} s")
    if counts.lost or counts.interruptions:
        click.echo(f"incomplete: {counts.lost} events were lost; recording of a node was interrupted {counts.interruptions} times")
