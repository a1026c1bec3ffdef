"""Names of Mooncake's tasks, which copy and move replicas. No call here returns one: replicas are the store's own affair."""

from dataclasses import dataclass
from enum import Enum


class TaskType(Enum):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(Enum):
    """State of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclass(slots=True)
class QueryTaskResponse:
    """A task as `query_task` reports it."""

    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""
