"""Reports of inference instances, for tests of the scheduler: each field as given, the rest plausible."""

from typing import Any

from kvstore.protocol import control_pb2 as pb


def prefill(name: str = "p", **fields: Any) -> pb.ReportRequest:
    plausible: dict[str, Any] = {"name": name, "role": pb.ROLE_PREFILL, "address": f"http://{name}"}
    return pb.ReportRequest(**(plausible | fields))


def decode(name: str = "d", **fields: Any) -> pb.ReportRequest:
    return prefill(name, **({"role": pb.ROLE_DECODE} | fields))


def both(name: str = "b", **fields: Any) -> pb.ReportRequest:
    return prefill(name, **({"role": pb.ROLE_BOTH} | fields))
