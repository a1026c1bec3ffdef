"""Calls that remove objects: by key, by a pattern of keys, all."""

import re
from collections.abc import Sequence

from kvstore.client import Client
from kvstore.engines.mooncake.codes import OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, OK
from kvstore.engines.mooncake.link import Link


class Removals(Link):
    """Pinned objects, and those that someone is looking at, stay unless `force`."""

    def remove(self, key: str, force: bool = False) -> int:
        def remove(client: Client) -> int:
            name = self._key(key)
            if client.remove([name], force=force):
                return OK
            return OBJECT_HAS_LEASE if client.exists(name) else OBJECT_NOT_FOUND

        return self._call(remove)

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        return [self.remove(key, force) for key in keys]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Objects of whose key any part matches: how many were removed, or a code. Raises re.error for what is no pattern."""
        pattern = re.compile(regex_pattern)

        def remove(client: Client) -> int:
            names = [name for name in self._names() if pattern.search(self._given(name).decode(errors="replace"))]
            return client.remove(names, force=force)

        return self._call(remove)

    def remove_all(self, force: bool = False) -> int:
        """Every object of this API and tenant: how many were removed, or a code."""
        return self._call(lambda client: client.remove_matching(namespace=self._namespace, force=force))

    def _names(self) -> list[bytes]:
        """The keys of all objects of this API and tenant."""
        from kvstore.client.control import Control  # the control plane needs grpc, which nothing else here does

        with Control.find(self._settings) as control:
            return [found.key for found in control.keys(self._namespace)]
