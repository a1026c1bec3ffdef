"""An engine whose blocks would be lost or wrong is refused with what to change."""

import pytest

from kvstore.engines.vllm.checks import check_hash, check_images, check_step_loads
from kvstore.protocol.errors import ConfigError


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_of_one_process_are_refused_with_what_to_do(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=r"sha256.*PYTHONHASHSEED"):
        check_hash(algorithm, is_seeded=False)
    check_hash(algorithm, is_seeded=True)
    check_hash("sha256", is_seeded=False)


def test_images_that_are_called_by_no_content_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--enable-prefix-caching.*--mm-processor-cache-gb"):
        check_images(processor_cache_gb=0, has_prefix_cache=False)
    check_images(processor_cache_gb=0, has_prefix_cache=True)
    check_images(processor_cache_gb=4, has_prefix_cache=False)


def test_loads_within_a_step_are_refused_where_the_next_step_is_scheduled_before_they_are_known_to_have_come() -> None:
    with pytest.raises(ConfigError, match=r'"load_async": true.*--no-async-scheduling'):
        check_step_loads(steps_ahead=2)
    check_step_loads(steps_ahead=1)
