"""A view of an instance nobody has heard of yet says that it is idle and unlimited."""

from kvstore.scheduler.instances import DecodeInstance, PrefillInstance


def test_a_new_prefill_instance_has_nothing_to_do_or_to_send() -> None:
    instance = PrefillInstance("p")
    assert (instance.queue_s, instance.send_backlog_bytes) == (0, 0)
    assert instance.send_bytes_per_s > 0
    assert (instance.place, instance.received_bytes_per_s) == (None, {})


def test_a_new_decode_instance_is_empty_and_takes_the_longest_sequence() -> None:
    instance = DecodeInstance("d")
    assert (instance.batch, instance.context_tokens) == (0, 0)
    assert instance.capacity_tokens >= 1 << 40
