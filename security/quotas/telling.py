"""Quotas as the control plane has them (kvstore.v1.Quotas): what masters tell nodes and operators."""

from kvstore.protocol import control_pb2 as pb
from kvstore.security.quotas.quota import NAMES, Quota, Quotas


def as_message(quotas: Quotas, version: int) -> pb.Quotas:
    """`version` is that of the quotas, which is not made again for each message."""
    tenants = {name: _as_message(quota) for name, quota in quotas.tenants.items()}
    return pb.Quotas(version=version, default=_as_message(quotas.default), tenants=tenants)


def from_message(message: pb.Quotas) -> Quotas:
    """Limits of a later release that this one does not know are not held to."""
    return Quotas(_from_message(message.default), {name: _from_message(quota) for name, quota in message.tenants.items()})


def _as_message(quota: Quota) -> pb.TenantQuota:
    return pb.TenantQuota(**quota.limits())


def _from_message(message: pb.TenantQuota) -> Quota:
    return Quota(**{name: getattr(message, name) for name in NAMES if message.HasField(name)})
