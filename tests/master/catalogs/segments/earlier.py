"""Blocks as catalogs of earlier releases kept them, for tests that such catalogs go on."""

import struct


def earlier(tenant: str, key: bytes, generation: int) -> tuple[bytes, bytes]:
    """A block as an earlier release kept it."""
    record = b"r/b" + bytes([len(tenant)]) + tenant.encode() + key
    return record, struct.pack("<BQQQBBH", 1, 100, 7, generation, 2, 1, 2) + b"ns" + b"p" + struct.pack("<2I", 1, 2)
