"""The command `top`: live view of the cluster on a terminal; without a terminal it prints a table per poll."""

import contextlib
import itertools
import math
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
from kvstore.cli.tools.cluster_report import find_problems, problem_lines
from kvstore.cli.tools.keyboard import ENDED, Keyboard
from kvstore.cli.tools.status_polls import poll_status
from kvstore.cli.tools.status_tables import nodes_table, status_lines, tiers_table
from kvstore.cli.tools.top_screen import ScreenView, screen
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control, as_dict
from kvstore.console.model import ConsoleModel
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError, Unavailable

REDRAW_S: Final = 0.1
"""Longest time until a poll result or a resize of the terminal is shown."""
PollResult = tuple[pb.StatusReply | None, str]
"""Status, or None and the error text."""


@click.command(short_help="Watch rates, tiers and nodes, live.")
@click.option(
    "--interval-s", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS", help="Time between two polls."
)
@click.option("--count", type=click.IntRange(min=1), help="End after this many polls; q or Ctrl-C ends it at any time.")
@json_option
@client_options
def top(interval_s: float, count: int | None, as_json: bool, settings: ClientSettings) -> None:
    """Watch rates, tiers and nodes, live. Keys: q quits, arrows and page keys scroll, s sorts by the next column.

    --json prints one object per line. Without a terminal each poll prints a table. Both go on over failovers of masters, and end with 2
    once none has answered for --deadline-s.
    """
    polls: Iterable[int] = itertools.count() if count is None else range(count)
    if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        _live(polls, interval_s, settings)
        return
    for poll, found in zip(polls, poll_status(settings, answered_s=-math.inf), strict=False):
        if found is None:
            click.echo("the master does not answer: the owner is looked for", err=True)
        elif as_json:
            echo_json(as_dict(found))
        else:
            problems = find_problems(found)
            first = [problem_lines(problems)] if problems else []
            console().print(Group(*first, status_lines(found), Text(), nodes_table(found), Text(), tiers_table(found)))
        if poll + 1 != count:
            time.sleep(interval_s)


def _live(polls: Iterable[int], interval_s: float, settings: ClientSettings) -> None:
    """Show the cluster on the terminal until q or the last poll. Failures of polls are shown, and the master is looked up again.

    Raises Unavailable if no poll succeeded.
    """
    shown, view, model = console(), ScreenView(), ConsoleModel()
    with (
        Keyboard() as keyboard,
        ClusterPoller(polls, interval_s, settings) as poller,
        Live(console=shown, screen=True, auto_refresh=False) as live,
    ):
        is_running, keys, size, page = True, [""], shown.size, 1
        while is_running:
            results = poller.take()
            for status, failure in results:
                if status is not None:
                    view.take(model.document(status, at_s=time.monotonic(), wall_s=time.time()))
                view.failure = failure
            if poller.is_done:
                break
            if results or keys or shown.size != size:
                size = shown.size
                picture, page = screen(view, *size)
                live.update(picture, refresh=True)
            keys = keyboard.wait(REDRAW_S)
            for key in keys:
                is_running = is_running and key != ENDED and view.press(key, page)
    if view.document is None and view.failure:
        raise Unavailable(view.failure)


class ClusterPoller:
    """Polls the cluster's status in a background thread, so that the keyboard stays responsive. A context manager."""

    def __init__(self, polls: Iterable[int], interval_s: float, settings: ClientSettings) -> None:
        self._polls, self._interval_s, self._settings = polls, interval_s, settings
        self._results: queue.SimpleQueue[PollResult] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)
        self.is_done = False
        """The last poll is over."""

    def __enter__(self) -> "ClusterPoller":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop polling. Does not wait for a poll that is under way."""
        self._closed.set()

    def take(self) -> list[PollResult]:
        """Return the results since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
        return found

    def _run(self) -> None:
        control: Control | None = None
        for poll in self._polls:
            if poll and self._closed.wait(self._interval_s):
                break
            try:
                control = control or Control.find(self._settings)
                self._results.put((control.status(), ""))
            except KVStoreError as error:
                self._results.put((None, str(error)))
                if control is not None:
                    control.close()
                control = None  # another master may own the catalog by now
        if control is not None:
            control.close()
        self.is_done = True
