"""The table of weight versions as the control plane tells it (kvstore.v1)."""

from typing import Final

from kvstore.master.directory.weights import Retired, WeightsTable, is_private
from kvstore.protocol import control_pb2 as pb

PART_ROWS: Final = 256
"""Rows of a message: 2 MiB where each is as long as it may be."""


def retired_message(retired: Retired) -> pb.Retired:
    tenants = [pb.RetiredOfTenant(tenant=tenant, namespaces=found) for tenant, found in retired.namespaces.items()]
    return pb.Retired(version=retired.version, tenants=tenants)


def table_messages(table: WeightsTable, tenant: str | None, now_ns: int) -> list[pb.WeightsTable]:
    """Versions and namespaces of a tenant, or of all (None), in messages that gRPC takes."""
    versions = [
        pb.WeightsVersion(
            tenant=key.weights.tenant,
            base=key.weights.base,
            version=key.version,
            adapter=key.weights.adapter,
            salt=key.weights.salt,
            users=row.last_users,
            is_used=bool(row.users),
            is_retired=table.is_retired(key),
            used_age_s=table.used_age_s(row, now_ns),
            namespaces=len(row.namespaces),
            is_durable=not is_private(key.version),
        )
        for key, row in table.of(tenant)
    ]
    namespaces = [
        pb.KnownNamespace(tenant=owner, form=pb.NamespaceForm(id=id, form=one.form))
        for (owner, id), one in table.namespaces.items()
        if tenant is None or owner == tenant
    ]
    return [
        *(pb.WeightsTable(versions=versions[at : at + PART_ROWS]) for at in range(0, len(versions), PART_ROWS)),
        *(pb.WeightsTable(namespaces=namespaces[at : at + PART_ROWS]) for at in range(0, len(namespaces), PART_ROWS)),
    ]
