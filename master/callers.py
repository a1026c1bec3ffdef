"""Who calls the control plane, and whether he may: every gRPC call passes here before it reaches its service.

A call shows a credential in its metadata (security/grpc_metadata.py). One without, as releases before this sent, is looked at for the
fields `tenant` and `token` of its request.
"""

from collections.abc import Callable
from typing import Any, Final

import grpc

from kvstore.master.grpc_calls import abort
from kvstore.protocol.errors import Denied, KVStoreError, Unauthorized
from kvstore.security.grpc_metadata import from_metadata
from kvstore.security.guard import Guard
from kvstore.security.identity import STRANGER, Identity
from kvstore.security.rules import OPEN, RPCS, Rule, check
from kvstore.security.tls.grpc_credentials import caller
from kvstore.security.tls.identities import both, of_caller

_HANDLERS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Callers(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """See the module. Any thread may ask."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def identify(self, context: grpc.ServicerContext, request: Any) -> Identity:
        """Who makes this call: a stranger, if he shows nothing. Raises Unauthorized for a credential that is wrong."""
        shown = from_metadata(context.invocation_metadata())
        if shown is None:
            shown = getattr(request, "tenant", ""), getattr(request, "token", "")
        certificate = of_caller(caller(context), shown[0])
        if shown == ("", "") and not self._guard.lets_everybody_in:
            return certificate or STRANGER
        is_operators = shown[0] == "" != shown[1]  # such a token belongs to no tenant, whosever certificate is beside it
        return both(self._guard.identify(*shown, None if is_operators else certificate), certificate)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """gRPC's hook: the service's own handler behind its rule; a method without one is nobody's."""
        handler: Any = continuation(handler_call_details)
        method = handler_call_details.method
        rule = RPCS.get(method)
        if handler is None or rule is OPEN:
            return handler  # type: ignore[no-any-return]
        serve = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                self._check(rule, method, context, request)
            except KVStoreError as error:
                abort(context, error)
            return serve(request, context)

        wrap: Any = _HANDLERS[handler.request_streaming, handler.response_streaming]
        return wrap(guarded, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    def _check(self, rule: Rule | None, method: str, context: grpc.ServicerContext, request: Any) -> None:
        """Raises Unauthorized, Denied."""
        if rule is None:
            raise Denied(f"no rule says who may call {method}: nobody may")
        name = method.rpartition("/")[2]
        try:
            identity = self.identify(context, request)
        except Unauthorized as error:
            raise Unauthorized(f"{error}; {name} needs {rule.text}") from None
        check(rule, identity, name)
