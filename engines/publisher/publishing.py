"""Rounds of a publisher: ask the nodes what happened, publish it as a batch, answer who has missed some. One thread, that of `run`."""

import time

from kvstore.client.tools.recorder import Recorder
from kvstore.engines.publisher.form import EventForm
from kvstore.engines.publisher.sockets import PublishingSockets


class Publishing:
    """See the module. `stop`, and what is told of it, are for any thread and for signal handlers."""

    def __init__(self, recorder: Recorder, sockets: PublishingSockets, form: EventForm, *, interval_s: float) -> None:
        self.recorder = recorder
        self._sockets = sockets
        self._form = form
        self._interval_s = interval_s
        self._is_ending = False
        self.batches = 0
        """Published so far."""
        self.round_s = time.monotonic()
        """By `time.monotonic`, when the last round ended."""

    def run(self) -> None:
        """Until `stop`; at most a round, and `interval_s`, longer."""
        while not self._is_ending:
            self.round()

    def round(self) -> None:
        """What happened since the last one is published."""
        if (found := self._form.batch(self.recorder.poll())) is not None:
            self._sockets.publish(found)
            self.batches += 1
        self._sockets.serve(self._interval_s)
        self.round_s = time.monotonic()

    def stop(self) -> None:
        self._is_ending = True
