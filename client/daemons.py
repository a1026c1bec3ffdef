"""How a client reaches masters and nodes: a channel to the daemon that is meant, by the best address that works, and one question to it.
Sans-I/O: see effects.py."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.client.effects import AnyLoan, Ask, Operation, Take
from kvstore.client.routes import IsHere, KnownNode, KnownNodes, Masters, Route
from kvstore.client.unshared import Unshared
from kvstore.protocol.errors import Unavailable, Unreachable
from kvstore.protocol.master_messages import Nodes, NodeTable
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import SERVER_NODE
from kvstore.rpc.deadline import Deadline

M = TypeVar("M", bound=Message)


class Daemons:
    """The masters and nodes that a client knows. Its threads and tasks share it."""

    def __init__(self, masters: str | Sequence[str], *, is_here: IsHere, spread: int, unshared: Unshared) -> None:
        """Raises InvalidArgument for a malformed address."""
        self.masters = Masters(masters, is_here)
        self.nodes = KnownNodes(is_here, spread, unshared)
        self.unshared = unshared

    def begin(
        self, route: Route, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M]]:
        """Ask a daemon and keep the channel: (loan, answer). The caller gives the loan back. Raises Unreachable when no address works."""
        while True:
            begun = yield from self._attempt(route, message, answer, deadline, payload)
            if begun is not None:
                return begun

    def begin_shared(self, route: Route, message: Message, answer: type[M], deadline: Deadline) -> Operation[tuple[AnyLoan, M] | None]:
        """As `begin`, through the Unix socket only: None when there is no way through it."""
        while route.is_local:
            begun = yield from self._attempt(route, message, answer, deadline)
            if begun is not None:
                return begun
        return None

    def _attempt(
        self, route: Route, message: Message, answer: type[M], deadline: Deadline, payload: Sequence[memoryview] = ()
    ) -> Operation[tuple[AnyLoan, M] | None]:
        """One channel's try; None when another one may work: an idle one's peer has gone since, or there is another address.

        Nothing is asked of a daemon that is not the one meant: its answer would be a miss where the value is there.
        """
        address = route.address()
        try:
            loan: AnyLoan = yield Take(address, deadline)
        except Unavailable as error:
            if route.failed(address, str(error)):
                return None
            raise Unreachable(str(error)) from None
        welcome = loan.channel.welcome
        if not route.is_meant(address, welcome):
            loan.discard()
            what = f"at {address} there is another daemon by now, {welcome.name!r}"
            if route.failed(address, what):
                return None
            raise Unreachable(what)
        if not loan.reused:
            route.welcomed(welcome)
            self._note_trouble(route)
        try:
            return loan, (yield Ask(loan.channel, message, answer, deadline, payload))
        except BaseException as error:
            broke = isinstance(error, Unavailable) and not loan.channel.is_open
            loan.give_back(error)
            if broke and loan.reused:
                return None
            if broke:
                raise Unreachable(str(error)) from None
            raise

    def _note_trouble(self, route: Route) -> None:
        """A node that answers though its socket did not is there, and slower than it need be."""
        if route.trouble and route.who is not None and route.who.server == SERVER_NODE:
            self.unshared.note(route.who.name, route.trouble)

    def ask_master(
        self, message: Message, answer: type[M], deadline: Deadline, *, note: Callable[[M], object] | None = None
    ) -> Operation[M]:
        """Ask the master in use, else the others in order. Raises Unavailable when none answers.

        `note`, a function of C, gets the answer before anything can be raised: until it has it, the connection is closed by whatever is.
        """
        failure: Unreachable | None = None
        for route in self.masters.in_order():
            try:
                loan, reply = yield from self.begin(route, message, answer, deadline)
            except Unreachable as error:
                failure = failure or error
                continue
            if note is not None:
                note(reply)
            self.nodes.heard_from(loan.channel.welcome.epoch)
            loan.give_back()
            self.masters.stick_to(route)
            return reply
        assert failure is not None
        raise Unavailable(f"no master can be reached: {failure}")

    def refresh_nodes(self, deadline: Deadline) -> Operation[None]:
        self.nodes.replace((yield from self.ask_master(Nodes(), NodeTable, deadline)))

    def find_node(self, node_id: int, deadline: Deadline) -> Operation[KnownNode | None]:
        """None for a node that the master does not know either."""
        if self.nodes.get(node_id) is None:
            yield from self.refresh_nodes(deadline)
        return self.nodes.get(node_id)

    def node_to_avoid(self, node_id: int, deadline: Deadline) -> Operation[int]:
        """After a node could not be reached: its id, or 0 if the master knows it at another place by now."""
        old = self.nodes.get(node_id)
        yield from self.refresh_nodes(deadline)
        new = self.nodes.get(node_id)
        return node_id if new is None or new is old else 0
