"""Identity of an engine's weights in its blocks' namespace, and its changes while the engine runs. Sans-I/O, except
`identify`."""

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvstore.engines.weights.files import find_checkpoint, list_files
from kvstore.engines.weights.fingerprint import Mode, fingerprint
from kvstore.protocol.errors import ConfigError, InvalidArgument

MAX_BASE_BYTES: Final = 512
"""Longer texts are hashed, so that base and version fit into a namespace's text (1,024 bytes)."""
MAX_VERSION_BYTES: Final = 256
MAX_GIVEN_BYTES: Final = 65_536
"""Limit of a caller's version."""
_RESERVED: Final = "~"
"""First character of generated versions; callers' versions must not begin with it."""


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """Identity of an engine's weights: a fingerprint or revision of files, and a version of updates in memory."""

    base: str
    """Fingerprint of the files, or the operator's `revision`. Empty: only the model's name identifies the weights."""
    version: str = ""
    """Empty: the weights are those of the files."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _short(self.base, MAX_BASE_BYTES))

    @property
    def text(self) -> str:
        """`BASE` or `BASE@VERSION`, at most 1,024 bytes of UTF-8."""
        return f"{self.base}@{self.version}" if self.version else self.base

    @property
    def is_private(self) -> bool:
        """True if no other engine can use this identity."""
        return self.version.startswith(_RESERVED + "private-")

    def named(self, version: str) -> "WeightsIdentity":
        """Return the version that the engine named `version`. Engines that use the same name must have equal weights.

        Raises:
            InvalidArgument: empty, longer than 64 KiB, beginning with `~`, or with blanks, unprintable characters or
                `@`.
        """
        return replace(self, version=_short(_checked(version), MAX_VERSION_BYTES))

    def private(self, nonce: str) -> "WeightsIdentity":
        """Return a version that only the ranks of one engine share, by `nonce`. Raises InvalidArgument as `named`."""
        return replace(self, version=_short(f"{_RESERVED}private-{_checked(nonce)}", MAX_VERSION_BYTES))


def identify(
    model: str | Path,
    choice: str,
    *,
    revision: str = "",
    hub_revision: str = "",
    hub_cache: Path | None = None,
    log: logging.Logger,
) -> WeightsIdentity:
    """Return the identity of weights that an engine loads from files, by the settings `fingerprint` (`choice`) and
    `revision`.

    A given `revision` is the identity, and no file is read. With `off`, or if no files are found, `hub_revision` is the
    identity, and a warning is logged.

    Args:
        hub_revision: revision or commit that the engine was started with.
        hub_cache: root of the Hugging Face cache, if the engine does not use the environment's.

    Raises:
        ConfigError: files cannot be read or are truncated, or `revision` has an @.
    """
    if "@" in revision:
        raise ConfigError(f"revision {revision[:80]!r} has an @, which separates a revision from a version: choose another text")
    if revision:
        return WeightsIdentity(revision)
    if choice == "off":
        log.warning(
            "kvstore: fingerprint is off: blocks are identified by model name %s (revision %r), and those of other weights are "
            "loaded, too. Set `revision`, and change it with the weights",
            model,
            hub_revision,
        )
        return WeightsIdentity(hub_revision)
    path = find_checkpoint(model, revision=hub_revision, hub_cache=hub_cache)
    if path is None or not list_files(path):
        log.warning(
            "kvstore: found no weight files of %s on this machine: its blocks are identified by name (revision %r), and those of other "
            "weights are loaded, too. Set `revision`, and change it with the weights",
            model,
            hub_revision,
        )
        return WeightsIdentity(hub_revision)
    mode: Mode = "full" if choice == "full" else "sampled"
    return WeightsIdentity(fingerprint(path, mode=mode))


def _checked(version: str) -> str:
    if not version:
        raise InvalidArgument("the version of the weights is empty: pass a name")
    if version.startswith(_RESERVED) or "@" in version or " " in version or not version.isprintable():
        raise InvalidArgument(f"{version[:80]!r} is no version of weights: no blanks, no @, printable, not beginning with ~")
    if len(version.encode()) > MAX_GIVEN_BYTES:
        raise InvalidArgument(f"a version of the weights is at most {MAX_GIVEN_BYTES} bytes, not {len(version.encode())}")
    return version


def _short(text: str, limit_bytes: int) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return text if len(raw) <= limit_bytes else f"{_RESERVED}long-{blake2b(raw, digest_size=16).hexdigest()}"


class WeightsState:
    """Identity of one engine's weights over resets, names and resumes. All ranks make the same calls with the same
    nonces.

    A request keeps the `generation` that it started with. Once another one is current, nothing of the request is loaded
    or saved. Not thread-safe.
    """

    def __init__(self, started_from: WeightsIdentity) -> None:
        """Start with `started_from`, the identity of the files that the engine loaded."""
        self.identity = started_from
        self.is_settled = True
        """True if blocks may be loaded and saved; False from an update or reset until `resume`."""
        self.generation = 0
        """Number of changes of the identity."""

    def begin_update(self) -> None:
        """Mark the weights as changing. Nothing is loaded or saved until `resume`."""
        self.is_settled = False

    def reset(self, nonce: str) -> None:
        """Record a reset without a version: the weights become a private version until they are named. Nothing is
        loaded or saved until `resume`.

        Args:
            nonce: unique for each reset, equal on the engine's ranks.

        Raises:
            InvalidArgument: `nonce` is no valid version.
        """
        self.is_settled = False
        self.become(self.identity.private(nonce))

    def name(self, version: str) -> None:
        """Record the engines' name of the current weights. Raises InvalidArgument; the state is unchanged then."""
        self.become(self.identity.named(version))

    def become(self, identity: WeightsIdentity) -> None:
        """Record that the weights have this identity: the engine loaded their files, or may have."""
        if identity != self.identity:
            self.identity = identity
            self.generation += 1

    def resume(self) -> None:
        """Record that the weights are complete: blocks are loaded and saved under the current identity."""
        self.is_settled = True
