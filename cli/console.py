"""The command `console`: serves the web console of a remote cluster on this machine.

Data comes from the control plane of the master; pins and removals go through a client.
"""

import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import click

from kvstore.cli.exit_signals import ending_signals
from kvstore.cli.options import client_options
from kvstore.cli.tools.cluster_report import ask_masters
from kvstore.client.config import ClientSettings
from kvstore.client.control import Control
from kvstore.client.sync import Client
from kvstore.console.config import ConsoleSettings
from kvstore.console.source import ClusterSnapshot, MasterView
from kvstore.console.watch import ClusterWatcher
from kvstore.console.web import add_console
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.rpc.address import parse_address
from kvstore.security.actor import Actor
from kvstore.security.listen_address import is_loopback
from kvstore.telemetry.http.access import LocalAccess, TokenAccess
from kvstore.telemetry.http.server import HttpServer

T = TypeVar("T")

PIN_KEYS: Final = 4096
"""Keys in one pin request."""

LISTEN_DEFAULT: Final = "127.0.0.1:7480"


class ConsoleClient:
    """ConsoleSource over the control plane, with the rights of the settings' token.

    The audit trail records the token's name for actions, so `by` is ignored. Thread-safe: requests are serialised. After a failure the
    next request connects again, because another master may own the catalog by then.
    """

    def __init__(self, settings: ClientSettings) -> None:
        """Does not connect yet."""
        self._settings = settings
        self._control: Control | None = None
        self._lock = threading.Lock()

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(self._request(lambda control: control.status()))

    def masters(self) -> Sequence[MasterView]:
        reports = ask_masters(self._settings, self.snapshot().status)
        return [MasterView(one.address, one.name, one.role, one.behind, one.error) for one in reports]

    def topologies(self) -> Sequence[pb.NodeTopology]:
        return self._request(lambda control: control.topologies())

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        def contents(control: Control) -> pb.ContentsReply:
            limit, hottest = request.max_segments, request.hottest
            return control.contents(request.tenant, request.namespace, max_segments=limit, hottest=hottest)

        return self._request(contents)

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        return self._request(lambda control: control.audit(after))

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        return self._request(lambda control: control.slow_requests())

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        self._request(lambda control: control.drain(node, to=to, cancel=cancel))

    def forget(self, node: str, by: Actor) -> None:
        self._request(lambda control: control.forget(node))

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        self._check_tenant(tenant)
        keys = self._request(lambda control: [stored.key for stored in control.keys(namespace)])
        found = 0
        with Client(settings=self._settings) as client:
            pin = client.pin if pinned else client.unpin
            for begin in range(0, len(keys), PIN_KEYS):
                found += sum(pin(keys[begin : begin + PIN_KEYS]))
        return found

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        self._check_tenant(tenant)
        with Client(settings=self._settings) as client:
            return client.remove_matching(namespace=namespace)

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        self._request(lambda control: control.set_quota(tenant, limits))

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        self._request(lambda control: control.clear_quota(tenant, names))

    def close(self) -> None:
        """Disconnect. The next request connects again."""
        with self._lock:
            self._disconnect()

    def _request(self, call: Callable[[Control], T]) -> T:
        """Call the master that owns the catalog. An error other than InvalidArgument ends the connection."""
        with self._lock:
            try:
                if self._control is None:
                    self._control = Control.find(self._settings)
                return call(self._control)
            except KVStoreError as error:
                if not isinstance(error, InvalidArgument):
                    self._disconnect()
                raise

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control = None

    def _check_tenant(self, tenant: str) -> None:
        """Raises InvalidArgument: a client sees one tenant's blocks."""
        if tenant != self._settings.tenant:
            raise InvalidArgument(f"this console acts for tenant {self._settings.tenant!r}: start it with --tenant {tenant}")


@click.command(short_help="Serve the console of a cluster on this machine.")
@click.option(
    "--listen",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help="Address for browsers; port 0 picks a free port.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1, max=60),
    default=ConsoleSettings().interval_s,
    show_default=True,
    metavar="SECONDS",
    help="Time between two polls of the cluster.",
)
@client_options
def console(listen: str, interval_s: float, settings: ClientSettings) -> None:
    """Serve the console of the cluster of --master for browsers, until Ctrl-C.

    Masters serve the console on their HTTP port (see kvstore status --json). Use this command where a browser cannot reach that port.
    The console acts with the rights of --token. With a token, or on an address that is not loopback, the printed URL ends with an access
    key, and requests without it are refused.
    """
    key = secrets.token_urlsafe(24) if settings.token or not is_loopback(parse_address(listen).host) else ""
    source = ConsoleClient(settings)
    server = HttpServer(listen, access_control=TokenAccess([key]) if key else LocalAccess())
    watch = ClusterWatcher(source, ConsoleSettings(interval_s=interval_s))
    add_console(server, watch)
    ending = ending_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before threads start, which inherit it: sigwait then misses no signal
    server.start()
    watch.start()
    try:
        click.echo(f"http://{server.address}/" + (f"#key={key}" if key else ""))
        signal.sigwait(ending)
    finally:
        watch.close(wait_s=0)
        server.close()
        source.close()
