"""Retention hints of a node's blocks: one word a block, and the sessions of each tenant. Bookkeeping; `now_ns` is
passed in.

A word has the highest hint without an end, the highest one with an end, the tick of that end, and the owner: the
session that put the block, or a mark for none or several. `priority_of` a word is what the policies get. Eviction
orders read the words when a block enters a tier.

`step` walks over the words, some rows at a time: it ends hints, and clears the words of rows without a block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.node_messages import NO_PRIORITY, SEVERAL_SESSIONS
from kvstore.protocol.retention import DEFAULT_PRIORITY
from kvstore.store.block_table.block import DROPPED, Block, BlockColumns

MAX_SESSIONS: Final = 16_384
"""Sessions of a tenant; the ones used longest ago are forgotten first, FORGOTTEN_AT_ONCE together. About 200 bytes each."""
FORGOTTEN_AT_ONCE: Final = MAX_SESSIONS // 8
"""Each time all words are read: some ms for a million blocks."""
ROWS_AT_ONCE: Final = 1 << 16
"""Rows that one `step` walks over: below 1 ms. A million blocks take 16 steps, 1.6 s."""
PASSED_AT_ONCE: Final = 2048
"""Blocks whose changed priority one message or `step` passes to the policies: about 20 ms. The others follow, ten times a
second."""
TICK_NS: Final = 1_000_000_000

_TIMED_AT, _END_AT, _OWNER_AT = 7, 14, 44
_PRIORITY_MASK: Final = (1 << 7) - 1
_END_MASK: Final = (1 << _OWNER_AT - _END_AT) - 1
MAX_OWNERS: Final = 1 << 64 - _OWNER_AT
"""A word: priority without an end, plus 1 (0: none); the same with an end; the tick of the end; the owner's index."""
_PRIORITY_BITS: Final = (1 << _END_AT) - 1
_OWNER_BITS: Final = (MAX_OWNERS - 1) << _OWNER_AT
_TIMED_BITS: Final = (1 << _OWNER_AT) - (1 << _TIMED_AT)
NO_SESSION: Final = 0

PassOn = Callable[[Block, int], None]
"""Passes a block's priority to the policies of its tiers."""


class Hint(NamedTuple):
    """Hint for blocks. `priority` of None, or a `session` of 0: not given. `owns`: blocks without an owner become the
    session's."""

    priority: int | None
    ttl_ms: int = 0
    session: int = NO_SESSION
    owns: bool = False


CopiedHint = tuple[int, int, int]
"""protocol.retention.CopiedHint without the index: priority, ttl_ms, session."""


class _Owner(NamedTuple):
    """Tenant of a word, with its session, NO_SESSION or SEVERAL_SESSIONS."""

    tenant: str
    session: int


def priority_of(word: int) -> int:
    """Return the priority of a word. A hint with an end counts until `step` has ended it."""
    best = max(word & _PRIORITY_MASK, word >> _TIMED_AT & _PRIORITY_MASK)
    return best - 1 if best else DEFAULT_PRIORITY


class RetentionHints:
    """Hints of one node. Not thread-safe: called from the node's loop."""

    def __init__(self, columns: BlockColumns, find: Callable[[str, bytes], Block | None], pass_on: PassOn) -> None:
        """`find` returns a tenant's visible block."""
        self._columns = columns
        self._find = find
        self._pass_on = pass_on
        self._owners: list[_Owner | None] = [None]
        """By index; None: free. Index 0 is no owner's."""
        self._free: list[int] = []
        self._marks: dict[_Owner, int] = {}
        """Indexes of the owners that are no session."""
        self._sessions: dict[str, OrderedDict[int, int]] = {}
        """By tenant: indexes by session, the one used longest ago first."""
        self._changed: OrderedDict[int, None] = OrderedDict()
        """Rows whose new priority the policies do not have yet."""
        self._next_row = self._counted = 0
        self.blocks = 0
        """Blocks with a live priority, as of the last walk."""
        self.applied = self.ignored = self.ended_sessions = self.forgotten_sessions = 0

    @property
    def is_used(self) -> bool:
        """True once a block of this node has had a hint."""
        return bool(self._columns.retention)

    # --- hints ---

    def apply(self, tenant: str, blocks: Sequence[Block], hint: Hint, now_ns: int) -> None:
        """Apply a hint to visible blocks of the tenant. Without an index for the tenant's owners it is counted as
        ignored."""
        if not blocks:
            return
        none, several = self._mark(tenant, NO_SESSION), self._mark(tenant, SEVERAL_SESSIONS)
        has_session = hint.session not in (NO_SESSION, SEVERAL_SESSIONS)
        own = self._session(tenant, hint.session, is_new=hint.owns) if has_session else 0
        if not (none and several and (own or not has_session or not hint.owns)):
            self.ignored += len(blocks)
            return
        columns, tick, merged, changed = self._columns, now_ns // TICK_NS, dict[int, int](), list[int]()
        columns.keep_retention()
        words = columns.retention
        for block in blocks:
            word = words[block]
            new = merged.get(word)
            if new is None:
                owner = self._merged_owner(word >> _OWNER_AT, hint, none=none, several=several, own=own)
                new = merged[word] = _merged(word, hint, tick, now_ns) | owner << _OWNER_AT
            if new != word:
                words[block] = new
                if priority_of(new) != priority_of(word):
                    changed.append(int(block))
        self.applied += len(blocks)
        self._have_changed(changed)

    def _merged_owner(self, known: int, hint: Hint, *, none: int, several: int, own: int) -> int:
        if not hint.session:
            return known or none
        is_others = hint.session == SEVERAL_SESSIONS or (known and known not in (none, own))
        return own if own and not is_others and (known == own or hint.owns) else several

    def export(self, blocks: Sequence[Block | None], now_ns: int) -> list[tuple[int, int, int, int]]:
        """Return the live hints of blocks: (index, priority, ttl_ms, session)."""
        words, found = self._columns.retention, list[tuple[int, int, int, int]]()
        if not words:
            return found
        for index, block in enumerate(blocks):
            word = words[block] if block is not None else 0
            owner = self._owners[word >> _OWNER_AT]
            if owner is None:
                continue
            base, timed = word & _PRIORITY_MASK, word >> _TIMED_AT & _PRIORITY_MASK
            left_ms = ((word >> _END_AT & _END_MASK) * TICK_NS - now_ns) // 1_000_000
            if base or owner.session:
                found.append((index, base - 1 if base else NO_PRIORITY, 0, owner.session))
            if timed and left_ms > 0:
                found.append((index, timed - 1, left_ms, owner.session))
        return found

    def adopt(self, block: Block, rows: Iterable[CopiedHint], now_ns: int) -> None:
        """Apply the hints that a block has at another node to its copy here."""
        for priority, ttl_ms, session in rows:
            given = priority if priority != NO_PRIORITY else None
            self.apply(block.tenant, [block], Hint(given, ttl_ms, session, owns=True), now_ns)

    # --- sessions ---

    def end_session(self, tenant: str, session: int) -> int:
        """End a session: its blocks get priority 0 and no owner, in the following steps. Return their number."""
        index = self._sessions.get(tenant, OrderedDict()).pop(session, 0)
        if not index:
            return 0
        self.ended_sessions += 1
        columns = self._columns
        words = np.frombuffer(columns.retention, np.uint64)
        rows = np.flatnonzero(words >> np.uint64(_OWNER_AT) == index)
        words[rows] = 1 | self._mark(tenant, NO_SESSION) << _OWNER_AT
        rows = rows[_is_live(columns, rows)]
        self._release(index)
        self._have_changed(rows.tolist())
        return len(rows)

    @property
    def sessions(self) -> int:
        """Number of known sessions."""
        return sum(map(len, self._sessions.values()))

    def _session(self, tenant: str, session: int, *, is_new: bool) -> int:
        """Return the session's index. 0: it is not known, or with `is_new` there is no index left."""
        of_tenant = self._sessions.setdefault(tenant, OrderedDict())
        index = of_tenant.get(session, 0)
        if index:
            of_tenant.move_to_end(session)
        if index or not is_new:
            return index
        if len(of_tenant) >= MAX_SESSIONS:
            self._forget_oldest(tenant, of_tenant)
        index = self._add(_Owner(tenant, session))
        if index:
            of_tenant[session] = index
        return index

    def _forget_oldest(self, tenant: str, of_tenant: OrderedDict[int, int]) -> None:
        """Forget sessions; their blocks count as used by several."""
        forgotten = [of_tenant.popitem(last=False)[1] for _ in range(FORGOTTEN_AT_ONCE)]
        self.forgotten_sessions += len(forgotten)
        if self._columns.retention:
            words = np.frombuffer(self._columns.retention, np.uint64)
            is_theirs = np.zeros(len(self._owners), np.bool_)
            is_theirs[forgotten] = True
            rows = np.flatnonzero(is_theirs[words >> np.uint64(_OWNER_AT)])
            several = self._mark(tenant, SEVERAL_SESSIONS) << _OWNER_AT
            words[rows] = words[rows] & np.uint64(_OWNER_BITS ^ (1 << 64) - 1) | np.uint64(several)
        for index in forgotten:
            self._release(index)

    def _mark(self, tenant: str, session: int) -> int:
        """Return the index of an owner that is no session; 0: there is none left."""
        owner = _Owner(tenant, session)
        index = self._marks.get(owner, 0)
        if not index and (index := self._add(owner)):
            self._marks[owner] = index
        return index

    def _add(self, owner: _Owner) -> int:
        if self._free:
            index = self._free.pop()
            self._owners[index] = owner
        elif len(self._owners) < MAX_OWNERS:
            index = len(self._owners)
            self._owners.append(owner)
        else:
            return 0
        return index

    def _release(self, index: int) -> None:
        self._owners[index] = None
        self._free.append(index)

    # --- periodic ---

    def step(self, now_ns: int) -> None:
        """Pass changed priorities to the policies, and walk over the next rows."""
        columns = self._columns
        if not columns.retention:
            return
        self._tell_changed()
        begin = self._next_row
        rows = np.arange(begin, min(begin + ROWS_AT_ONCE, len(columns.retention)))
        if not len(rows):
            self.blocks, self._next_row, self._counted = self._counted, 0, 0
            return
        words = np.frombuffer(columns.retention, np.uint64)[begin : begin + len(rows)]
        words[~_is_live(columns, rows)] = 0
        ends = words >> np.uint64(_END_AT) & np.uint64(_END_MASK)
        is_over = (ends != 0) & (ends <= now_ns // TICK_NS)
        words[is_over] &= np.uint64(_TIMED_BITS ^ (1 << 64) - 1)
        self._changed.update(dict.fromkeys(rows[is_over].tolist()))
        self._counted += int(np.count_nonzero(words & np.uint64(_PRIORITY_BITS)))
        self._next_row += len(rows)

    def _have_changed(self, rows: Sequence[int]) -> None:
        self._changed.update(dict.fromkeys(rows))
        if len(self._changed) <= PASSED_AT_ONCE:
            self._tell_changed()

    def _tell_changed(self) -> None:
        words = self._columns.retention
        for _ in range(min(PASSED_AT_ONCE, len(self._changed))):
            row, _ = self._changed.popitem(last=False)
            owner = self._owners[words[row] >> _OWNER_AT]
            block = self._find(owner.tenant, self._columns.keys[row]) if owner is not None else None
            if block is not None and int(block) == row:  # else the row has another block by now
                self._pass_on(block, priority_of(words[row]))

    def counters(self) -> dict[str, int]:
        """Counters for the node's status."""
        return {
            "retained_blocks": self.blocks,
            "retention_hints_applied": self.applied,
            "retention_hints_ignored": self.ignored,
            "retention_sessions": self.sessions,
            "retention_sessions_ended": self.ended_sessions,
            "retention_sessions_forgotten": self.forgotten_sessions,
        }


def _merged(word: int, hint: Hint, tick: int, now_ns: int) -> int:
    """Return the priorities of a word after a hint, without an owner. The highest live one counts."""
    base, timed, end = word & _PRIORITY_MASK, word >> _TIMED_AT & _PRIORITY_MASK, word >> _END_AT & _END_MASK
    if end <= tick:
        timed = end = 0
    if hint.priority is not None:
        given = hint.priority + 1
        if not hint.ttl_ms:
            base = max(base, given)
        elif given >= timed:
            new_end = -(-(now_ns + hint.ttl_ms * 1_000_000) // TICK_NS)  # rounded up
            timed, end = given, max(end, new_end) if given == timed else new_end
    if base >= timed:
        timed = end = 0
    return base | timed << _TIMED_AT | end << _END_AT


def _is_live(columns: BlockColumns, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each row whether it has a visible block."""
    held, states = np.frombuffer(columns.held, np.uint8)[rows], np.frombuffer(columns.states, np.uint8)[rows]
    is_live: npt.NDArray[np.bool_] = (held != 0) & (states & DROPPED == 0)
    return is_live
