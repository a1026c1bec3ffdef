"""Text of audit entries, for logs, the console and the command line."""

from kvstore.protocol import control_pb2 as pb

DONE, REFUSED, FAILED = "done", "refused", "failed"
"""Results of an entry."""


def line_of(entry: pb.AuditEntry) -> str:
    """`operator alice (10.0.0.7): quota set tenant red: blocks 10 -> 20`."""
    detail = f": {entry.detail}" if entry.detail else ""
    return f"{actor_of(entry)}: {what_of(entry)}{outcome_of(entry)}{detail}"


def actor_of(entry: pb.AuditEntry) -> str:
    """`operator alice (10.0.0.7)`."""
    return " ".join(part for part in (entry.kind, entry.actor, f"({entry.peer})" if entry.peer else "") if part)


def what_of(entry: pb.AuditEntry) -> str:
    """`quota set tenant red: blocks 10 -> 20`."""
    values = f": {entry.old or '-'} -> {entry.new or '-'}" if entry.old or entry.new else ""
    return " ".join(part for part in (entry.action.replace("_", " "), entry.target) if part) + values


def outcome_of(entry: pb.AuditEntry) -> str:
    """`, refused (17 times)`; "" for a change that was made once."""
    result = "" if entry.result == DONE else f", {entry.result}"
    return result + (f" ({entry.count:,} times)" if entry.count > 1 else "")
