"""Calls that remove objects: by key, by a pattern of keys, all."""

from kvstore.client import Client
from kvstore.engines.mooncake.arguments import Flag, Text, Texts
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.link import Link
from kvstore.engines.mooncake.patterns import compiled
from kvstore.protocol.errors import InvalidArgument


class Removals(Link):
    """Objects that are pinned, leased or being read stay unless `force`."""

    def remove(self, key: Text, force: Flag = False) -> int:
        def remove(client: Client) -> int:
            name = self._key(key)
            if client.remove([name], force=force):
                return OK
            return OBJECT_HAS_LEASE if client.exists(name) else OBJECT_NOT_FOUND

        return self._call(remove)

    def batch_remove(self, keys: Texts, force: Flag = False) -> list[int]:
        return [self.remove(key, force) for key in keys]

    def remove_by_regex(self, regex_pattern: Text, force: Flag = False) -> int:
        """Remove objects of whose key any part matches an ECMAScript pattern. Return how many were removed, or a code: -600 for no
        pattern."""
        try:
            pattern = compiled(regex_pattern)
        except InvalidArgument:
            return INVALID_PARAMS

        def remove(client: Client) -> int:
            names = [name for name in self._names() if pattern.search(self._given(name))]
            return client.remove(names, force=force)

        return self._call(remove)

    def remove_all(self, force: Flag = False) -> int:
        """Remove every object of this API and tenant. Return how many were removed, or a code."""
        return self._call(lambda client: client.remove_matching(namespace=self._namespace, force=force))

    def _names(self) -> list[bytes]:
        """The keys of all objects of this API and tenant."""
        from kvstore.client.control import Control  # the control plane needs grpc, which nothing else here does

        with Control.find(self._settings) as control:
            return [found.key for found in control.keys(self._namespace)]
