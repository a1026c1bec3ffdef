"""A clock for a module that asks `time` for the seconds: it goes on when a call of a faulty client says so."""

from tests.client.jobs.faulty import Fault


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> Fault:
        """A call takes so long."""

        def fault(deadline_s: float) -> None:
            self.now_s += seconds

        return fault
