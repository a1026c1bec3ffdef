"""Prefix cache for `generate`: loads a prompt's cached blocks, and saves a finished cache block by block.

cache = prefixes.load(input_ids)
output = model.generate(input_ids, cache=cache)
prefixes.save(output, cache)
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.transformers.layout import layout_of, namespace_of, placeholder_tokens
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import Retention

STAGING_BYTES: Final = 64 << 20
"""Staging memory, kept between calls: fresh memory would cost more than the copy."""

log = logging.getLogger("kvstore.engines")


class PrefixStore:
    """Prefix cache of one model in the store. A context manager. Not thread-safe. An unreachable store is a miss,
    and logged."""

    def __init__(self, client: Client, model: Any, *, name: str = "", block_tokens: int = 16, settings: JobSettings | None = None) -> None:
        """Run the model on one token to learn its cache's layout.

        Args:
            client: not owned; close it after this object.
            model: a decoder of transformers >= 5 whose layers keep keys and values. Its weights may change between
                calls: see `load`.
            name: model name of the blocks in listings; processes share blocks only under equal names.
            block_tokens: granularity of prefixes.
            settings: deadlines.

        Raises:
            InvalidArgument: the model's layers keep other state, or keys that depend on later tokens; or its weights
                are not loaded.
        """
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgument(f"model is what `from_pretrained` returns, not a {type(model).__name__}")
        self._layout = layout_of(model, block_tokens)
        self._model = model
        self._name = name
        self._placeholders = placeholder_tokens(model)
        self.namespace = self._current_namespace()
        self._jobs = Jobs(client, settings)
        self._staging = torch.empty(max(1, STAGING_BYTES // self._layout.block_bytes), self._layout.block_bytes, dtype=torch.uint8)

    def load(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, retention: Retention | None = None
    ) -> DynamicCache:
        """Return a cache with the leading blocks that the store has for all rows, for `generate` or a forward pass.

        At least one token is left to compute. The cache is empty if no block was found. If weights were changed in
        memory since the last call (a training step, a merged adapter, another active adapter), the store switches to a
        new namespace. So it never loads blocks of other weights.

        `input_ids` is [rows, tokens], without padding. `retention` is a hint for the blocks that are loaded. Raises
        InvalidArgument: padding, which shifts a row's positions, or tokens that stand for images, video or audio.
        """
        rows = self._rows(input_ids, attention_mask)
        tokens = len(rows[0])
        self.namespace = self._current_namespace()
        self._jobs.cancel(None)  # an interrupted call may have left a job that uses the staging memory
        keys = [self.namespace.block_keys(row[: max(0, tokens - 1)]) for row in rows]
        found = min(self._jobs.match_prefix(of_row) for of_row in keys)
        planes = self._layout.empty(len(rows), found * self._layout.block_tokens)
        for row, of_row in enumerate(keys):
            found = min(found, self._load_row(row, of_row[:found], planes, retention))
        if not found:
            return DynamicCache()
        end = found * self._layout.block_tokens
        return self._layout.cache_of([plane[:, :, :end] for plane in planes])

    def save(
        self, token_ids: torch.Tensor, cache: Any, attention_mask: torch.Tensor | None = None, *, retention: Retention | None = None
    ) -> int:
        """Store the blocks that `cache` has of these sequences; return how many the store did not have.

        `token_ids` is [rows, tokens]: the prompts, or the result of `generate` with greedy search or sampling. Results
        of a beam search do not match their cache. Stores nothing if the weights changed since `load`, because the cache
        may mix both. `retention` is a hint for the blocks that are stored. Raises InvalidArgument as `load`, and for a
        cache of other sequences.
        """
        rows = self._rows(token_ids, attention_mask)
        tokens = min(len(rows[0]), cache.get_seq_length())
        self._layout.check(cache, len(rows), tokens)
        if self._current_namespace() != self.namespace:
            log.warning("nothing was saved: the model's weights have changed since the last `load`")
            return 0
        self._jobs.cancel(None)
        return sum(self._save_row(row, self.namespace.block_keys(ids[:tokens]), cache, retention) for row, ids in enumerate(rows))

    def close(self) -> None:
        """Cancel jobs. A second close is a no-op."""
        self._jobs.close()

    def __enter__(self) -> "PrefixStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _current_namespace(self) -> Namespace:
        """Return the namespace of the current weights, from samples: 4 ms for 300 parameters on a CPU, 15 ms for
        1,000."""
        layout = self._layout
        return namespace_of(self._model, layout.dtype, layout.shapes, name=self._name, block_tokens=layout.block_tokens)

    def _rows(self, token_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
        """Return token ids by row. Raises InvalidArgument: see `load`."""
        rows = _rows(token_ids, attention_mask)
        if found := self._placeholders.intersection(itertools.chain.from_iterable(rows)):
            raise InvalidArgument(
                f"token {min(found)} stands for an image, video or audio, which no block's key has: generate from these prompts without "
                "the store"
            )
        return rows

    def _load_row(self, row: int, keys: Sequence[bytes], planes: Sequence[torch.Tensor], retention: Retention | None) -> int:
        """Load a row's leading blocks into `planes`; return how many."""
        loaded = 0
        for begin, end in self._batches(0, len(keys)):
            values = self._staging[: end - begin]
            job = self._ended(self._jobs.load(keys[begin:end], values.numpy(), retention=retention))
            found = next((index for index, size in enumerate(job.results) if size != self._layout.block_bytes), end - begin)
            self._layout.scatter(values[:found], row, begin, planes)
            loaded += found
            if found < end - begin:
                break
        return loaded

    def _save_row(self, row: int, keys: Sequence[bytes], cache: Any, retention: Retention | None) -> int:
        """Store a row's missing blocks; return how many."""
        stored = 0
        for begin, end in self._batches(self._jobs.match_prefix(keys), len(keys)):
            values = self._staging[: end - begin]
            self._layout.gather(cache, row, begin, values)
            parents = [None, *keys][begin:end]
            stores = self._jobs.store(keys[begin:end], values.numpy(), namespace=self.namespace, parents=parents, retention=retention)
            job = self._ended(stores)
            stored += job.results.count(True)
            if job.error is not None:
                break
        return stored

    def _ended(self, job: Job) -> Job:
        """Wait for the job and log its error."""
        job.wait()
        self._jobs.finished()
        if job.error is not None:
            log.warning("the %s of a prefix failed: %s", job.kind.value, job.error)
        return job

    def _batches(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(begin, end, len(self._staging)):
            yield at, min(end, at + len(self._staging))


def _rows(token_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Return token ids by row. Raises InvalidArgument: not [rows, tokens], or padded."""
    for given in (token_ids, attention_mask):
        if given is not None and not isinstance(given, torch.Tensor):
            raise InvalidArgument(
                f"token ids and their mask are tensors, not a {type(given).__name__}: pass `input_ids` of what a tokenizer returns, "
                "or `sequences` of what `generate` returns"
            )
    if token_ids.dim() != 2 or not len(token_ids):
        raise InvalidArgument(f"token ids are [rows, tokens], not {tuple(token_ids.shape)}")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InvalidArgument("these rows are padded, which shifts their positions: pass rows of one length")
    rows: list[list[int]] = token_ids.tolist()
    return rows
