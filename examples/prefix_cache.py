"""Time to the first token with and without a prefix cache, and from each tier of it: a small real Llama behind the store.

Command: python examples/prefix_cache.py [--quick] [--plots FOLDER].

Documents of several lengths are prefilled once, and their KV cache is put into a store on this machine. The program starts the store, a
master and a node with all three tiers. A question about each document is then computed without the cache, and with the document's blocks
read from NVMe, from DRAM and from HBM. With the cache, only the question is computed. The HBM tier is a torch arena, here on the CPU: it
shows the path of blocks, not the speed of a GPU's memory.

The model computes in float32 with random weights. A kernel may add in another order for another shape of a matrix, so logits may differ in
their last bits. The program checks that they differ by at most TOLERANCE of the largest, and that the next token is the same.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from kvstore.cli.tools.cluster import LONG_DEMOTION_WAIT_S, ClusterPlan, LocalCluster
from kvstore.client import Client
from kvstore.client.tensors.cache import TensorCache
from kvstore.client.tensors.parts import ValueShape
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.kvcache.namespace import Namespace
from kvstore.lab.plots import Series, Weight, line_chart, save
from kvstore.protocol.settings import format_size

try:
    import torch
    from disaggregation.llama import Tensor, configuration, seeded
    from transformers import DynamicCache, LlamaForCausalLM
except ImportError:
    raise SystemExit("prefix_cache.py: error: torch and transformers are missing: pip install '.[examples]'") from None

TOLERANCE: Final = 1e-4
QUESTION_TOKENS: Final = 16
LENGTHS: Final = (256, 512, 1024, 2048, 4096)
QUICK_LENGTHS: Final = (128, 512)
SIZES: Final = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
QUICK_SIZES: Final = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
TIERS: Final = {"nvme": "from NVMe", "dram": "from DRAM", "hbm": "from HBM"}
MAX_READS: Final = 8
"""A block is copied up on its second read; a copy that had to wait for room is made on the next."""


@dataclass(slots=True)
class Document:
    """A long prompt, asked one question. Times are in seconds, from the prompt to its first token."""

    tokens: Tensor
    question: Tensor
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the question's last token, computed without the cache."""
    ttft_s: dict[str, float] = field(default_factory=dict)
    """By the tier that all blocks came from; "none" without the cache."""
    error: float = 0.0
    """The largest difference of a logit with the cache, as a share of the largest logit."""
    blind_error: float = 0.0
    """The same for the question alone: what a wrong cache would do."""


class Engine:
    """The model and its share of the store."""

    def __init__(self, model: LlamaForCausalLM, spec: CacheSpec, client: Client) -> None:
        self.spec = spec
        self._model = model
        self._client = client
        namespace = Namespace(model="seeded-llama", dtype=spec.dtype, block_tokens=spec.block_tokens)
        self._cache = TensorCache(client, spec, namespace, values=ValueShape(heads=spec.kv_heads))

    def prefill_all(self, document: Document) -> None:
        """Compute the document and the question, and put what was computed of the document."""
        started = time.perf_counter()
        logits, cache = self._forward(torch.cat([document.tokens, document.question]), DynamicCache())
        document.logits = logits
        document.ttft_s["none"] = time.perf_counter() - started
        document.blind_error = difference(self._forward(document.question, DynamicCache())[0], logits)
        kv = torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers])
        self._cache.put_tensor(document.tokens, self._blocks(kv[..., : len(document.tokens), :]))

    def prefill_question(self, document: Document) -> str:
        """Read the document's blocks and compute the question alone; the tier that all of them came from, "" if from several."""
        before = self._client.stats().hits_by_tier
        started = time.perf_counter()
        tokens = self._cache.match_prefix(document.tokens) * self.spec.block_tokens
        kv = torch.empty(self.spec.layers, 2, self.spec.kv_heads, tokens, self.spec.head_dim)
        if self._cache.get_tensor(document.tokens, self._blocks(kv)) * self.spec.block_tokens != len(document.tokens):
            raise SystemExit("the store has lost blocks of a document")
        logits, _ = self._forward(document.question, DynamicCache([(keys[None], values[None]) for keys, values in kv]))
        seconds = time.perf_counter() - started
        document.error = max(document.error, difference(logits, document.logits))
        if logits.argmax() != document.logits.argmax() or document.error > TOLERANCE:
            raise SystemExit(f"NOT SO: logits with the cache differ by {document.error:.1e} of the largest")
        after = self._client.stats().hits_by_tier
        read = [tier for tier in TIERS if after[tier] > before[tier]]
        if len(read) != 1:
            return ""
        document.ttft_s.setdefault(read[0], seconds)
        return read[0]

    def _forward(self, tokens: Tensor, cache: DynamicCache) -> tuple[Tensor, DynamicCache]:
        with torch.inference_mode():
            output = self._model(tokens[None], cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits[0, -1], output.cache

    def _blocks(self, kv: Tensor) -> Tensor:
        """[layers, kv, heads, tokens, head_dim] as [blocks, layers, kv, heads, block_tokens, head_dim]: a view."""
        return kv.unflatten(3, (-1, self.spec.block_tokens)).permute(3, 0, 1, 2, 4, 5)


def difference(logits: Tensor, expected: Tensor) -> float:
    """The largest of a logit, as a share of the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and shorter documents, in a few seconds")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw ttft.svg there (needs the extra plots)")
    options = parser.parse_args()
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    model = seeded(configuration(max_position_embeddings=8192, **(QUICK_SIZES if options.quick else SIZES)), seed=1)
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(2)
    documents = [
        Document(torch.randint(256, (length,), generator=generator), torch.randint(256, (QUESTION_TOKENS,), generator=generator))
        for length in lengths
    ]
    spec = CacheSpec.from_config(model.config.to_dict(), dtype="float32")
    tier_bytes = 2 * sum(lengths) // spec.block_tokens * spec.block_bytes
    weights = sum(weight.numel() for weight in model.parameters())
    print(f"A Llama of {weights / 1e6:.1f} M weights; a token has {spec.bytes_per_token:,.0f} bytes of KV cache.")
    print(f"A node with {format_size(tier_bytes)} each of HBM (a torch arena on the CPU) and of DRAM, and NVMe in a temporary folder.")
    plan = ClusterPlan(
        dram=str(tier_bytes),
        hbm=f"cpu:{tier_bytes}",
        nvme=str(8 * tier_bytes),
        policy="lru",
        demotion_wait_s=LONG_DEMOTION_WAIT_S,
        is_private=True,
    )
    with LocalCluster(plan, on_log=lambda name, line: None) as cluster:
        cluster.wait_ready()
        with Client(cluster.address) as client:
            measure(Engine(model, spec, client), client, documents, tier_bytes)
            print("Blocks read:", ", ".join(f"{count:,} from {tier}" for tier, count in client.stats().hits_by_tier.items()))
    report(documents)
    if options.plots is not None:
        draw(documents, options.plots)


def measure(engine: Engine, client: Client, documents: list[Document], tier_bytes: int) -> None:
    """Every document from every tier. Raises SystemExit if one cannot be brought to a tier."""
    for document in [documents[0], *documents]:  # the first one twice: what is slow once is not measured
        engine.prefill_all(document)
    push_out(client, tier_bytes, engine.spec.block_bytes)
    read_from(engine, documents, "nvme")
    read_from(engine, documents, "dram")
    for document in documents:  # the second read from DRAM: copied to HBM too
        engine.prefill_question(document)
    push_out(client, tier_bytes, engine.spec.block_bytes)
    read_from(engine, documents, "hbm")


def push_out(client: Client, tier_bytes: int, value_bytes: int) -> None:
    """Evict all older blocks from DRAM by as many other blocks as it holds, and delete these again."""
    keys = [b"others %d" % number for number in range(tier_bytes // value_bytes)]
    client.put_batch(keys, [bytes(value_bytes)] * len(keys), deadline_s=60.0)
    client.remove(keys)


def read_from(engine: Engine, documents: list[Document], tier: str) -> None:
    for document in documents:
        if not any(engine.prefill_question(document) == tier for _ in range(MAX_READS)):
            raise SystemExit(f"the blocks of a document could not be brought to {tier}")


def report(documents: list[Document]) -> None:
    table = Table(title="Time to first token, ms")
    for name in ("tokens", "no cache", *TIERS.values(), "saved", "logits differ by"):
        table.add_column(name, justify="right")
    for document in documents:
        cold_s, *warm_s = (document.ttft_s[tier] for tier in ("none", *TIERS))
        saved, differs = 1 - max(warm_s) / cold_s, f"{document.error:.1e}" if document.error else "0"
        times = (f"{seconds * 1000:,.1f}" for seconds in (cold_s, *warm_s))
        table.add_row(f"{len(document.tokens) + QUESTION_TOKENS:,}", *times, f"{saved:.0%}", differs)
    Console(width=100).print(table)
    blind = min(document.blind_error for document in documents)
    print("Saved: by the slowest tier. Logits differ: at the most, with any tier, as a share of the largest logit.")
    print(f"Checked: with the cache each first token is the same, and logits differ by at most {TOLERANCE:g} of the largest")
    print(f"(a question without its document: by {blind:.2g} or more).")


def draw(documents: list[Document], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(document.tokens) + QUESTION_TOKENS for document in documents]
    lines = [
        Series(name, lengths, [document.ttft_s[tier] * 1000 for document in documents], Weight.MAIN if tier == "none" else Weight.NORMAL)
        for tier, name in ({"none": "no cache"} | TIERS).items()
    ]
    title = "Time to first token with and without a cached prefix"
    save(line_chart(lines, title=title, x_label="tokens of the prompt", y_label="ms", log_x=True, log_y=True), folder / "ttft.svg")


if __name__ == "__main__":
    main()
