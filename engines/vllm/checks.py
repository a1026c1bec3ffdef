"""How an engine must not be started: refusals in plain values, which facts.py reads from vLLM, each with what to change.

Blocks would not be found again, be found under a name by which others mean something else, or count as loaded when they are not.
"""

from typing import Final

from kvstore.protocol.errors import ConfigError

UNSTABLE_HASHES: Final = frozenset({"xxhash", "xxhash_cbor"})
"""vLLM seeds these anew in each process, unless PYTHONHASHSEED is set."""


def check_hash(algorithm: str, *, is_seeded: bool) -> None:
    """`is_seeded`: PYTHONHASHSEED is set. Raises ConfigError if what vLLM calls a block is not what any other process calls it."""
    if algorithm in UNSTABLE_HASHES and not is_seeded:
        raise ConfigError(
            f"vLLM's {algorithm} hashes are other ones in each process, so that no other would find a block again: start it with "
            "--prefix-caching-hash-algo sha256, or with the same PYTHONHASHSEED everywhere"
        )


def check_images(*, processor_cache_gb: float, has_prefix_cache: bool) -> None:
    """Of an engine that takes images, audio or video. Raises ConfigError if vLLM, which has no use for it, does not hash them: it numbers
    them then, as any other engine does."""
    if not processor_cache_gb and not has_prefix_cache:
        raise ConfigError(
            "vLLM calls images by numbers, not by their content, without its caches, so that prompts would find blocks of other images: "
            "start it with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
        )


def check_step_loads(*, steps_ahead: int) -> None:
    """Of an engine that loads within the step. `steps_ahead`: how many steps it schedules before it knows what came of the first. Raises
    ConfigError if those after the first are scheduled: vLLM shares the blocks of a load with requests of the next step before it knows
    that it failed, and takes what they compute for sound."""
    if steps_ahead > 1:
        raise ConfigError(
            f'set "load_async": true, or have vLLM schedule one step at a time (--no-async-scheduling, one pipeline rank): it has '
            f"{steps_ahead} under way at once, so that others compute on top of a block before it is known whether it was loaded"
        )
