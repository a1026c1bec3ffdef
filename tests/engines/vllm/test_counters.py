"""Numbers add up over ranks and steps, and begin anew when they are taken."""

from kvstore.engines.vllm.counters import Counters, metrics


def test_they_add_up_and_begin_anew() -> None:
    counters = Counters(lookups=1, load_s=0.5)
    counters.add(Counters(lookups=2, saved_blocks=3))
    assert counters.take() == Counters(lookups=3, load_s=0.5, saved_blocks=3)
    assert counters == Counters()


def test_as_values_they_go_to_another_process_and_come_back() -> None:
    counters = Counters(found_tokens=4, save_s=1.5)
    assert Counters.of(counters.values()) == counters
    assert not any(Counters().values().values())


def test_metrics_name_their_unit() -> None:
    names = {name: metric for name, metric, _ in metrics()}
    assert names["load_s"] == "vllm:kvstore_load_seconds"
    assert names["loaded_bytes"] == "vllm:kvstore_loaded_bytes"
    assert list(names) == list(Counters().values())
    assert all(help.endswith(".") for _, _, help in metrics())
