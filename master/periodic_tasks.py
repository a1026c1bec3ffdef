"""Periodic work of a running master: roles, health, rebalancing of partitions, changed files.

No task is started by a request, and none blocks."""

import logging
from typing import Final

from kvstore.master.control_service import ControlServer
from kvstore.master.leadership.partition_assigner import PartitionAssigner
from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.sessions import PermissionFiles
from kvstore.master.status import MasterStatus
from kvstore.telemetry.logs import named

PERIOD_S: Final = 0.1

log = logging.getLogger("kvstore.master")


class MasterPeriodicTasks:
    """Tasks that run at intervals in the reactor's loop."""

    def __init__(
        self, master: MasterParts, status: MasterStatus, sharing: PartitionAssigner, files: PermissionFiles, control: ControlServer
    ) -> None:
        self._reactor, self._quotas, self._trail = master.reactor, master.quotas, master.trail
        self._partitions = status.partitions
        self._status = status
        self._assigner = sharing
        self._files = files
        self._control = control
        self._is_ready = False

    def start(self, *, check_interval_s: float) -> None:
        """Start the tasks; files are checked at `check_interval_s`."""
        self._reactor.every(PERIOD_S, self._run_due)
        self._reactor.every(check_interval_s, self._files.check_credentials)
        self._reactor.every(check_interval_s, self._files.check_quotas)

    def update_readiness(self) -> None:
        """Update gRPC's health with the readiness."""
        is_ready = not self._status.unready()
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            self._control.ready(is_ready=is_ready)

    def _run_due(self) -> None:
        for partition in self._partitions:
            partition.role_manager.run_due()
        self.update_readiness()
        self._control.expire()
        self._trail.run_due(self._reactor.now_ns())
        if len(self._partitions) > 1:
            self._follow_quotas()
            self._share()

    def _share(self) -> None:
        """Give up a partition that is another master's share."""
        owned = {partition.index for partition in self._partitions if partition.role_manager.role is MasterRole.OWNER}
        given = self._assigner.give_up(self._partitions[0].catalog.live_masters, owned, self._reactor.now_ns())
        if given is not None:
            log.info("partition %d is another master's share: giving it up", given, extra=named("partition_given_up", partition=given))
            self._partitions[given].catalog.give_up()

    def _follow_quotas(self) -> None:
        """Apply the operators' quotas, which partition 0's catalog has, if another master owns it."""
        quotas = self._partitions[0].role_manager.operator_quotas()
        if quotas is not None:
            self._quotas.overlay(quotas)
