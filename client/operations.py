"""A client's operations as generators, from the caller's arguments on: what Client and AsyncClient share. Sans-I/O: see effects.py."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from kvstore.client.arguments import check_count, check_deadline, check_keys, check_parents, namespace_text
from kvstore.client.buffers import as_destination, as_source
from kvstore.client.config import ClientSettings
from kvstore.client.effects import Operation
from kvstore.client.locations import Location
from kvstore.client.questions import Questions
from kvstore.client.reads.mapped import CopyOut
from kvstore.client.reads.reading import Reading
from kvstore.client.reads.sinks import FreshBytes, IntoBuffers
from kvstore.client.reads.viewing import OpenView, close_view, open_view
from kvstore.client.registered import RegisteredMemory
from kvstore.client.resources import ClientResources
from kvstore.client.stats import ClientStats
from kvstore.client.writes.writing import Writing
from kvstore.protocol.errors import Forked
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import is_here
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.config import TransferSettings


class Operations:
    """Checks arguments, starts the deadline, and hands on to what does the work. Nothing is sent for arguments that are refused, nor by a
    process that was forked from the client's: its calls raise Forked."""

    def __init__(
        self,
        master: str | Sequence[str],
        tenant: str,
        token: str,
        deadline_s: float,
        settings: ClientSettings | None,
        transfer: TransferSettings | None = None,
    ) -> None:
        """Raises InvalidArgument."""
        check_deadline(deadline_s)
        self.settings = dataclasses.replace(settings or ClientSettings(), tenant=tenant, token=token, deadline_s=deadline_s)
        self.hello = Hello(ROLE_CLIENT, tenant, token, f"client-{os.getpid()}")
        self.resources = ClientResources(master, self.settings, transfer or TransferSettings(), is_here=is_here, spread=os.getpid())
        self._questions = Questions(self.resources)
        self._clock_ns = time.monotonic_ns
        self._copy_out = CopyOut(self.resources, self._clock_ns)
        self._pid = os.getpid()

    def put(
        self,
        keys: Sequence[bytes],
        values: Sequence[Any],
        *,
        namespace: Any,
        parents: Sequence[bytes | None] | None,
        deadline_s: float | None,
    ) -> Operation[list[bool]]:
        deadline = self._deadline(deadline_s)
        check_keys(keys)
        check_count(keys, values, "values")
        check_parents(parents, len(keys))
        sources = [as_source(value) for value in values]
        text = namespace_text(namespace)
        return (yield from Writing(self.resources, keys, sources, namespace=text, parents=parents, deadline=deadline).run())

    def get(self, keys: Sequence[bytes], *, deadline_s: float | None) -> Operation[list[bytes | None]]:
        deadline = self._deadline(deadline_s)
        check_keys(keys)
        return (yield from Reading(self.resources, keys, FreshBytes(len(keys)), self._copy_out, deadline, self._clock_ns).run())

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any], *, deadline_s: float | None) -> Operation[list[int | None]]:
        deadline = self._deadline(deadline_s)
        check_keys(keys)
        check_count(keys, buffers, "buffers")
        sink = IntoBuffers([as_destination(buffer) for buffer in buffers])
        return (yield from Reading(self.resources, keys, sink, self._copy_out, deadline, self._clock_ns).run())

    def register(self, buffer: Any, location: str) -> RegisteredMemory:
        self._check_process()
        return self.resources.engine_copies.registry.add(buffer, location)

    def open_view(self, key: bytes, *, deadline_s: float | None) -> Operation[OpenView | None]:
        deadline = self._deadline(deadline_s)
        check_keys([key])
        return (yield from open_view(self.resources, key, deadline, self._clock_ns))

    def close_view(self, view: OpenView) -> Operation[None]:
        self._check_process()
        return close_view(view, self._clock_ns)

    def exists(self, keys: Sequence[bytes], *, deadline_s: float | None) -> Operation[list[bool]]:
        return self._questions.exists(keys, self._deadline(deadline_s))

    def match_prefix(self, keys: Sequence[bytes], *, deadline_s: float | None) -> Operation[int]:
        return self._questions.match_prefix(keys, self._deadline(deadline_s))

    def locate(self, keys: Sequence[bytes], *, deadline_s: float | None) -> Operation[list[list[Location]]]:
        return self._questions.locate(keys, self._deadline(deadline_s))

    def remove(self, keys: Sequence[bytes], *, force: bool, deadline_s: float | None) -> Operation[int]:
        return self._questions.remove(keys, self._deadline(deadline_s), force=force)

    def pin(self, keys: Sequence[bytes], *, pinned: bool, deadline_s: float | None) -> Operation[list[bool]]:
        return self._questions.pin(keys, self._deadline(deadline_s), pinned=pinned)

    def stats(self) -> ClientStats:
        return self.resources.counters.snapshot()

    @property
    def is_forked(self) -> bool:
        """This is not the process in which the client was made."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Raises Forked: two processes that share a connection would read each other's answers."""
        if self.is_forked:
            raise Forked(f"this client is that of process {self._pid}, which process {os.getpid()} was forked from: make one here")

    def _deadline(self, deadline_s: float | None) -> Deadline:
        self._check_process()
        if deadline_s is None:
            return Deadline(self.settings.deadline_s)
        check_deadline(deadline_s)
        return Deadline(deadline_s)
