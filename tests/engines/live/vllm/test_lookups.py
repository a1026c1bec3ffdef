"""Requests that wait in vLLM's queue, and an engine whose store cannot be reached: what the store is asked, and what an operator sees."""

from pathlib import Path

from kvstore.testing.transfer.awaited import eventually
from tests.client.processes import Cluster, cluster
from tests.engines.live.vllm.engines import BLOCK_TOKENS, PATIENT, Engine, check_all, expected, prompt, start_node, transfer_to
from tests.ports import free_ports

WAITING = 6
BLOCKS = 8
MADE_TOKENS = 64
FILLING = "tests.engines.live.vllm.faults:FillingConnector"
ONE_REQUEST_BLOCKS = BLOCKS + 1 + MADE_TOKENS // BLOCK_TOKENS


def test_waiting_requests_share_lookups(model: Path, store: Cluster, plain: Engine) -> None:
    """Blocks for two requests: the others wait, and vLLM asks for the first of them in each of about 300 steps."""
    prompts = [prompt(9000 + number, BLOCKS) for number in range(WAITING + 2)]
    right = plain.generate(*prompts, tokens=MADE_TOKENS)
    settings = PATIENT | {"master": store.address}
    with Engine(model, store=settings, num_gpu_blocks_override=2 * ONE_REQUEST_BLOCKS + 1, max_model_len=512) as engine:
        check_all(engine.generate(*prompts, tokens=MADE_TOKENS), right)
        metrics = engine.tell("metrics")
    assert metrics["vllm:kvstore_lookups"] < 60, "all requests were there before the first was asked for, and share one a second"
    assert metrics["vllm:kvstore_requests"] == len(prompts)
    assert metrics["vllm:kvstore_queried_tokens"] == len(prompts) * BLOCKS * BLOCK_TOKENS
    assert metrics["vllm:kvstore_found_tokens"] == 0


def test_found_blocks_stay_until_they_are_loaded(model: Path, tmp_path: Path, plain: Engine) -> None:
    """Four times the store's DRAM is put between lookup and load."""
    asked = prompt(9200)
    (right,) = expected(plain, asked)
    with cluster(tmp_path) as started:
        started.start_node("--dram", "16MiB", "--policy", "lru")
        with Engine(model, store=PATIENT | {"master": started.address}, connector=FILLING) as engine:
            engine.save(asked)
            engine.forget()
            engine.generate(asked)[0].check_same(right)
            assert engine.tell("metrics")["vllm:kvstore_failed_blocks"] == 0


def test_consumer_warns_once_of_a_store_that_cannot_be_reached(model: Path, tmp_path: Path, plain: Engine) -> None:
    """And once when it answers. An engine that only loads had no line at all."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    asked = prompt(9100)
    (right,) = plain.generate(asked)
    transfer = transfer_to({"master": listen}, role="kv_consumer")
    with Engine(model, transfer=transfer) as engine:
        (line,) = engine.log_lines("kvstore: the store at")
        assert " WARNING " in line
        assert f"{listen} cannot be reached" in line
        engine.generate(asked)[0].check_same(right)
        with cluster(tmp_path, "--listen", listen) as started:
            start_node(started)
            eventually(lambda: len(engine.log_lines("kvstore: the store at")) == 2, "a line of the store that answers")
        assert "answers again" in engine.log_lines("kvstore: the store at")[1]
