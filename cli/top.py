"""The command `top`: the cluster on a terminal, live; where there is no terminal, a table a look."""

import contextlib
import itertools
import queue
import sys
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from kvstore.cli.options import client_options, console, echo_json, json_option
from kvstore.cli.tools.cluster_report import trouble_lines, troubles
from kvstore.cli.tools.keyboard import ENDED, Keyboard
from kvstore.cli.tools.status_tables import nodes_table, status_lines, tiers_table
from kvstore.cli.tools.top_screen import ScreenView, screen
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.console.model import ConsoleModel
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError

REDRAW_S: Final = 0.1
"""Longest time until a look, or another size of the terminal, is shown."""
Look = tuple[pb.StatusReply | None, str]
"""What was told, or why nothing was."""


@click.command(short_help="Watch rates, tiers and nodes, live.")
@click.option(
    "--interval-s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS", help="Time between looks."
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks; q or Ctrl-C ends it at any time.")
@json_option
@client_options
def top(interval_s: float, count: int | None, as_json: bool, settings: ClientSettings) -> None:
    """Watch rates, tiers and nodes, live. Keys: q quits, arrows and page keys scroll, s sorts by the next column.

    With --json one object a line; piped, a table a look.
    """
    looks: Iterable[int] = itertools.count() if count is None else range(count)
    if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        _live(looks, interval_s, settings)
        return
    with Control.find(settings) as control:
        for look in looks:
            if look:
                time.sleep(interval_s)
            if as_json:
                echo_json(as_dict(control.status()))
            else:
                found = control.status()
                wrong = troubles(found)
                first = [trouble_lines(wrong)] if wrong else []
                console().print(Group(*first, status_lines(found), Text(), nodes_table(found), Text(), tiers_table(found)))


def _live(looks: Iterable[int], interval_s: float, settings: ClientSettings) -> None:
    """On the terminal. Raises what the first look raises; later ones are shown as trouble, and the cluster is found again."""
    shown, view, model = console(), ScreenView(), ConsoleModel()
    with (
        Keyboard() as keyboard,
        ClusterPoller(looks, interval_s, settings) as looker,
        Live(console=shown, screen=True, auto_refresh=False) as live,
    ):
        goes_on, keys, size, page = True, [""], shown.size, 1
        while goes_on:
            taken = looker.taken()
            for status, failure in taken:
                if status is not None:
                    view.take(model.document(status, at_s=time.monotonic(), wall_s=time.time()))
                view.failure = failure
            if looker.is_done:
                break
            if taken or keys or shown.size != size:
                size = shown.size
                picture, page = screen(view, *size)
                live.update(picture, refresh=True)
            keys = keyboard.wait(REDRAW_S)
            for key in keys:
                goes_on = goes_on and key != ENDED and view.press(key, page)
    if view.document is None and view.failure:
        raise click.ClickException(view.failure)


class ClusterPoller:
    """Asks the cluster again and again in a thread of its own, so that keys need not wait for it. A context manager."""

    def __init__(self, looks: Iterable[int], interval_s: float, settings: ClientSettings) -> None:
        self._looks, self._interval_s, self._settings = looks, interval_s, settings
        self._taken: queue.SimpleQueue[Look] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self.is_done = False
        """There are no more looks."""

    def __enter__(self) -> "ClusterPoller":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ask no more. A look under way is left to its deadline."""
        self._closed.set()

    def taken(self) -> list[Look]:
        """The looks since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._taken.get_nowait())
        return found

    def _run(self) -> None:
        control: Control | None = None
        for look in self._looks:
            if look and self._closed.wait(self._interval_s):
                break
            try:
                control = control or Control.find(self._settings)
                self._taken.put((control.status(), ""))
            except KVStoreError as error:
                self._taken.put((None, str(error)))
                if control is not None:
                    control.close()
                control = None  # another master may own the catalog by now
        if control is not None:
            control.close()
        self.is_done = True
