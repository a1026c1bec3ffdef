"""What caches of tensors are made of, blocking or not: a client, and the operations of one rank's shard."""

from typing import Final, Generic, TypeVar

from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.operations import TensorOperations
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace

C = TypeVar("C")
"""The kind of client."""

ONE_RANK: Final = Parallel()


class RankCache(Generic[C]):
    """The part that `TensorCache` and `AsyncTensorCache` have in common."""

    def __init__(
        self,
        client: C,
        spec: CacheSpec,
        namespace: Namespace,
        *,
        parallel: Parallel = ONE_RANK,
        rank: int = 0,
        heads_per_value: int = 1,
        layers_per_value: int = 0,
        settings: TensorSettings | None = None,
    ) -> None:
        """
        Args:
            client: stays the caller's, who closes it.
            spec: of the whole model, not of the shard.
            namespace: of the model, with the elements' dtype; without layers and heads, and without the scheme: they are added here.
            parallel: how the engine splits the model; `rank` is this shard's number in it.
            heads_per_value: KV heads in a value. More make fewer and larger values, which no rank of fewer heads can put.
            layers_per_value: layers in a value; 0: all of the model, which no rank of a pipeline can put.
            settings: how much memory lies between tensors and store.

        Raises:
            InvalidArgument: these do not fit one another.
        """
        self._client = client
        self._operations = TensorOperations(
            spec,
            namespace,
            parallel=parallel,
            rank=rank,
            heads_per_value=heads_per_value,
            layers_per_value=layers_per_value,
            settings=settings,
        )

    @property
    def namespace(self) -> Namespace:
        """Namespace under which the store lists all values of this cache, of every rank. `WeightsReporter` reports what it is made of."""
        return self._operations.namespace
