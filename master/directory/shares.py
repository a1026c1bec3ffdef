"""How much one partition's owner may give of a limit that holds for the cluster (quota.SHARED), and what who wants more is told. Values."""

from typing import Final, NamedTuple

from kvstore.protocol.errors import QuotaExceeded
from kvstore.security.quotas.quota import SHARED

HAS: Final = ("blocks pinned", "puts granted and not published")
WHAT_TO_DO: Final = ("let some go", "put fewer at once")
"""As HAS, in the order of SHARED."""


class Share(NamedTuple):
    """Of one tenant's limit: `now` in this partition, `whole` in all of them together. Equal where there is one."""

    now: int
    whole: int

    def exceeded(self, tenant: str, limit: int, *, used: int, more: int) -> QuotaExceeded:
        """That `more` are too many for a tenant that has `used` here already. `limit`: its place in SHARED."""
        text, name = f"tenant {tenant!r} has {used} {HAS[limit]}", SHARED[limit]
        if self.now == self.whole or used + more > self.whole:
            text += f"; {more} more exceed its quota of {self.whole} ({name}): {WHAT_TO_DO[limit]}, or have the operator raise it"
        else:
            text += (
                f" in one partition of the key space; {more} more exceed what that has now, {self.now}, of its quota of {self.whole} "
                f"({name}), which others have the rest of: {WHAT_TO_DO[limit]}, in any of them, try again, or have the operator raise it"
            )
        return QuotaExceeded(text)


def unshared(_tenant: str, _limit: int) -> Share | None:
    """Of tenants that have no such limit."""
    return None
