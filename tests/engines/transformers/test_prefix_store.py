"""`generate` with prefixes from the store gives the same tokens as without.

Logits are equal to the bit to those after the same prefix was computed locally.
"""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore.client import Client
from kvstore.client.jobs.config import JobSettings
from kvstore.engines.transformers import prefix_store
from kvstore.engines.transformers.prefix_store import PrefixStore
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.retention import Retention
from tests.client.embedded import embedded
from tests.client.processes import cluster
from tests.engines.put_client import PutClient
from tests.engines.transformers.tiny import NEW_TOKENS, PROMPT, AdaptedLinear, gemma, generate, llama, llava, mamba, mistral

INPUT_IDS = torch.tensor([PROMPT])
PATIENT = JobSettings(lookup_deadline_s=60, load_deadline_s=60, store_deadline_s=60)
LOADED = 64
"""Tokens of the prompt's 70 that are in full blocks of 16."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with embedded() as cluster:
        yield cluster.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, deadline_s=60) as client:
        yield client
        client.remove_matching(pattern="*")


def prefixes_of(client: Client, model: Any, **arguments: Any) -> PrefixStore:
    return PrefixStore(client, model, settings=PATIENT, **arguments)


def begun(model: Any, input_ids: torch.Tensor, tokens: int) -> DynamicCache:
    """A cache of the first tokens, computed here."""
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=input_ids[:, :tokens], cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("make", [llama, mistral, gemma])
def test_loaded_prefix_gives_the_same_tokens_and_logits(client: Client, make: Any) -> None:
    model = make()
    plain, plain_logits = generate(model, INPUT_IDS, None)
    same, same_logits = generate(model, INPUT_IDS, begun(model, INPUT_IDS, LOADED))
    with prefixes_of(client, model) as prefixes:
        cold = prefixes.load(INPUT_IDS)
        assert cold.get_seq_length() == 0
        cold_tokens, cold_logits = generate(model, INPUT_IDS, cold)
        assert prefixes.save(INPUT_IDS, cold) == LOADED // 16
    with prefixes_of(client, model) as prefixes:
        warm = prefixes.load(INPUT_IDS)
        assert warm.get_seq_length() == LOADED
        warm_tokens, warm_logits = generate(model, INPUT_IDS, warm)
    assert cold_tokens.equal(plain)
    assert torch.allclose(cold_logits, plain_logits, rtol=0, atol=1e-3)
    assert warm_tokens.equal(plain)
    assert torch.allclose(warm_logits, plain_logits, rtol=0, atol=1e-3)
    assert warm_tokens.equal(same)
    assert warm_logits.equal(same_logits)


@pytest.mark.slow
def test_another_process_finds_what_this_one_stored(client: Client, address: str) -> None:
    model = llama()
    with prefixes_of(client, model) as prefixes:
        tokens, _ = generate(model, INPUT_IDS, cache := prefixes.load(INPUT_IDS))
        prefixes.save(INPUT_IDS, cache)
    _, logits = generate(model, INPUT_IDS, begun(model, INPUT_IDS, LOADED))
    command = [sys.executable, "-m", "tests.engines.transformers.tiny", address]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == [LOADED, tokens.tolist(), logits.tolist()]


def test_generated_tokens_are_stored_for_the_next_turn(client: Client) -> None:
    model = llama()
    with prefixes_of(client, model) as prefixes:
        tokens, _ = generate(model, INPUT_IDS, cache := prefixes.load(INPUT_IDS))
        assert cache.get_seq_length() == len(PROMPT) + NEW_TOKENS - 1
        assert prefixes.save(INPUT_IDS, cache) == 4
        assert prefixes.save(tokens, cache) == 1
        assert prefixes.save(tokens, cache) == 0
        longer = torch.cat([tokens, INPUT_IDS], dim=1)
        assert prefixes.load(longer).get_seq_length() == 80
        assert prefixes.load(torch.cat([tokens[:, :40], INPUT_IDS], dim=1)).get_seq_length() == 32


def test_weights_changed_in_memory_share_nothing(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A training step between `load` and `save` stores nothing; after it the old blocks are not found, after undoing it they are."""
    model = llama()
    weight = model.model.layers[0].self_attn.k_proj.weight
    original = weight.detach().clone()
    with prefixes_of(client, model) as prefixes:
        generate(model, INPUT_IDS, cache := prefixes.load(INPUT_IDS))
        prefixes.save(INPUT_IDS, cache)
        generate(model, INPUT_IDS, stale := prefixes.load(INPUT_IDS))
        weight.data += 0.5
        assert prefixes.save(INPUT_IDS, stale) == 0
        assert "weights have changed since the last `load`" in caplog.text
        cold = prefixes.load(INPUT_IDS)
        assert cold.get_seq_length() == 0
        plain, _ = generate(model, INPUT_IDS, None)
        assert generate(model, INPUT_IDS, cold)[0].equal(plain)
        weight.data.copy_(original)
        assert prefixes.load(INPUT_IDS).get_seq_length() == LOADED


def test_prefix_store_tells_active_adapters_apart(client: Client) -> None:
    """PEFT's `set_adapter`, `disable_adapter` and `set_scale` change no parameter."""
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapted = AdaptedLinear(attention.k_proj)
    with prefixes_of(client, model) as prefixes:
        prefixes.save(INPUT_IDS, begun(model, INPUT_IDS, 70))
        adapted.active_adapter = "b"
        assert prefixes.load(INPUT_IDS).get_seq_length() == 0
        adapted.active_adapter, adapted.is_disabled = "a", True
        assert prefixes.load(INPUT_IDS).get_seq_length() == 0
        adapted.is_disabled, adapted.scaling["a"] = False, 0.5
        assert prefixes.load(INPUT_IDS).get_seq_length() == 0
        adapted.scaling["a"] = 1.0
        assert prefixes.load(INPUT_IDS).get_seq_length() == LOADED


def test_prefix_store_refuses_images(client: Client) -> None:
    """Prompts with different images have equal token ids."""
    model = llava()
    with prefixes_of(client, model) as prefixes:
        assert prefixes.save(INPUT_IDS, begun(model, INPUT_IDS, 70)) == LOADED // 16
        assert prefixes.load(INPUT_IDS).get_seq_length() == LOADED
        with pytest.raises(InvalidArgument, match="token 95 stands for an image"):
            prefixes.load(torch.cat([torch.full((1, 4), 95), INPUT_IDS], dim=1))


def test_one_token_is_left_to_compute(client: Client) -> None:
    model = llama()
    with prefixes_of(client, model) as prefixes:
        prefixes.save(INPUT_IDS, begun(model, INPUT_IDS, 70))
        assert [prefixes.load(INPUT_IDS[:, :tokens]).get_seq_length() for tokens in (1, 15, 16, 17, 64, 65)] == [0, 0, 0, 16, 48, 64]


def test_rows_are_loaded_as_far_as_all_of_them_exist(client: Client) -> None:
    model = llama()
    both = torch.tensor([PROMPT, PROMPT[::-1]])
    with prefixes_of(client, model, block_tokens=4) as prefixes:
        assert prefixes.save(both, begun(model, both, 70)) == 34
        tokens, logits = generate(model, both, prefixes.load(both))
        same, same_logits = generate(model, both, begun(model, both, 68))
        assert tokens.equal(same)
        assert logits.equal(same_logits)
        client.remove([prefixes.namespace.block_keys(PROMPT[::-1])[5]])
        assert prefixes.load(both).get_seq_length() == 20


def test_long_prefixes_go_in_batches_of_memory_that_is_kept(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(prefix_store, "STAGING_BYTES", 3 * 4 * 3 * 2 * 2 * 8 * 4)  # 3 blocks of 4 tokens
    with prefixes_of(client, model, block_tokens=4) as prefixes:
        cache = begun(model, INPUT_IDS, 70)
        assert prefixes.save(INPUT_IDS, cache) == 17
        found = prefixes.load(INPUT_IDS)
        assert all(
            there.keys.equal(here.keys[:, :, :68]) and there.values.equal(here.values[:, :, :68])
            for there, here in zip(found.layers, cache.layers, strict=True)
        )
        client.remove([prefixes.namespace.block_keys(PROMPT)[7]])
        monkeypatch.setattr(prefixes._jobs, "match_prefix", len)  # it leaves between the lookup and the load
        assert prefixes.load(INPUT_IDS).get_seq_length() == 28


def test_models_that_differ_share_nothing(client: Client) -> None:
    model = llama()
    with prefixes_of(client, model) as prefixes:
        prefixes.save(INPUT_IDS, begun(model, INPUT_IDS, 70))
    for other, name, found in ((llama(seed=1), "", 0), (model.to(torch.bfloat16), "", 0), (llama(), "other", 0), (llama(), "", LOADED)):
        with prefixes_of(client, other, name=name) as prefixes:
            assert prefixes.load(INPUT_IDS).get_seq_length() == found


def test_what_cannot_be_right_is_refused(client: Client) -> None:
    model = llama()
    with pytest.raises(InvalidArgument, match="LinearAttentionLayer"):
        PrefixStore(client, mamba())
    with pytest.raises(InvalidArgument, match="not loaded"):
        PrefixStore(client, llama().to("meta"))
    with pytest.raises(InvalidArgument, match="not a str"):
        PrefixStore(client, "Qwen/Qwen3-0.6B")
    with prefixes_of(client, model) as prefixes:
        for ids, mask, wrong in (
            (INPUT_IDS[0], None, "rows, tokens"),
            ({"input_ids": INPUT_IDS}, None, "not a dict: pass `input_ids`"),
            (INPUT_IDS, [[1] * 70], "not a list"),
            (INPUT_IDS[:0], None, "rows, tokens"),
            (INPUT_IDS, torch.tensor([[0] + [1] * 69]), "padded"),
        ):
            with pytest.raises(InvalidArgument, match=wrong):
                prefixes.load(ids, mask)
        two = torch.cat([INPUT_IDS, INPUT_IDS])
        for cache in (begun(model, two, 70), begun(llama(head_dim=16), INPUT_IDS, 70), begun(llama(num_hidden_layers=2), INPUT_IDS, 70)):
            with pytest.raises(InvalidArgument, match="of the cache has shape"):
                prefixes.save(INPUT_IDS, cache)


def test_a_store_that_is_away_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    with cluster(tmp_path) as running, Client(running.address) as client:
        running.start_node("--dram", "16MiB")
        with prefixes_of(client, model) as prefixes, caplog.at_level(logging.WARNING, "kvstore.engines"):
            prefixes.save(INPUT_IDS[:, :32], begun(model, INPUT_IDS, 70))
            running.master.stop(signal.SIGKILL)
            running.nodes[0].stop(signal.SIGKILL)
            cache = prefixes.load(INPUT_IDS)
            tokens, _ = generate(model, INPUT_IDS, cache)
            assert tokens.equal(generate(model, INPUT_IDS, None)[0])
            assert prefixes.save(tokens, cache) == 0
            assert "the store of a prefix failed" in caplog.text
            prefixes.close()


def test_hints_of_loads_and_saves_reach_the_store(address: str) -> None:
    hint = Retention(70, ttl_s=60, session="chat")
    model = llama()
    with closing(PutClient(address)) as client, prefixes_of(client, model, name="hinted") as prefixes:
        cache = begun(model, INPUT_IDS, LOADED)
        assert prefixes.save(INPUT_IDS[:, :LOADED], cache, retention=hint) == LOADED // 16
        assert prefixes.load(INPUT_IDS, retention=hint).get_seq_length() == LOADED
        assert client.hints == [hint, hint]
        client.remove_matching(pattern="*")
