"""Authentication and authorization of the control plane: each gRPC call is checked and queued here before its service
runs.

A call carries its credential in metadata (security/grpc_metadata.py)."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from kvstore.master.audit_trail import LOGIN, AuditTrail
from kvstore.master.config import MasterSettings
from kvstore.master.control_limits import SEND_TIMEOUT_S, CallExecutor
from kvstore.protocol.errors import Denied, KVStoreError, Unauthorized, grpc_status, typed
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import TraceSpan, parent_in
from kvstore.security.actor import CONTROL, Actor, host_of
from kvstore.security.authenticator import Authenticator
from kvstore.security.grpc_metadata import actor_from, from_metadata, master_key
from kvstore.security.identity import PEER_MASTER, UNAUTHENTICATED, Identity, IdentityKind
from kvstore.security.permissions import JOINS, OPEN, RPCS, Permission, check, requirement
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.grpc_credentials import caller
from kvstore.security.tls.subjects import MASTER, CertifiedPeer, caller_identity, combine_identities
from kvstore.telemetry.metrics.histogram import Histograms
from kvstore.telemetry.metrics.requests import in_words

Send = Callable[[Any], None]
"""Sends a response and returns once it is under way. None sends the call's status and ends it."""

NOT_ALLOWED: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

log = logging.getLogger("kvstore.master")


class Callers(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """gRPC interceptor that identifies the caller, checks its permission and runs the call in the executor.
    Thread-safe."""

    def __init__(
        self,
        authenticator: Authenticator,
        trail: AuditTrail,
        settings: MasterSettings,
        *,
        durations: Histograms,
        tls: Certificates | None = None,
        begin_span: Callable[[str, TraceParent], TraceSpan] | None = None,
    ) -> None:
        """`trail` records refused calls; `durations` are those of unary calls. `tls` has the revoked certificates.
        `begin_span` traces calls that belong to a trace."""
        self._authenticator = authenticator
        self._trail = trail
        self.tls = tls
        self.durations = durations
        self.begin_span = begin_span
        self.executor = CallExecutor(settings.control_threads)
        self.message_timeout_s = settings.hello_timeout_s
        """For each message of a request stream."""
        self.on_authenticated: Callable[[str], None] = lambda _peer: None
        """Called with the peer's address for each authenticated call; set before the first call."""

    def identify(self, context: grpc.ServicerContext) -> Identity:
        """Return the caller's identity, STRANGER without a credential. Raises Unauthorized for a wrong credential."""
        peer = caller(context)
        if self.tls is not None and self.tls.is_revoked(peer):
            raise Unauthorized(f"the certificate for {peer} has been revoked (tls_revoked): use another one")
        key = master_key(context.invocation_metadata())
        if key is not None:
            return self._identify_master(key, peer)
        credential = from_metadata(context.invocation_metadata()) or ("", "")
        certificate = caller_identity(peer, credential[0])
        if credential == ("", "") and not self._authenticator.allows_anonymous:
            return certificate or UNAUTHENTICATED
        is_operators = credential[0] == "" != credential[1]  # an operator's token has no tenant: the certificate's tenant does not apply
        return combine_identities(self._authenticator.identify(*credential, None if is_operators else certificate), certificate)

    def tokens(self) -> frozenset[Identity]:
        """Identities of the accepted tokens."""
        return self._authenticator.identities()

    def actor(self, context: grpc.ServicerContext) -> Actor:
        """Return the actor of a change, for the audit trail. For a call of another master, that is the operator at
        its console. Raises Unauthorized."""
        identity = self.identify(context)
        if identity is PEER_MASTER:
            return actor_from(context.invocation_metadata())
        return Actor.of(identity, peer=host_of(context.peer()), via=CONTROL)

    def denied(self, identity: Identity | None, method: str, context: grpc.ServicerContext, error: KVStoreError) -> None:
        """Record a refused call in the audit trail. `identity` is None if the credential was wrong."""
        actor = Actor.of(identity or UNAUTHENTICATED, peer=host_of(context.peer()), via=CONTROL)
        self._trail.denied(actor, error, action=in_words(method.rpartition("/")[2]) if identity is not None else LOGIN)

    def _identify_master(self, key: str, peer: CertifiedPeer | None) -> Identity:
        """Raises Unauthorized."""
        if peer is not None and not peer.is_a(MASTER):
            raise Unauthorized(f"the certificate is for {peer}, and a master calls: make it one (kvstore certs master)")
        return self._authenticator.identify_master(key)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the service's handler with authentication. A method without a permission is refused.

        gRPC sees a non-blocking stream-stream handler: it is called with the headers only, and responses may be sent
        from another thread."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        rule = RPCS.get(method)

        def authenticate(requests: Iterator[Any], context: grpc.ServicerContext, send: Send) -> None:
            call = _Call(self, rule, method, handler, requests, context, send)
            try:
                identity = call.identity = UNAUTHENTICATED if rule is OPEN else self._identify(rule, method, context)
                self.executor.submit(identity, call.serve, joins=rule is JOINS)
            except KVStoreError as error:
                call.refuse(error)

        authenticate.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(authenticate, handler.request_deserializer, handler.response_serializer)

    def check(self, rule: Permission | None, method: str, context: grpc.ServicerContext) -> None:
        """Raises Unauthorized, Denied."""
        if rule is OPEN:
            return
        if rule is None:
            raise Denied(f"{method} has no permission rule: the call is refused")
        check(rule, self._identify(rule, method, context), method.rpartition("/")[2])

    def _identify(self, rule: Permission | None, method: str, context: grpc.ServicerContext) -> Identity:
        """As `identify`; the error names the credential that the call needs."""
        try:
            identity = self.identify(context)
            if identity.kind is not IdentityKind.UNAUTHENTICATED:
                self.on_authenticated(context.peer())
            return identity
        except Unauthorized as error:
            raise Unauthorized(f"{error}; {requirement(rule, method.rpartition('/')[2])}" if rule is not None else str(error)) from None


class _Call:
    """One call, from its headers to its status."""

    def __init__(
        self,
        callers: Callers,
        rule: Permission | None,
        method: str,
        handler: Any,
        requests: Iterator[Any],
        context: Any,
        send: Send,
    ) -> None:
        self.identity: Identity | None = None
        """None until the credential has been checked."""
        self._callers = callers
        self._executor = callers.executor
        self._rule = rule
        self._method = method
        self._handler = handler
        self._requests = requests
        self._context = context
        self._send = send

    def refuse(self, error: KVStoreError) -> None:
        """End the call with the error, without reading its message, which may never be sent."""
        if isinstance(error, Denied):
            self._callers.denied(self.identity, self._method, self._context, error)
        self._end(grpc.StatusCode[grpc_status(error)], str(error))

    def serve(self) -> None:
        """Read, check and answer the call, in a thread of the executor."""
        context = self._context
        try:
            if context.is_active():
                self._serve()
            self._send(None)
        except StopIteration:
            self._end(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request message")
        except KVStoreError as error:
            self.refuse(error)
        except Exception as error:
            code = context.code()
            if code is not None or not context.is_active():  # aborted by the service, with its details; or the peer has disconnected
                if code in NOT_ALLOWED:
                    self._callers.denied(self.identity, self._method, context, Denied(context.details().decode(errors="replace")))
                self._send(None)
                return
            log.exception("%s failed", self._method)
            self._end(grpc.StatusCode.UNKNOWN, str(typed(error)))

    def _serve(self) -> None:
        handler, context = self._handler, self._context
        received: Any = self._messages()
        if not handler.request_streaming:
            received = next(received)
        self._callers.check(self._rule, self._method, context)
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        with self._measured():
            answers = serve(received, context)
            for answer in answers if handler.response_streaming else (answers,):
                with self._executor.waiting_for(context, SEND_TIMEOUT_S):
                    self._send(answer)
                if not context.is_active():
                    return

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the service's time, and record a span if the call belongs to a trace."""
        callers, handler, name = self._callers, self._handler, in_words(self._method.rpartition("/")[2])
        parent, span = parent_in(self._context.invocation_metadata()), None
        if callers.begin_span is not None and parent is not None and not handler.request_streaming:
            span = callers.begin_span(name, parent)
        began_ns, error = time.monotonic_ns(), ""
        try:
            yield
        except BaseException:
            code = self._context.code()
            error = code.name if code is not None else "UNKNOWN"
            raise
        finally:
            if handler.unary_unary is not None:
                callers.durations[name].record(time.monotonic_ns() - began_ns)
            if span is not None:
                span.end(error)

    def _messages(self) -> Iterator[Any]:
        """Yield the request messages."""
        while True:
            with self._executor.waiting_for(self._context, self._callers.message_timeout_s):
                message = next(self._requests, None)
            if message is None:
                return
            yield message

    def _end(self, code: grpc.StatusCode, text: str) -> None:
        self._context.set_code(code)
        self._context.set_details(text)
        self._send(None)
