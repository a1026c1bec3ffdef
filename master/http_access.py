"""Who may ask what on a master's HTTP port: this host where there are no credentials, else whoever shows an operator's token."""

from typing import Final

from aiohttp import web

from kvstore.protocol.errors import KVStoreError
from kvstore.security.guard import Guard
from kvstore.telemetry.http.access import Access, Authorize, this_host_only

SCHEME: Final = "bearer"


def by_token(guard: Guard) -> Authorize:
    """ADMIN for `Authorization: Bearer TOKEN` with a token of [admins]; NONE for all others, on this host too. The console shows what all
    tenants have, so a tenant's token is not enough."""

    def authorize(request: web.Request) -> Access:
        if guard.lets_everybody_in:
            return this_host_only(request)
        scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != SCHEME:
            return Access.NONE
        try:
            return Access.ADMIN if guard.identify("", token.strip()).operates else Access.NONE
        except KVStoreError:
            return Access.NONE

    return authorize
