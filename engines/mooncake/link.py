"""Connection of a Mooncake store object to the cluster: client, key names, and registered memory.

The groups of calls (gets.py, puts.py, ...) derive from `StoreConnection`.
"""

import functools
import hashlib
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvstore.client import Client, Memory
from kvstore.client.config import SECTION, ClientSettings
from kvstore.client.connections.registered_memory import RegisteredMemory
from kvstore.client.holds import Hold, new_hold
from kvstore.engines.mooncake.arguments import Number, Text, encoded
from kvstore.engines.mooncake.codes import INTERNAL_ERROR, INVALID_PARAMS, OK, code_of
from kvstore.engines.mooncake.setup import (
    DEFAULT_BYTES,
    DEFAULT_MASTER,
    DEFAULT_TENANT,
    MooncakeSettings,
    SetupArguments,
    of_arguments,
    of_dictionary,
)
from kvstore.engines.mooncake.setup import SECTION as MOONCAKE_SECTION
from kvstore.protocol.errors import Closed, DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.settings import load_settings

log = logging.getLogger("kvstore.engines.mooncake")

ATTEMPT_S: Final = 4.5
"""Duration of one of Mooncake's attempts to reach its master."""
PAUSE_S: Final = 0.25
DIGEST_BYTES: Final = 24
NUL: Final = b"\0"
WINDOWS: Final = 4
"""Lookups within 1/WINDOWS of a lease share a hold, which lasts at most that part longer."""
T = TypeVar("T")


class LookupLease:
    """Hold on looked-up objects, so that each stays for `lease_s`. Thread-safe.

    A hold per `is_exist` would be thousands a second: all objects found within a quarter of the lease share one.
    """

    def __init__(self, lease_s: float) -> None:
        """Create it. `lease_s` 0: no holds."""
        self._lease_s = lease_s
        self._window_ns = int(lease_s * 1e9 / WINDOWS)
        self._lock = threading.Lock()
        self._hold: Hold | None = None
        self._until_ns = 0

    def hold(self, now_ns: int) -> Hold | None:
        """Return the hold for a lookup at `now_ns`; None without leases."""
        if not self._lease_s:
            return None
        with self._lock:
            if self._hold is None or now_ns >= self._until_ns:
                self._hold, self._until_ns = new_hold(self._lease_s), now_ns + self._window_ns
            return self._hold


class StoreConnection:
    """Connection to the cluster, made by `setup`. Threads may share it afterwards."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._settings = ClientSettings()
        self._lease = LookupLease(0)
        self._namespace = "mooncake"
        self._prefix = b""
        self._hostname = ""
        self._can_stage = False
        self._registered: dict[int, tuple[int, RegisteredMemory]] = {}
        """Size and the client's handle, by address."""

    def setup(self, *arguments: Any, **named: Any) -> int:
        """Connect to the kvstore master at `master_server_addr`, or to one of several separated by commas.

        Takes Mooncake's arguments (`setup.of_arguments`), or one dictionary, also as `config`. Tokens, TLS and other
        settings that Mooncake has no argument for come from KVSTORE_CLIENT_*, KVSTORE_MOONCAKE_* and the file that
        KVSTORE_CONFIG names.

        Blocks while the master is unreachable, as Mooncake does: 4.5 s if the host name has a port, else 20 times as
        long. Then it returns -600 or -1, and the store needs another `setup`. Raises TypeError: arguments of wrong
        number or type.
        """
        given = [*arguments, *named.values()]
        is_dictionary = len(given) == 1 and isinstance(given[0], Mapping) and set(named) <= {"config"}
        found = of_dictionary(given[0]) if is_dictionary else of_arguments(*arguments, **named)
        return INVALID_PARAMS if found is None else self._connect(found)

    def setup_dummy(self, mem_pool_size: Number, local_buffer_size: Number, server_address: Text) -> int:
        """Connect as `setup`. `server_address` is the kvstore master's, because no client process runs in between."""
        return self._connect(SetupArguments("localhost", server_address, DEFAULT_TENANT, local_buffer_size > 0))

    def init_all(self, protocol: Text, device_name: Text, mount_segment_size: Number = DEFAULT_BYTES, /) -> int:
        """Connect as `setup`, to the master at the default address. Returns -600 if the store is set up."""
        return (
            INVALID_PARAMS
            if self._client is not None
            else self._connect(SetupArguments("localhost:12345", DEFAULT_MASTER, DEFAULT_TENANT, True))
        )

    def _connect(self, setup: SetupArguments) -> int:
        self.close()
        is_default = setup.tenant in ("", DEFAULT_TENANT)
        self._namespace = "mooncake" if is_default else f"mooncake/{setup.tenant}"
        self._prefix = b"" if is_default else encoded(setup.tenant) + NUL
        self._hostname = setup.host_and_port()
        self._can_stage = setup.can_stage
        end_s = time.monotonic() + ATTEMPT_S * setup.attempts
        pause = threading.Event()
        while True:
            try:
                self._settings = load_settings(ClientSettings, SECTION, flags={"master": setup.master})
                self._lease = LookupLease(load_settings(MooncakeSettings, MOONCAKE_SECTION, flags={}).lease_s)
                self._client = self._reached()
                return OK
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() >= end_s:
                    log.warning("no store at %s: %s", setup.master, error)
                    return INVALID_PARAMS if ":" in setup.hostname else INTERNAL_ERROR
                pause.wait(PAUSE_S)
            except KVStoreError as error:
                log.warning("no store at %s: %s", setup.master, error)
                return code_of(error)

    def _reached(self) -> Client:
        client = Client(settings=self._settings)
        try:
            client.exists(b"mooncake")
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> int:
        """Disconnect from the cluster; objects stay there. A second close is a no-op."""
        client, self._client = self._client, None
        self._registered.clear()
        if client is not None:
            client.close()
        return OK

    def health_check(self) -> int:
        """Return 0: the master responds; 1: not set up, or closed; 2: it does not respond."""
        if self._client is None:
            return 1
        try:
            self._client.locate([b"mooncake"])
        except KVStoreError:
            return 2
        return 0

    def get_hostname(self) -> str:
        return self._hostname

    def register_buffer(self, buffer_ptr: Number, size: Number) -> int:
        """Register memory with transports that need it. It must stay valid until `unregister_buffer` or `close`.
        Returns -600 if it overlaps registered memory."""

        def register(client: Client) -> int:
            _warn_of_weights()
            self._registered[buffer_ptr] = size, client.register(Memory(buffer_ptr, size))
            return OK

        return self._call(register)

    def unregister_buffer(self, buffer_ptr: Number) -> int:
        found = self._registered.pop(buffer_ptr, None)
        if found is None:
            return INVALID_PARAMS
        try:
            found[1].close()
        except KVStoreError as error:
            return code_of(error)
        return OK

    # --- for the groups of calls ---

    def _registered_bytes(self, pointer: int) -> int:
        """Return the registered bytes from an address on, 0 outside registered memory."""
        known = dict(self._registered)
        addresses = sorted(known)
        at = bisect_right(addresses, pointer) - 1
        return max(0, addresses[at] + known[addresses[at]][0] - pointer) if at >= 0 else 0

    def _call(self, call: Callable[[Client], int]) -> int:
        """Return the call's result, or the code of its error."""
        try:
            return call(self._connected())
        except KVStoreError as error:
            return code_of(error)

    def _call_each(self, count: int, call: Callable[[Client], Sequence[int]]) -> list[int]:
        """As `_call`, with a code a key: an error of the call applies to every key."""
        codes: list[int] = []

        def keep(client: Client) -> int:
            codes.extend(call(client))
            return OK

        code = self._call(keep)
        return codes if code == OK else [code] * count

    def _value(self, call: Callable[[Client], T]) -> T | None:
        """Return the call's result; None after an error, which is logged."""
        try:
            return call(self._connected())
        except KVStoreError as error:
            log.warning("%s", error)
            return None

    def _connected(self) -> Client:
        if self._client is None:
            raise Closed("this store is not set up, or was closed: call setup")
        return self._client

    def _key(self, key: str) -> bytes:
        """Return the object's key in the store. If it is too long, a hash replaces its end; patterns match its
        beginning.

        Keys of a tenant begin with its name and NUL. Keys of the default tenant are unchanged, except the empty key and
        keys with a NUL, which could collide with another tenant's: they begin with NUL, which no tenant's name does.
        """
        given = encoded(key)
        name = (self._prefix or (NUL if not given or NUL in given else b"")) + given
        if len(name) <= MAX_KEY_BYTES:
            return name
        return name[: MAX_KEY_BYTES - DIGEST_BYTES] + hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()

    def _given(self, name: bytes) -> bytes:
        """Return the caller's key of an object, from its key in the store."""
        return name[len(self._prefix or (NUL if name.startswith(NUL) else b"")) :]

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._key(key) for key in keys]


def memory(pointer: int, size_bytes: int) -> Memory | None:
    """Return the memory, or None for an invalid range, which is then rejected for its key alone."""
    try:
        return Memory(pointer, size_bytes)
    except InvalidArgument:
        return None


@functools.cache
def _warn_of_weights() -> None:
    """Log once per process. Engines register their caches' memory; other programs usually have no weights."""
    log.warning(
        "Mooncake's keys identify a model by name, not its weights: objects of other weights are loaded, too. Remove them, or use "
        "another tenant_id, with each change of the weights"
    )
