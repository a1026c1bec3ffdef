"""JSON form of a topology: registered with the master, printed by `kvstore topology --json`, read by the setting `topology`.

    {"version": 1, "host": "a", "numa_nodes": [{"number": 0, "distances": [10]}],
     "nics": [{"name": "mlx5_0", "kind": "roce", "interface": "eth0", "addresses": ["10.0.0.1"], "numa_node": 0,
               "speed_gbit_s": 400.0, "is_up": true, "pci_path": "pci0000:00/0000:00:01.0/0000:01:00.0"}],
     "gpus": [{"index": 0, "name": "H100", "numa_node": 0, "pci_path": "..."}],
     "matrix": {"cpu:0": [["mlx5_0"], []], "cuda:0": [["mlx5_0"], []]}}

The matrix alone, without "version", is Mooncake's form; the setting accepts both.
Every value is bounded; errors name the path of the value.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from kvstore.protocol.errors import ConfigError, ProtocolError
from kvstore.transfer.topology.model import ETHERNET, KINDS, LOCATION, UNKNOWN_NODE, Gpu, Matrix, Nic, NumaNode, RailPreference, Topology

FORM_VERSION: Final = 1
MAX_TOPOLOGY_BYTES: Final = 256 << 10
"""A machine with 8 GPUs and 8 NICs takes 5 KiB."""
MAX_ENTRIES: Final = 1024
"""Limit of every list: Linux supports 1,024 NUMA nodes, and no machine has as many NICs or GPUs."""
MAX_TEXT_BYTES: Final = 255
MAX_SPEED_GBIT_S: Final = 1_000_000


def dump_topology(topology: Topology) -> bytes:
    """Return the JSON form, on one line."""
    return json.dumps(as_json(topology), separators=(",", ":")).encode()


def as_json(topology: Topology) -> dict[str, Any]:
    """Return the JSON form as plain values, with the current matrix."""
    return {
        "version": FORM_VERSION,
        "host": topology.host,
        "numa_nodes": [{"number": node.number, "distances": list(node.distances)} for node in topology.numa_nodes],
        "nics": [{**asdict(nic), "addresses": list(nic.addresses)} for nic in topology.nics],
        "gpus": [asdict(gpu) for gpu in topology.gpus],
        "matrix": {location: [list(rails.preferred), list(rails.available)] for location, rails in topology.matrix.items()},
    }


def parse_topology(data: bytes) -> Topology:
    """Return the topology that a peer described, with its matrix. Raises ProtocolError naming the field at fault."""
    return _topology(_document(data))


def override_from_file(path: str | Path) -> "Override":
    """Read the file of the setting `topology`. Raises ConfigError naming the file and the field."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the topology {path}: {error.strerror or error}") from None
    try:
        document = _document(data)
        if "version" in document.fields():
            return Override(str(path), _topology(document), {})
        return Override(str(path), None, _matrix(document))
    except ProtocolError as error:
        raise ConfigError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's override: a whole topology, or (`whole` is None) only entries of the matrix."""

    source: str
    whole: Topology | None
    matrix: Matrix

    def apply(self, found: Topology) -> Topology:
        """Apply it to the topology `found` on the machine.

        A whole topology is kept, except that a NIC that is down is down, and that missing addresses are those found. A
        NIC that does not exist is in no matrix.
        """
        if self.whole is not None:
            here = {nic.name: nic for nic in found.nics}
            return replace(self.whole, nics=tuple(_kept_current(nic, here.get(nic.name)) for nic in self.whole.nics))
        return replace(found, override=self.matrix)

    def check(self, found: Topology) -> None:
        """Raises ConfigError if the matrix names a NIC that the machine does not have, so that the mistake is found at
        start.
        """
        try:
            _check_names(self.matrix, found.nics)
        except ProtocolError as error:
            raise ConfigError(f"{self.source}: {error}") from None


def _kept_current(nic: Nic, found: Nic | None) -> Nic:
    if found is None:
        return nic
    return replace(nic, is_up=nic.is_up and found.is_up, addresses=nic.addresses or found.addresses)


def _document(data: bytes) -> "_JsonValue":
    if len(data) > MAX_TOPOLOGY_BYTES:
        raise ProtocolError(f"a topology of {len(data)} bytes is over the limit of {MAX_TOPOLOGY_BYTES}")
    try:
        return _JsonValue(json.loads(data), "")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a topology is JSON, this is not: {error}") from None


def _topology(document: "_JsonValue") -> Topology:
    version = document["version"].integer(0, 1 << 31)
    if version != FORM_VERSION:
        raise ProtocolError(f"version: this topology has form {version}, this release reads {FORM_VERSION}")
    nodes = tuple(
        NumaNode(item["number"].integer(0, MAX_ENTRIES), tuple(each.integer(0, 255) for each in item.get("distances", []).items()))
        for item in document.get("numa_nodes", []).items()
    )
    nics = tuple(_nic(item) for item in document.get("nics", []).items())
    gpus = tuple(_gpu(item) for item in document.get("gpus", []).items())
    for name, numbers in (
        ("numa_nodes", [node.number for node in nodes]),
        ("nics", [nic.name for nic in nics]),
        ("gpus", [gpu.index for gpu in gpus]),
    ):
        if len(set(numbers)) != len(numbers):
            raise ProtocolError(f"{name}: two of them have the same name or number")
    matrix = _matrix(document.get("matrix", {}))
    _check_names(matrix, nics, "matrix.")
    return Topology(document["host"].text(), nodes, nics, gpus, matrix)


def _nic(item: "_JsonValue") -> Nic:
    kind = item.get("kind", ETHERNET)
    if kind.text() not in KINDS:
        kind.refuse(f"one of {', '.join(KINDS)}")
    name = item["name"].text(minimum=1)
    return Nic(
        name,
        kind.text(),
        item.get("interface", "").text(),
        tuple(each.text(minimum=1) for each in item.get("addresses", []).items()),
        item.get("numa_node", UNKNOWN_NODE).integer(UNKNOWN_NODE, MAX_ENTRIES),
        item.get("speed_gbit_s", 0).number(0, MAX_SPEED_GBIT_S),
        item.get("is_up", True).boolean(),
        item.get("pci_path", "").text(),
    )


def _gpu(item: "_JsonValue") -> Gpu:
    return Gpu(
        item["index"].integer(0, MAX_ENTRIES),
        item.get("name", "").text(),
        item.get("numa_node", UNKNOWN_NODE).integer(UNKNOWN_NODE, MAX_ENTRIES),
        item.get("pci_path", "").text(),
    )


def _matrix(value: "_JsonValue") -> dict[str, RailPreference]:
    matrix = {}
    for location in value.fields():
        entry = value[location]
        if not LOCATION.fullmatch(location):
            entry.refuse("a location: cpu:N or cuda:N, such as cpu:0")
        parts = entry.items()
        if len(parts) != 2:
            entry.refuse('two lists of NICs, [["preferred"], ["available"]]')
        preferred, available = (tuple(each.text(minimum=1) for each in part.items()) for part in parts)
        matrix[location] = RailPreference(preferred, available)
    return matrix


def _check_names(matrix: Matrix, nics: Sequence[Nic], path: str = "") -> None:
    known = [nic.name for nic in nics]
    for location, rails in matrix.items():
        for part, names in zip(("preferred", "available"), rails, strict=True):
            for name in names:
                if name not in known:
                    raise ProtocolError(f"{path}{location}, {part}: there is no NIC {name!r}; there are: {', '.join(known) or 'none'}")


class _JsonValue:
    """A value of a document with its path there, for error messages. Methods raise ProtocolError."""

    __slots__ = ("_path", "_value")

    def __init__(self, value: Any, path: str) -> None:
        self._value = value
        self._path = path

    def refuse(self, expected: str) -> NoReturn:
        shown = json.dumps(self._value)
        raise ProtocolError(f"{self._path or 'the document'}: expected {expected}, not {shown[:40]}{'...' if len(shown) > 40 else ''}")

    def fields(self) -> list[str]:
        if not isinstance(self._value, dict) or len(self._value) > MAX_ENTRIES:
            self.refuse(f"an object of at most {MAX_ENTRIES} fields")
        return list(self._value)

    def __getitem__(self, name: str) -> "_JsonValue":
        if name not in self.fields():
            raise ProtocolError(f"{self._path or 'the document'}: there is no {name!r}")
        return self.get(name, None)

    def get(self, name: str, default: Any) -> "_JsonValue":
        self.fields()
        return _JsonValue(self._value.get(name, default), f"{self._path}.{name}" if self._path else name)

    def items(self) -> list["_JsonValue"]:
        if not isinstance(self._value, list) or len(self._value) > MAX_ENTRIES:
            self.refuse(f"a list of at most {MAX_ENTRIES}")
        return [_JsonValue(item, f"{self._path}[{index}]") for index, item in enumerate(self._value)]

    def text(self, *, minimum: int = 0) -> str:
        value = self._value
        if not isinstance(value, str) or not value.isprintable() or not minimum <= len(value.encode()) <= MAX_TEXT_BYTES:
            self.refuse(f"a printable text of {minimum} to {MAX_TEXT_BYTES} bytes")
        return value

    def integer(self, minimum: int, maximum: int) -> int:
        value = self._value
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, minimum: float, maximum: float) -> float:
        value = self._value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and minimum <= value <= maximum):
            self.refuse(f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def boolean(self) -> bool:
        if not isinstance(self._value, bool):
            self.refuse("true or false")
        return self._value
