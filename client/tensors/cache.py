"""Blocks of KV cache shared as tensors: a rank puts its shard, and ranks of another sharding read back theirs.

Values of the store hold one block for a group of layers and a group of KV heads of the model (`client/tensors/parts.py`), encoded by the
spec's scheme (`kvcache/codecs/tensor_value.py`). Everything goes through a Client: this file adds no protocol and no policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvstore.client.sync import Client
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.operations import TensorOperations
from kvstore.client.tensors.parts import ValueShape
from kvstore.client.tensors.pools import Blocks
from kvstore.client.tensors.prompts import Names, Prompt
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace

ONE_RANK: Final = Parallel()
WHOLE_LAYERS: Final = ValueShape()


class TensorCache:
    """The shard of one rank, block by block. Threads may share it: each call has staging memory of its own, which is kept for the next.

    Blocks lie in a tensor, or in an `EnginePool`: the tensors of an engine, as a `CacheLayout` says. A tensor of blocks is
    `[blocks, layers, kv, heads, block_tokens, head_dim]` of the spec's dtype: the rank's layers and heads; kv is 2,
    K and V (1 with MLA). It may be a torch tensor on any device or, if the scheme is `none`, a numpy array (which has no bfloat16:
    give uint16 there), of any strides: an engine that keeps `[tokens, heads]` gives a permuted view of its pool.
    Where the blocks of a sequence lie scattered in a pool, `blocks` says which they are, in order; without it they are all of it.

    With context parallelism the blocks of a rank are every cp-th of the sequence, from its own first one on.

    Engines share blocks when their namespaces, specs (scheme included) and `values` are equal; their
    parallelism and the layouts of their pools may differ. A rank that puts must hold all the heads and layers of a value; one that reads
    may need only a part.

    `layers` of a call (None: all of the rank's) are some of the model's, in whole groups of `values.layers`: what is computed is put,
    and what is needed first is read, while an engine is at the others.
    """

    def __init__(
        self,
        client: Client,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        values: ValueShape = WHOLE_LAYERS,
        settings: TensorSettings | None = None,
    ) -> None:
        """
        Args:
            client: stays the caller's, who closes it.
            spec: of the whole model, not of the shard.
            namespace: of the model, with the elements' dtype; without layers and heads, and without the scheme: they are added here.
            parallel: how the engine splits the model; `rank` is this shard's number in it.
            values: heads and layers in a value of the store.
            settings: how much memory lies between tensors and store.

        Raises:
            InvalidArgument: these do not fit one another.
        """
        self._operations = TensorOperations(client, spec, namespace, parallel=parallel, rank=rank, values=values, settings=settings)

    @property
    def namespace(self) -> Namespace:
        """Namespace under which the store lists all values of this cache, of every rank. `WeightsReporter` reports what it is made of."""
        return self._operations.namespace

    def match_prefix(
        self,
        token_ids: Names,
        *,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """How many of the rank's blocks, from the first on without a gap, can be read now: every value that it needs is there.

        Another rank may find fewer. Asking keeps no block alive. One request, which raises as `Client` says. `token_ids` and `extras` as
        in `put_tensor`.
        """
        return self.match_batch([Prompt(token_ids, extras=extras)], layers=layers, deadline_s=deadline_s)[0]

    def put_tensor(
        self,
        token_ids: Names,
        tensor: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Store the rank's blocks from `first_block` of the sequence on, which are in `tensor`; how many values were not there already.

        `token_ids` is the sequence from its beginning on, for a block's key depends on all before it; a partial last block is ignored.
        `BlockHashes`, the engine's own names of the blocks, serve in their place. `extras`: what else changes the values from a block
        of the sequence on (see `Prompt`). `tensor` (see the class) must not change meanwhile. Of ranks with the same KV heads the first
        puts, and the others return 0 at once.

        Blocks go out in order, in batches of `staging_bytes`. `deadline_s` is the time for all of it; None gives each batch the client's.

        Raises:
            InvalidArgument: the rank holds no whole values (the message says what to set), or an argument does not fit the class.
            KVStoreError: as `Client.put_batch`; the first batches may be stored.
        """
        return self.put_batch([Prompt(token_ids, blocks, first_block, extras)], tensor, layers=layers, deadline_s=deadline_s)[0]

    def get_tensor(
        self,
        token_ids: Names,
        out: Any,
        *,
        blocks: Blocks | None = None,
        first_block: int = 0,
        extras: Mapping[int, bytes] | None = None,
        layers: range | None = None,
        deadline_s: float | None = None,
    ) -> int:
        """Read the rank's blocks from `first_block` of the sequence on into `out`; how many there were, from the first on without a gap.

        The rest of `out` (see the class) is as before: a block that misses any value the rank needs is a miss, never an error. The other
        arguments as in `put_tensor`. Batches after the first with a miss are not asked for.

        Raises:
            InvalidArgument: an argument does not fit the class, or `out` cannot be written.
            ProtocolError: under these keys lies something else than this cache's values.
            KVStoreError: as `Client.get_batch_into`; the content of the blocks is undefined.
        """
        return self.get_batch([Prompt(token_ids, blocks, first_block, extras)], out, layers=layers, deadline_s=deadline_s)[0]

    # --- many sequences ---

    def match_batch(self, prompts: Sequence[Prompt], *, layers: range | None = None, deadline_s: float | None = None) -> list[int]:
        """`match_prefix` of each prompt, from its `first_block` on, in one message."""
        return self._operations.match(prompts, layers, deadline_s)

    def put_batch(
        self, prompts: Sequence[Prompt], tensor: Any, *, layers: range | None = None, deadline_s: float | None = None
    ) -> list[int]:
        """`put_tensor` of each prompt's blocks, all in one pool, in one message for as many as the staging memory holds.

        A block that several of them begin with is put once, from the first's place, and counted for that one.
        """
        return self._operations.put(prompts, tensor, layers, deadline_s)

    def get_batch(self, prompts: Sequence[Prompt], out: Any, *, layers: range | None = None, deadline_s: float | None = None) -> list[int]:
        """`get_tensor` of each prompt's blocks, which must differ, as `put_batch`. A miss ends its own prompt, and no other."""
        return self._operations.get(prompts, out, layers, deadline_s)
