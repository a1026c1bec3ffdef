"""Identity of an engine's weights, and its changes while the engine runs.

Text that names the weights of an engine in the namespace of its blocks.

Weights of a running engine: which version they are, and whether blocks may be loaded and saved now. Sans-I/O.
"""

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvstore.engines.weights.files import find_checkpoint, list_files
from kvstore.engines.weights.fingerprint import Mode, fingerprint
from kvstore.protocol.errors import ConfigError, InvalidArgument

MAX_BASE_BYTES: Final = 512
"""Longer texts are hashed, so that base and version fit into one text of a Namespace (1,024 bytes)."""
MAX_VERSION_BYTES: Final = 256
MAX_GIVEN_BYTES: Final = 65_536
"""A longer version is a mistake."""
_RESERVED: Final = "~"
"""Begins versions that no caller can name."""


@dataclass(frozen=True, slots=True)
class WeightsIdentity:
    """Weights of an engine: those of its files, or a version of them that was made in memory."""

    base: str
    """Fingerprint of the files, or the text that an operator gave for it. Empty: known by the model's name only."""
    version: str = ""
    """Empty: the weights are those of the files."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", _short(self.base, MAX_BASE_BYTES))

    @property
    def text(self) -> str:
        """`BASE` or `BASE@VERSION`. At most 1,024 bytes of UTF-8."""
        return f"{self.base}@{self.version}" if self.version else self.base

    @property
    def is_private(self) -> bool:
        """Whether the weights have no name that another engine could use."""
        return self.version.startswith(_RESERVED + "private-")

    def named(self, version: str) -> "WeightsIdentity":
        """Return the version that the engine calls `version`: engines that use one name must have equal weights.

        Raises:
            InvalidArgument: empty, longer than 64 KiB, beginning with `~`, or with characters that are blank, not printable or `@`.
        """
        return replace(self, version=_short(_checked(version), MAX_VERSION_BYTES))

    def private(self, nonce: str) -> "WeightsIdentity":
        """Return a version that only who knows `nonce` shares: the ranks of one engine. Raises InvalidArgument as `named`."""
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
    """Return the identity of weights that an engine loads from files, by the settings `fingerprint` (`choice`) and `revision`.

    A given `revision` is the identity, and no file is read. With `off`, or where no files are found, `hub_revision` is, and a warning says
    what is not noticed then.

    Args:
        hub_revision: revision or commit that the engine was started with.
        hub_cache: root of the Hugging Face cache, if the engine has another than the environment's.

    Raises:
        ConfigError: files that cannot be read or are truncated, or a `revision` with an @.
    """
    if "@" in revision:
        raise ConfigError(f"revision {revision[:80]!r} has an @, which separates a revision from a version: choose another text")
    if revision:
        return WeightsIdentity(revision)
    if choice == "off":
        log.warning(
            "kvstore: fingerprint is off: blocks are known by the name %s (revision %r), and those of other weights under that name are "
            "loaded. Set `revision` anew with each change of the weights",
            model,
            hub_revision,
        )
        return WeightsIdentity(hub_revision)
    path = find_checkpoint(model, revision=hub_revision, hub_cache=hub_cache)
    if path is None or not list_files(path):
        log.warning(
            "kvstore: found no weight files of %s on this machine: its blocks are known by that name (revision %r), and those of other "
            "weights under that name are loaded. Set `revision`",
            model,
            hub_revision,
        )
        return WeightsIdentity(hub_revision)
    mode: Mode = "full" if choice == "full" else "sampled"
    return WeightsIdentity(fingerprint(path, mode=mode))


def _checked(version: str) -> str:
    if not version:
        raise InvalidArgument("a version of the weights has a name: an empty one would be that of the files")
    if version.startswith(_RESERVED) or "@" in version or " " in version or not version.isprintable():
        raise InvalidArgument(f"{version[:80]!r} is no version of the weights: no blanks, no @, printable, not beginning with ~")
    if len(version.encode()) > MAX_GIVEN_BYTES:
        raise InvalidArgument(f"a version of the weights is at most {MAX_GIVEN_BYTES} bytes, not {len(version.encode())}")
    return version


def _short(text: str, limit_bytes: int) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return text if len(raw) <= limit_bytes else f"{_RESERVED}long-{blake2b(raw, digest_size=16).hexdigest()}"


class WeightsState:
    """Identity of one engine's weights, as the engine resets, names and resumes. All ranks make the same calls with the same nonces.

    A request keeps the `generation` that it started with; once that is not the current one, nothing of it is loaded or saved. Not
    thread-safe.
    """

    def __init__(self, started_from: WeightsIdentity) -> None:
        """`started_from`: identity of the files that the engine loaded."""
        self.identity = started_from
        self.is_settled = True
        """Whether blocks may be loaded and saved: not between a reset and the resume after it."""
        self.generation = 0
        """Count of the changes of identity."""

    def begin_update(self) -> None:
        """Note that the weights are about to change. Until `resume` nothing is loaded or saved."""
        self.is_settled = False

    def reset(self, nonce: str) -> None:
        """Note that the engine dropped its caches and named no version: its weights are a private version
        until one is named, and until `resume` nothing is loaded or saved.

        Args:
            nonce: unique for each reset, equal on the engine's ranks. Raises InvalidArgument for one that is no version.
        """
        self.is_settled = False
        self.become(self.identity.private(nonce))

    def name(self, version: str) -> None:
        """Note that the weights are now those that engines call `version`. Raises InvalidArgument, and nothing has changed."""
        self.become(self.identity.named(version))

    def become(self, identity: WeightsIdentity) -> None:
        """Note that the weights are these: the engine loaded their files, or may have."""
        if identity != self.identity:
            self.identity = identity
            self.generation += 1

    def resume(self) -> None:
        """Note that the weights are complete: blocks are loaded and saved under the current identity."""
        self.is_settled = True
