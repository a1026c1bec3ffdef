"""A store object's way to the cluster: its client, how its keys are named there, and what it has registered. The groups of calls (gets.py,
puts.py, ...) stand on it."""

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvstore.client import Client, Memory
from kvstore.client.config import SECTION, ClientSettings
from kvstore.client.registered import RegisteredMemory
from kvstore.engines.mooncake.codes import INVALID_PARAMS, OK, code_of
from kvstore.protocol.errors import Closed, ConfigError, InvalidArgument, KVStoreError
from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.settings import load_settings, parse_size

log = logging.getLogger("kvstore.engines.mooncake")

DEFAULT_MASTER: Final = "127.0.0.1:7440"
DEFAULT_TENANT: Final = "default"
LOCAL_BUFFER_BYTES: Final = 16 << 20
PORTS: Final = range(12300, 14301)
"""Out of which a host's name gets one, as Mooncake does it; nobody listens there."""
DIGEST_BYTES: Final = 24
NUL: Final = b"\0"
T = TypeVar("T")


class Link:
    """Not connected until `setup`. Threads may share it."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._settings = ClientSettings()
        self._namespace = "mooncake"
        self._prefix = b""
        self._hostname = ""
        self._can_stage = False
        self._registered: dict[int, tuple[int, RegisteredMemory | None]] = {}
        """By address: the size, and what the client has of it, None where it knows the memory already."""

    def setup(
        self,
        local_hostname: str | Mapping[str, Any],
        metadata_server: str = "",
        global_segment_size: int | str = LOCAL_BUFFER_BYTES,
        local_buffer_size: int | str = LOCAL_BUFFER_BYTES,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = DEFAULT_MASTER,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = DEFAULT_TENANT,
        enable_client_http_server: bool = False,
        client_http_port: int = 0,
    ) -> int:
        """Connect to the kvstore master at `master_server_addr`, or to one of several separated by commas. The first argument may be a
        dictionary of all of them.

        `tenant_id` separates keys: those of two tenants never meet. It has no NUL, which ends it in a key. A `local_buffer_size` of 0
        refuses puts of values that are not in registered memory, as Mooncake's does. Segments, metadata servers, protocols and devices are
        the nodes' affair: taken, not used.
        What Mooncake has no argument for, tokens and TLS among it, is taken from KVSTORE_CLIENT_* and the file that KVSTORE_CONFIG names.
        """
        if isinstance(local_hostname, Mapping):
            config = {str(name): value for name, value in local_hostname.items()}
            config["master_server_addr"] = config.get("master_server_addr") or config.pop("master_server_address", None) or DEFAULT_MASTER
            known = ("global_segment_size", "local_buffer_size", "master_server_addr", "tenant_id")
            chosen = {name: config[name] for name in known if config.get(name) not in (None, "")}
            return self.setup(str(config.get("local_hostname", "")), **chosen)
        try:
            _size(global_segment_size)
            self._can_stage = _size(local_buffer_size) > 0
        except ConfigError:
            return INVALID_PARAMS
        if "\0" in tenant_id:
            return INVALID_PARAMS
        self.close()
        is_default = tenant_id in ("", DEFAULT_TENANT)
        self._namespace = "mooncake" if is_default else f"mooncake/{tenant_id}"
        self._prefix = b"" if is_default else tenant_id.encode() + NUL
        self._hostname = local_hostname if ":" in local_hostname else f"{local_hostname}:{random.choice(PORTS)}"
        try:
            self._settings = load_settings(ClientSettings, SECTION, flags={"master": master_server_addr})
            client = Client(master_server_addr, tenant=self._settings.tenant, token=self._settings.token, settings=self._settings)
            client.exists(b"mooncake")
        except KVStoreError as error:
            log.warning("no store at %s: %s", master_server_addr, error)
            return code_of(error)
        self._client = client
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As `setup`: there is no process between this one and the cluster, so that `server_address` is the kvstore master's."""
        return self.setup("localhost", "", mem_pool_size, local_buffer_size, "tcp", "", server_address)

    def close(self) -> int:
        """Let go of the cluster; what was put stays there. A second close is a no-op."""
        client, self._client = self._client, None
        self._registered.clear()
        if client is not None:
            client.close()
        return OK

    def health_check(self) -> int:
        """0: the master answers; 1: not set up, or closed; 2: it does not."""
        if self._client is None:
            return 1
        try:
            self._client.locate([b"mooncake"])
        except KVStoreError:
            return 2
        return 0

    def get_hostname(self) -> str:
        return self._hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Have transports that have to register memory do it once. The memory must stay until `unregister_buffer` or `close`."""

        def register(client: Client) -> int:
            memory = Memory(buffer_ptr, size)
            try:
                self._registered[buffer_ptr] = size, client.register(memory)
            except InvalidArgument:
                if not size:
                    raise
                # A part of it is registered, which Mooncake does not mind. What was from this address on is given up with it.
                known_bytes, known = self._registered.get(buffer_ptr, (0, None))
                self._registered[buffer_ptr] = max(size, known_bytes), known
            return OK

        return self._call(register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        found = self._registered.pop(buffer_ptr, None)
        if found is None:
            return INVALID_PARAMS
        try:
            if found[1] is not None:
                found[1].close()
        except KVStoreError as error:
            return code_of(error)
        return OK

    # --- for the groups of calls ---

    def _call(self, call: Callable[[Client], int]) -> int:
        """What the call gives, or the code of what it raises."""
        try:
            return call(self._connected())
        except KVStoreError as error:
            return code_of(error)

    def _call_each(self, count: int, call: Callable[[Client], Sequence[int]]) -> list[int]:
        """As `_call`, of a code a key: what concerns all is each one's."""
        codes: list[int] = []

        def keep(client: Client) -> int:
            codes.extend(call(client))
            return OK

        code = self._call(keep)
        return codes if code == OK else [code] * count

    def _value(self, call: Callable[[Client], T]) -> T | None:
        """As `_call`, of what has a value or none."""
        try:
            return call(self._connected())
        except KVStoreError as error:
            log.warning("%s", error)
            return None

    def _connected(self) -> Client:
        if self._client is None:
            raise Closed("this store has not been set up, or was closed")
        return self._client

    def _key(self, key: str | bytes) -> bytes:
        """The object's key in the store. Of what is too long a hash stands for the end; patterns see the beginning only.

        A tenant's begin with its name and NUL. The default tenant's are as they are, but for those that have a NUL, which could be another
        tenant's: they begin with NUL, as no tenant's name does.
        """
        given = key.encode() if isinstance(key, str) else key
        name = (self._prefix or (NUL if NUL in given else b"")) + given
        if len(name) <= MAX_KEY_BYTES:
            return name
        return name[: MAX_KEY_BYTES - DIGEST_BYTES] + hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()

    def _given(self, name: bytes) -> bytes:
        """What the object of that key is called by whoever put it."""
        return name[len(self._prefix or (NUL if name.startswith(NUL) else b"")) :]

    def _keys(self, keys: Sequence[str | bytes]) -> list[bytes]:
        return [self._key(key) for key in keys]


def memory(pointer: int, size_bytes: int) -> Memory | None:
    """None for what is no memory: a value or buffer of its key that is refused."""
    try:
        return Memory(pointer, size_bytes)
    except InvalidArgument:
        return None


def _size(size: int | str) -> int:
    """Raises ConfigError."""
    return size if isinstance(size, int) else parse_size(str(size).replace(" ", ""))
