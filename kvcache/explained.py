"""Explains a namespace's fields, and why two namespaces differ. Pure functions.

Namespaces come from engines' reports, which have a digest instead of the salt; it is never shown.
"""

from typing import Final, NamedTuple

from kvstore.kvcache.namespace import Namespace, Pair

ALL: Final = "all"
NONE: Final = "none"
SET: Final = "set"
HIDDEN: Final = frozenset({"salt"})
"""Fields of which only presence and inequality are shown."""
_ADVICE: Final = {
    "model": "Engines of different models never share; give both the same name if it is one model.",
    "weights": "Start both from equal files, or give both the same `revision`.",
    "version": "Bring both to the same named version of the weights; private versions are one engine's own.",
    "adapter": "Requests with different LoRAs never share.",
    "dtype": "Set the same element type (`kv_cache_dtype`) on both.",
    "block_tokens": "Set the same block size on both.",
    "layers": "Each pipeline stage or group of layers has namespaces of its own: compare those of the same layers.",
    "heads": "Each tensor-parallel rank has a namespace of its own: compare the same rank of engines of one TP, or set `share_tp`.",
    "position": "Set the same position encoding and scaling on both.",
    "tenant": "Set the same tenant on both.",
    "salt": "Set the same salt on both, or none.",
    "hash": "Set the same hash on both.",
}
_EXTRA_ADVICE: Final = "Set it alike on both: it changes the blocks' bytes."


class Field(NamedTuple):
    """Field of a namespace's identity, with its value as text."""

    name: str
    text: str


def fields(namespace: Namespace) -> list[Field]:
    """Return all fields of the identity. `weights` is the revision up to its @, `version` the rest."""
    base, _at, version = namespace.revision.partition("@")
    return [
        Field("model", namespace.model),
        Field("weights", base or NONE),
        Field("version", version or "that of the files"),
        Field("adapter", namespace.adapter or NONE),
        Field("dtype", namespace.dtype),
        Field("block_tokens", str(namespace.block_tokens)),
        Field("layers", _range(namespace.layers)),
        Field("heads", f"rank {namespace.heads[0]} of {namespace.heads[1]}" if namespace.heads is not None else ALL),
        Field("position", namespace.position or NONE),
        *(Field(f"extra.{name}", text or '""') for name, text in namespace.extra.items()),
        Field("tenant", namespace.tenant or NONE),
        Field("salt", SET if namespace.salt else NONE),
        Field("hash", namespace.hash),
    ]


def layout(namespace: Namespace) -> str:
    """Return element type and shape of the blocks in one line, such as `bfloat16, 16 tokens a block, layers 0 to 15,
    rank 0 of 2`."""
    parts = [namespace.dtype, f"{namespace.block_tokens} token{'' if namespace.block_tokens == 1 else 's'} a block"]
    if namespace.adapter:
        parts.append(f"adapter {namespace.adapter}")
    if namespace.layers is not None:
        parts.append(f"layers {_range(namespace.layers)}")
    if namespace.heads is not None:
        parts.append(f"rank {namespace.heads[0]} of {namespace.heads[1]}")
    return ", ".join(parts)


def differences(one: Namespace, other: Namespace, names: tuple[str, str]) -> list[str]:
    """Return a sentence for each field that differs, with its remedy; none for equal namespaces. `names` are theirs."""
    mine, theirs = dict(fields(one)), dict(fields(other))
    found = []
    for name in dict.fromkeys((*mine, *theirs)):
        ours, others = mine.get(name, "not set"), theirs.get(name, "not set")
        is_secret_other = name in HIDDEN and ours == others == SET and one.salt != other.salt
        if ours != others or is_secret_other:
            what = "differs" if is_secret_other else f"is {ours} in {names[0]} and {others} in {names[1]}"
            found.append(f"{name} {what}. {_ADVICE.get(name, _EXTRA_ADVICE)}")
    return found


def _range(pair: Pair | None) -> str:
    return f"{pair[0]} to {pair[1] - 1}" if pair is not None else ALL
