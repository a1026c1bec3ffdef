"""Arguments of cache calls: a sequence, by token ids or by the engine's block hashes, and the pool blocks of its
cache."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

from kvstore.client.core.arguments import check_list
from kvstore.client.tensors.parts import ValuePart
from kvstore.client.tensors.pools import Blocks
from kvstore.kvcache.hashing import TokenIds, as_int32
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_KEY_BYTES

T = TypeVar("T")
Keys: TypeAlias = tuple[bytes, ...]
"""Keys of one block, one per value."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """An engine's own hashes of a sequence's full blocks, in place of token ids: `request.block_hashes` in vLLM.

    Each hash must depend on everything that determines the block's values, except the namespace: all tokens up to its
    end, adapters, images and salts. A key is the id of the values' namespace followed by the hash.
    """

    hashes: Sequence[bytes]


Names: TypeAlias = "TokenIds | BlockHashes"


@dataclass(frozen=True, slots=True)
class PromptSequence:
    """One sequence of a batch call."""

    names: Names
    """Token ids of the whole sequence, because keys depend on all preceding tokens (a partial last block is ignored);
    or block hashes."""
    blocks: Blocks | None = None
    """Block table: pool indexes of the rank's blocks from `first_block` on, in order. None: the whole pool, in
    order."""
    first_block: int = 0
    """First of the rank's blocks of the sequence that `blocks` covers."""
    extras: Mapping[int, bytes] | None = None
    """By block index: further bytes that determine the values of that and all later blocks: a LoRA adapter or a salt at
    block 0, an image's hash at its first block. Not allowed with hashes."""


def check_prompts(prompts: Sequence[PromptSequence]) -> None:
    """Raises InvalidArgument unless it is a sequence of prompts."""
    check_list(prompts, "prompts")
    for prompt in prompts:
        if not isinstance(prompt, PromptSequence):
            raise InvalidArgument(f"a prompt must be a PromptSequence, not a {type(prompt).__name__}")


def keys_of(prompt: PromptSequence, parts: Sequence[ValuePart]) -> list[Keys]:
    """For each full block, a key per value. Raises InvalidArgument for malformed names or extras."""
    return keys_in([part.namespace for part in parts], prompt)


def keys_in(namespaces: Sequence[Namespace], prompt: PromptSequence) -> list[Keys]:
    """For each full block, a key per namespace. Raises as `keys_of`."""
    if not isinstance(prompt.first_block, int) or prompt.first_block < 0:
        raise InvalidArgument(f"first_block is 0 or more, not {prompt.first_block!r}")
    if prompt.extras is not None and not isinstance(prompt.extras, Mapping):
        raise InvalidArgument(f"extras maps a block's index to bytes, a {type(prompt.extras).__name__} does not")
    if isinstance(prompt.names, BlockHashes):
        of_each = [_hashed(namespace, prompt.names, prompt.extras) for namespace in namespaces]
    else:
        tokens = as_int32(prompt.names)  # once: a list of 100,000 takes milliseconds
        of_each = [namespace.block_keys(tokens, prompt.extras) for namespace in namespaces]
    return list(zip(*of_each, strict=True))


def flat(of_blocks: Iterable[Iterable[T]]) -> list[T]:
    """Flatten, in order."""
    return list(chain.from_iterable(of_blocks))


def _hashed(namespace: Namespace, names: BlockHashes, extras: Mapping[int, bytes] | None) -> list[bytes]:
    if extras:
        raise InvalidArgument("extras go with token ids: an engine's hash has them in it")
    seed = namespace.id
    longest = MAX_KEY_BYTES - len(seed)
    for block_hash in names.hashes:
        if not isinstance(block_hash, bytes) or not 1 <= len(block_hash) <= longest:
            raise InvalidArgument(f"the hash of a block is 1 to {longest} bytes, not {block_hash!r:.50}")
    return [seed + block_hash for block_hash in names.hashes]
