"""Operations shared by Client and AsyncClient, as generators of effects, from the caller's arguments on. Sans-I/O: see
effects.py."""

import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from kvstore.client.config import ClientSettings
from kvstore.client.connections.locations import Location
from kvstore.client.connections.registered_memory import RegisteredMemory
from kvstore.client.connections.resources import ClientResources
from kvstore.client.core.arguments import (
    check_ack,
    check_count,
    check_deadline,
    check_flag,
    check_keys,
    check_limit,
    check_offsets,
    check_parents,
    check_prefetch,
    check_replicas,
    namespace_text,
)
from kvstore.client.core.buffers import as_destination, as_rows, as_sources
from kvstore.client.core.effects import Operation, work
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.holds import Hold, HoldLookup, require_hold
from kvstore.client.key_results import check_each, put_each
from kvstore.client.local.nodes import LocalNode, LocalNodes
from kvstore.client.local.ranges import RangeReads
from kvstore.client.local.reader_slots import LocalView
from kvstore.client.local.reads import LocalReads
from kvstore.client.metadata_requests import MetadataOperations, replicate
from kvstore.client.reads.batch_read import BatchGet, open_view
from kvstore.client.reads.mapped_values import CopyOut, OpenView, close_view
from kvstore.client.reads.prefetch import prefetch
from kvstore.client.reads.sinks import FreshBytes, FreshEach, IntoBuffers, IntoEach, IntoRows, Sink, SinkPart
from kvstore.client.retention import RetentionOperations, check_retention
from kvstore.client.stats import ClientStats
from kvstore.client.writes.batch_put import BatchPut
from kvstore.protocol.errors import Forked, InvalidArgument, KVStoreError
from kvstore.protocol.retention import Retention
from kvstore.protocol.session_messages import ROLE_CLIENT, Hello
from kvstore.rpc.address import is_local_socket
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.config import TransferSettings

R = TypeVar("R")
Timeout = float | Deadline | None
"""Time for a call in seconds, None for the default; or a running deadline."""


class Operations:
    """Checks arguments, starts the deadline and delegates. Nothing is sent for malformed arguments, nor by a forked
    child, where calls raise Forked."""

    def __init__(self, settings: ClientSettings, transfer: TransferSettings | None = None) -> None:
        """`settings` are complete (`resolve_settings`). Raises InvalidArgument, ConfigError."""
        check_deadline(settings.deadline_s)
        self.settings = settings
        self.hello = Hello(ROLE_CLIENT, settings.tenant, settings.token, f"client-{os.getpid()}")
        self.resources = ClientResources(settings, transfer or TransferSettings(), is_here=is_local_socket, spread=os.getpid())
        self.local = LocalNodes(self.resources.daemons, self.resources.mapping, is_used=self.settings.use_index)
        self.local_reads = LocalReads(
            self.resources.copier, verify_bytes=int(self.settings.verify_bytes), verifies_all=self.settings.verify_all
        )
        self._metadata = MetadataOperations(self.resources)
        self._holds = HoldLookup(self.resources)
        self.retention = RetentionOperations(self.resources, self._metadata)
        self._clock_ns = time.monotonic_ns
        self._copy_out = CopyOut(self.resources, self._clock_ns)
        self._pid = os.getpid()
        self._process = ForkGeneration.number

    def put(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any,
        parents: Sequence[bytes | None] | None,
        ack: str | None,
        deadline_s: Timeout,
        replicas: int = 1,
        retention: Retention | None = None,
    ) -> Operation[list[bool]]:
        deadline = self.deadline(deadline_s)
        check_keys(keys)
        check_replicas(replicas)
        check_retention(retention)
        acks_at_node, text = self._check_put(keys, values, namespace, parents, ack)
        sources = as_sources(values)
        acks_at_node = acks_at_node and replicas == 1  # a block must be committed before it is replicated
        writing = BatchPut(self.resources, keys, sources, namespace=text, parents=parents, acks_at_node=acks_at_node, deadline=deadline)
        stored = yield from writing.run()
        if retention is not None:  # before replicas are made: they take hints along
            yield from self.retention.after_put(keys, stored, retention, deadline)
        if replicas > 1:
            waits = ack == "replicas"
            yield from replicate(self.resources.daemons, keys, replicas, deadline, waits=waits)
            # A cached location names one replica. For blocks of other writers it may be the only trace of an uncommitted put.
            self.resources.hints.forget(keys if waits else compress(keys, stored))
        return stored

    def _check_put(
        self, keys: Sequence[bytes], values: Sequence[Any], namespace: Any, parents: Sequence[bytes | None] | None, ack: str | None
    ) -> tuple[bool, str]:
        """Return whether the node's acknowledgement suffices, and the namespace's text. Raises InvalidArgument."""
        ack = self.settings.ack if ack is None else ack
        check_ack(ack)
        check_count(keys, values, "values")
        check_parents(parents, keys)
        return ack == "node", namespace_text(namespace)

    def put_each(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any,
        parents: Sequence[bytes | None] | None,
        ack: str | None,
        deadline_s: float | None,
        retention: Retention | None = None,
    ) -> Operation[list[bool | KVStoreError]]:
        deadline = self.deadline(deadline_s)
        check_retention(retention)
        acks_at_node, text = self._check_put(keys, values, namespace, parents, ack)
        put = put_each(self.resources, keys, values, namespace=text, parents=parents, acks_at_node=acks_at_node, deadline=deadline)
        results = yield from put
        if retention is not None:
            yield from self.retention.after_put(keys, results, retention, deadline)
        return results

    def replace(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any,
        parents: Sequence[bytes | None] | None,
        force: bool,
        ack: str | None,
        deadline_s: float | None,
    ) -> Operation[list[bool]]:
        deadline = self.deadline(deadline_s)
        check_keys(keys)
        check_flag(force, "force")
        acks_at_node, text = self._check_put(keys, values, namespace, parents, ack)
        sources = as_sources(values)
        yield from self._metadata.remove(keys, deadline, force=force)
        writing = BatchPut(self.resources, keys, sources, namespace=text, parents=parents, acks_at_node=acks_at_node, deadline=deadline)
        return (yield from writing.run())

    def flush(self, *, deadline_s: float | None) -> Operation[None]:
        return self.resources.uncommitted_puts.flush(self.deadline(deadline_s))

    # --- this host ---

    def shared_memory(self, deadline_s: float | None) -> Operation[dict[str, str]]:
        """Local nodes by name, with the reason why shared memory is not used, "" if it is."""
        deadline = self.deadline(deadline_s)
        daemons = self.resources.daemons
        yield from daemons.refresh_nodes(deadline)
        yield from self.local.attach(deadline, waits=True)
        found = {node.name: "it does not answer" if self.settings.use_index else "" for node in daemons.nodes.local()}
        return found | {node.name: "" for node in self.local.ready} | daemons.shm_diagnostics.reasons()

    def _local_nodes(self, deadline: Deadline) -> Operation[tuple[LocalNode, ...]]:
        """Readable local nodes."""
        if self.local.clock_ns() >= self.local.cached_fresh[0] and self.local.is_due():
            yield from self.local.attach(deadline)
        return self.local.cached_fresh[1]

    def _map_needed_slabs(self, deadline: Deadline) -> Operation[None]:
        for node, slabs in self.local_reads.take_unmapped_slabs().items():
            yield from self.local.map_slabs(node, slabs, deadline)

    def get(self, keys: Sequence[bytes], *, deadline_s: Timeout, retention: Retention | None = None) -> Operation[list[bytes | None]]:
        deadline = self.deadline(deadline_s)
        lengths = check_keys(keys)
        check_retention(retention)
        return (yield from self._read(keys, lengths, FreshBytes(len(keys)), deadline, retention))

    def get_into(
        self, keys: Sequence[bytes], buffers: Any, *, deadline_s: Timeout, retention: Retention | None = None
    ) -> Operation[list[int | None]]:
        deadline = self.deadline(deadline_s)
        lengths = check_keys(keys)
        check_retention(retention)
        check_count(keys, buffers, "buffers")
        rows = as_rows(buffers)
        sink: Sink[int] = IntoRows(rows) if rows is not None else IntoBuffers([as_destination(buffer) for buffer in buffers])
        return (yield from self._read(keys, lengths, sink, deadline, retention))

    def get_each_into(
        self, keys: Sequence[bytes], buffers: Any, *, deadline_s: Timeout, retention: Retention | None = None
    ) -> Operation[list[int | KVStoreError | None]]:
        deadline = self.deadline(deadline_s)
        check_retention(retention)
        check_count(keys, buffers, "buffers")
        found = check_each(keys, buffers, as_destination)
        sink = IntoEach(found)
        which = [i for i, destination in enumerate(found) if not isinstance(destination, InvalidArgument)]
        wanted = [keys[i] for i in which]
        try:
            if wanted:
                yield from self._read(wanted, check_keys(wanted), SinkPart(sink, which), deadline)
        except KVStoreError as error:
            sink.ended(error)
        if retention is not None:
            yield from self.retention.after_read(keys, sink.results(), retention, deadline)
        return sink.results()

    def get_ranges_into(
        self, keys: Sequence[bytes], offsets: Sequence[int], buffers: Any, *, deadline_s: Timeout, retention: Retention | None = None
    ) -> Operation[list[int | KVStoreError | None]]:
        deadline = self.deadline(deadline_s)
        check_retention(retention)
        check_count(keys, buffers, "buffers")
        places = check_offsets(offsets, len(keys))
        reads = RangeReads(keys, places, check_each(keys, buffers, as_destination), self.resources.copier)
        nodes = yield from self._local_nodes(deadline)
        if nodes:
            yield from reads.read_local(self.local_reads, nodes)
            if self.local_reads.unmapped_slabs:
                yield from self._map_needed_slabs(deadline)
                yield from reads.read_local(self.local_reads, nodes)

        def read_whole_values(keys: Sequence[bytes], sink: FreshEach) -> Operation[list[bytes | None]]:
            return self._read(keys, check_keys(keys), sink, deadline)

        yield from reads.read_whole(read_whole_values)
        if retention is not None:
            yield from self.retention.after_read(keys, reads.results, retention, deadline)
        return reads.results

    def _read(
        self, keys: Sequence[bytes], lengths: set[int], sink: Sink[R], deadline: Deadline, retention: Retention | None = None
    ) -> Operation[list[R | None]]:
        """Read local blocks without a request, then the rest; then send the hint."""
        found = yield from self._read_values(keys, lengths, sink, deadline)
        if retention is not None:
            yield from self.retention.after_read(keys, found, retention, deadline)
        return found

    def _read_values(self, keys: Sequence[bytes], lengths: set[int], sink: Sink[R], deadline: Deadline) -> Operation[list[R | None]]:
        nodes = yield from self._local_nodes(deadline)
        left: Sequence[int] = range(len(keys))
        if nodes:
            left = yield from self.local_reads.read(nodes, keys, lengths, sink)
            if left and self.local_reads.unmapped_slabs:
                yield from self._map_needed_slabs(deadline)
                more = yield from self.local_reads.read(nodes, [keys[i] for i in left], lengths, SinkPart(sink, left))
                left = [left[i] for i in more]
            if not left:
                return sink.results()
        if len(left) == len(keys):
            return (yield from BatchGet(self.resources, keys, sink, self._copy_out, deadline, self._clock_ns).run())
        part: SinkPart[R] = SinkPart(sink, left)
        return (yield from BatchGet(self.resources, [keys[i] for i in left], part, self._copy_out, deadline, self._clock_ns).run())

    def register(self, buffer: Any, location: str) -> RegisteredMemory:
        self.check_process()
        return self.resources.engine_copies.registry.add(buffer, location)

    def open_view(self, key: bytes, *, deadline_s: Timeout) -> Operation[LocalView | OpenView | None]:
        deadline = self.deadline(deadline_s)
        check_keys([key])
        nodes = yield from self._local_nodes(deadline)
        look = partial(self.local_reads.open_view, nodes, key)
        view = (yield from work(look, self.local_reads.view_bytes)) if nodes else None
        if view is None and self.local_reads.unmapped_slabs:
            yield from self._map_needed_slabs(deadline)
            view = yield from work(look, self.local_reads.view_bytes)
        if view is not None:
            return view
        return (yield from open_view(self.resources, key, deadline, self._clock_ns))

    def close_view(self, view: OpenView) -> Operation[None]:
        self.check_process()
        return close_view(view, self._clock_ns)

    def exists(self, keys: Sequence[bytes], *, deadline_s: Timeout, hold: Hold | None = None) -> Operation[list[bool]]:
        deadline = self.deadline(deadline_s)
        lengths = check_keys(keys)
        require_hold(hold)
        nodes = yield from self._local_nodes(deadline)
        if hold is not None and keys:
            now_ns = self._clock_ns()
            return (yield from self._holds.exist(nodes, keys, lengths, hold, deadline, now_ns=now_ns, is_prefix=False))
        if not nodes or not keys:
            return (yield from self._metadata.exists(keys, deadline))
        is_here = self.local_reads.exists_batch(nodes, keys, lengths)
        found: list[bool] = is_here.tolist()
        if not is_here.all():
            left = np.flatnonzero(~is_here).tolist()
            for index, is_there in zip(left, (yield from self._metadata.exists([keys[i] for i in left], deadline)), strict=True):
                found[index] = is_there
        return found

    def exists_here(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are in local indexes. Sends nothing."""
        self.check_process()
        lengths = check_keys(keys)
        nodes = self.local.fresh()
        found: list[bool] = self.local_reads.exists_batch(nodes, keys, lengths).tolist() if nodes and keys else [False] * len(keys)
        return found

    def ping(self, *, deadline_s: float | None) -> Operation[None]:
        return self._metadata.ping(self.deadline(deadline_s))

    def begin_control_call(self, deadline_s: float | None) -> Operation[Deadline]:
        """Start the deadline of a control-plane call. Pings the owner first, so that the call is refused like any
        other."""
        deadline = self.deadline(deadline_s)
        yield from self._metadata.ping(deadline)
        return deadline

    def match_prefix(self, keys: Sequence[bytes], *, deadline_s: float | None, hold: Hold | None = None) -> Operation[int]:
        deadline = self.deadline(deadline_s)
        lengths = check_keys(keys)
        require_hold(hold)
        nodes = yield from self._local_nodes(deadline)
        if hold is not None and keys:
            now_ns = self._clock_ns()
            found = yield from self._holds.exist(nodes, keys, lengths, hold, deadline, now_ns=now_ns, is_prefix=True)
            return found.index(False) if False in found else len(found)
        if not nodes or not keys:
            return (yield from self._metadata.match_prefix(keys, deadline))
        is_here = self.local_reads.exists_batch(nodes, keys, lengths)
        matched = len(keys) if is_here.all() else int(is_here.argmin())
        if matched < len(keys):
            matched += yield from self._metadata.match_prefix(keys[matched:], deadline)
        return matched

    def release(self, hold: Hold) -> Operation[None]:
        self.check_process()
        require_hold(hold, is_optional=False)
        return self._holds.release(hold)

    def prefetch(self, keys: Sequence[bytes], *, to: str, deadline_s: float | None) -> Operation[int]:
        deadline = self.deadline(deadline_s)
        check_keys(keys)
        check_prefetch(keys, to)
        self.resources.counters.add(requests=1)
        return prefetch(self.resources.daemons, keys, to, deadline)

    def retain(self, keys: Sequence[bytes], retention: Retention, *, deadline_s: float | None) -> Operation[int]:
        deadline = self.deadline(deadline_s)
        check_keys(keys)
        check_retention(retention)
        if retention is None:
            raise InvalidArgument("retain needs a Retention")
        return self.retention.retain(keys, retention, deadline)

    def end_session(self, session: str, *, deadline_s: float | None) -> Operation[int]:
        return self.retention.end_session(session, self.deadline(deadline_s))

    def locate(self, keys: Sequence[bytes], *, deadline_s: float | None) -> Operation[list[list[Location]]]:
        return self._metadata.locate(keys, self.deadline(deadline_s))

    def remove(self, keys: Sequence[bytes], *, force: bool, deadline_s: float | None) -> Operation[int]:
        check_flag(force, "force")
        return self._metadata.remove(keys, self.deadline(deadline_s), force=force)

    def remove_matching(self, namespace: Any, pattern: str | None, *, force: bool, deadline_s: float | None) -> Operation[int]:
        if namespace is None and pattern is None:
            raise InvalidArgument("remove_matching needs a namespace or a pattern; the pattern '*' matches all keys")
        if pattern is not None and not isinstance(pattern, str):
            raise InvalidArgument(f"pattern is text, not a {type(pattern).__name__}")
        check_flag(force, "force")
        text = None if namespace is None else namespace_text(namespace)
        return self._metadata.remove_matching(text, "*" if pattern is None else pattern, self.deadline(deadline_s), force=force)

    def pin(self, keys: Sequence[bytes], *, pinned: bool, deadline_s: float | None, ttl_s: float | None = None) -> Operation[list[bool]]:
        return self._metadata.pin(keys, self.deadline(deadline_s), pinned=pinned, ttl_s=ttl_s)

    def close(self) -> None:
        """Close local nodes, threads and mappings; open views keep theirs. A second close is a no-op."""
        self.local.close()
        self.resources.close()

    def stats(self) -> ClientStats:
        return self.resources.counters.snapshot(*self.local.counts())

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the client's."""
        return self._process != ForkGeneration.number

    def check_process(self) -> None:
        """Raises Forked: processes that share a connection would read each other's replies."""
        if self._process != ForkGeneration.number:
            raise Forked(f"this client belongs to the parent process {self._pid}: create one in process {os.getpid()}")

    def deadline(self, deadline_s: Timeout) -> Deadline:
        """Deadline of a call that begins now; a running deadline is kept. Raises InvalidArgument, Forked."""
        self.check_process()
        if deadline_s is None:
            return Deadline(self.settings.deadline_s)
        if isinstance(deadline_s, Deadline):
            return deadline_s
        check_deadline(deadline_s)
        return Deadline(deadline_s)


def cluster_status(settings: ClientSettings, deadline: Deadline) -> dict[str, Any]:
    """Status of the cluster, as `kvstore status --json` prints it. Raises as `Control.find`."""
    from kvstore.client import control  # imports gRPC, which moving blocks does not need

    return control.as_dict(control.cluster_status(settings, deadline))


def stored_keys(settings: ClientSettings, deadline: Deadline, namespace: Any, limit: int | None) -> list[bytes]:
    """The tenant's keys. Raises InvalidArgument, and as `Control.find` and `Control.keys`."""
    from kvstore.client.control import Control

    check_limit(limit)
    text = None if namespace is None else namespace_text(namespace)
    with Control.find(settings, deadline) as control:
        return [stored.key for stored in control.keys(text, limit=limit or 0, deadline=deadline)]
