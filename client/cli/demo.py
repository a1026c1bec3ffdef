"""`kvstore demo`."""

import sys
import time
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from kvstore.client.tools.demo import PLAN, Demo
from kvstore.client.tools.status_tables import duration

FAILED_STATUS: Final = 1
MIN_REQUESTS: Final = 1000
"""Fewer would not overflow DRAM, and there would be nothing on NVMe to find again."""


@click.command(short_help="Show the store at work; needs nothing.")
@click.option("--requests", type=click.IntRange(min=MIN_REQUESTS), default=3000, show_default=True, metavar="N", help="Number of prompts.")
def demo(requests: int) -> None:
    """Show the store at work on this machine: conversations, a node killed and brought back, every byte checked.

    Starts a small cluster of its own and needs nothing. Exit status 0 only if everything that it claims held.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    begin = time.perf_counter()
    log: list[str] = []
    show = Demo(console, requests=requests, plan=PLAN)
    show.run(on_log=lambda name, line: log.append(f"{name} | {line}"))
    seconds = time.perf_counter() - begin
    console.print()
    if not show.is_right:
        console.print("\n".join(log[-40:]), style="dim")
        console.print(Text("Not all of it held: see above.", style="bold red"))
        sys.exit(FAILED_STATUS)
    console.print(Text(f"All of it held, in {duration(seconds)}.", style="bold green"))
