"""The quotas that are in force at a master: those of its file, read again when it has changed, below what operators have set, which the
catalog keeps. The loop is the only caller."""

from collections.abc import Mapping

from kvstore.security.file_signature import signature
from kvstore.security.quotas.quota import Quotas
from kvstore.security.quotas.reading import read_tables
from kvstore.security.quotas.tables import NamedLimits, Origins, in_force, origins


class QuotasInForce:
    """A new file takes the place of the old one whole, or not at all."""

    def __init__(self, path: str) -> None:
        """Of the quotas file at `path`; "": nobody has a limit. Operators have set none yet. Raises ConfigError."""
        self._path = path
        self._seen = signature(path)
        self._file = read_tables(path)
        self._operators: Mapping[str, NamedLimits] = {}
        self.now = in_force(self._file, self._operators)
        self.version = self.now.version
        """That of `now`."""

    def has_changed(self) -> bool:
        """Is the file another one, or another's, than when it was last read?"""
        return signature(self._path) != self._seen

    def reread(self) -> Quotas:
        """Read the file again, if there is one. What is in force now. Raises ConfigError for a bad file; then nothing has changed."""
        if self._path:
            self._seen = signature(self._path)
            self._file = read_tables(self._path)
            self._make()
        return self.now

    def overlay(self, operators: Mapping[str, NamedLimits]) -> None:
        """What operators have set, by tenant, in place of all that they had set. The caller leaves it as it is, and may say the same
        mapping again and again: all limits are made anew only for another one."""
        if operators is not self._operators:
            self._operators = operators
            self._make()

    def origins(self) -> dict[str, Origins]:
        """Who says what, of the tenants that have limits of their own."""
        return origins(self._file, self._operators)

    def _make(self) -> None:
        self.now = in_force(self._file, self._operators)
        self.version = self.now.version
