"""Index of blocks that routers of others ask: what registered engines have themselves, and what all of them reach in the store."""

from typing import Any, Final

from kvstore.engines.publisher.conductor import (
    matches,
    read_query,
    read_registration,
    read_unregistration,
    registered,
    unregistered,
)
from kvstore.engines.publisher.prefix_table import Context, PrefixTable
from kvstore.engines.publisher.store_media import StoreMedia
from kvstore.engines.publisher.subscriptions import Subscriptions
from kvstore.kvcache.namespace import Namespace
from kvstore.kvcache.naming import NamespaceNaming, Naming

DTYPE: Final = "bfloat16"
"""Of namespaces that name blocks in the table only: keys of theirs are not in the store."""


class Index:
    """Threads may share it. Close it."""

    def __init__(self, store: StoreMedia | None) -> None:
        """`store`: whose blocks every instance reaches; None: routers are told of engines only."""
        self._store = store
        self._subscriptions = Subscriptions(PrefixTable(self._naming))

    @property
    def services(self) -> int:
        """How many are registered."""
        with self._subscriptions.lock:
            return len(self._subscriptions.table.services)

    def tokens_of(self, key: bytes) -> list[int] | None:
        """Token ids of a block of the store, if a registered engine published them lately."""
        with self._subscriptions.lock:
            return self._subscriptions.table.tokens_of(key)

    def register(self, body: Any) -> dict[str, Any]:
        """Answer a `/register`. Raises InvalidArgument, Full."""
        service = read_registration(body)
        self._subscriptions.add(service)
        return registered(service)

    def unregister(self, body: Any) -> dict[str, Any] | None:
        """Answer an `/unregister`; None: there is no such service. Raises InvalidArgument."""
        service = self._subscriptions.remove(read_unregistration(body))
        return None if service is None else unregistered(service)

    def query(self, body: Any) -> dict[str, Any]:
        """Answer a `/query`. Raises InvalidArgument."""
        query = read_query(body)
        context = query.context
        keys = self._naming(context).block_keys(query.token_ids)
        in_store = self._store.media(keys) if self._store is not None and self._store.has(context) else []
        with self._subscriptions.lock:
            found = self._subscriptions.table.match(context, keys, instance=query.instance, in_store=in_store)
        return matches(context.tenant, found)

    def close(self) -> None:
        self._subscriptions.close()

    def _naming(self, context: Context) -> Naming:
        """The store's own where it has blocks of this context. Raises InvalidArgument for texts that are too long."""
        if self._store is not None and self._store.has(context):
            return self._store.naming
        return NamespaceNaming(
            Namespace(model=context.model, adapter=context.adapter, salt=context.salt, dtype=DTYPE, block_tokens=context.block_tokens)
        )
