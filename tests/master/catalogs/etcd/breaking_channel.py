"""A channel to etcd whose calls fail in this process, when a test wants it: with what no other side causes."""

from typing import Any

from kvstore.master.catalogs.etcd.channel import EtcdChannel, Reply, ReplyStream


class BreakingChannel(EtcdChannel):
    """While `is_broken`, gRPC finds no thread for any call."""

    is_broken = False

    def start(self, method: str, request: Any, *, timeout_s: float) -> Reply:
        self._check()
        return super().start(method, request, timeout_s=timeout_s)

    def stream(self, *args: Any, **kwargs: Any) -> ReplyStream:
        self._check()
        return super().stream(*args, **kwargs)

    def _check(self) -> None:
        if self.is_broken:
            raise RuntimeError("can't start new thread")
