"""What a call is about: a sequence, by its tokens or by its engine's block hashes, and the blocks of a pool in which its cache lies."""

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
"""Of one block, one a value."""


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """An engine's own names of a sequence's full blocks, from its first on, in place of token ids: `request.block_hashes` in vLLM.

    Each must depend on all that its block's values depend on but for the namespace: on every token up to its end, and on adapters,
    images and salts. A key is the id of the values' namespace and the hash after it.
    """

    hashes: Sequence[bytes]


Names: TypeAlias = "TokenIds | BlockHashes"


@dataclass(frozen=True, slots=True)
class PromptSequence:
    """One sequence of a call for many."""

    names: Names
    """Its token ids from its beginning on, for a block's key depends on all before it (a partial last block is ignored); or hashes."""
    blocks: Blocks | None = None
    """Its block table: where in the pool the rank's blocks from `first_block` on lie, in order. None: all of the pool, in order."""
    first_block: int = 0
    """Of the rank's blocks of the sequence, where `blocks` begins."""
    extras: Mapping[int, bytes] | None = None
    """By the index of a block of the sequence: bytes that change its values, and those of all after it, beside its tokens: a LoRA adapter
    or a salt at block 0, the hash of an image at its first block. Not with hashes."""


def check_prompts(prompts: Sequence[PromptSequence]) -> None:
    """Raises InvalidArgument unless it is a list of prompts."""
    check_list(prompts, "prompts")
    for prompt in prompts:
        if not isinstance(prompt, PromptSequence):
            raise InvalidArgument(f"a prompt is a Prompt, not a {type(prompt).__name__}")


def keys_of(prompt: PromptSequence, parts: Sequence[ValuePart]) -> list[Keys]:
    """For each full block of the sequence a key for each of the values. Raises InvalidArgument for names, or extras, that are none."""
    return keys_in([part.namespace for part in parts], prompt)


def keys_in(namespaces: Sequence[Namespace], prompt: PromptSequence) -> list[Keys]:
    """For each full block of the sequence a key in each of the namespaces. Raises as `keys_of`."""
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
    """Block by block, as a batch is sent."""
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
