"""Reporters made while signals strike whose handler raises: `python -m tests.client.instances.struck_reporter TIMES`.

Prints as a line of JSON how often the making was struck, once the threads of all of them have ended.
"""

import gc
import json
import logging
import sys
import threading

from kvstore.client.config import ClientSettings
from kvstore.client.instances import reporter as module
from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from kvstore.testing.transfer.awaited import eventually
from tests.signals import Striker

LONGEST_S = 5e-4
"""To the first signal: to make a reporter takes about as long."""


def main() -> None:
    times = int(sys.argv[1])
    module.RETRY_INTERVAL_S = 0.01  # type: ignore[misc]
    logging.disable()  # there is no master, as each reporter says
    striker, made = Striker(times), list[Reporter]()
    struck = 0
    with SchedulerClient(ClientSettings(master="127.0.0.1:1", deadline_s=0.05)) as client:

        def make() -> None:
            made.append(Reporter(client, lambda: InstanceReport(name="p", role=InstanceRole.PREFILL, address="http://p")))

        for _ in range(times):
            struck += striker.struck(make, within_s=LONGEST_S)
            while made:
                made.pop().close()
        eventually(lambda: not left(), "the threads of all reporters have ended")
        print(json.dumps({"struck": struck}), flush=True)


def left() -> int:
    gc.collect()  # an exception's frames, which hold what was being made, may be in a cycle with it
    return sum(thread.name == "reporter" for thread in threading.enumerate())


if __name__ == "__main__":
    main()
