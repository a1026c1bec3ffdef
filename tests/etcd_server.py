"""A real etcd for tests: one member on free ports of the loopback, its data in a folder that outlives a kill.

Needs the `etcd` program (Debian: etcd-server), for some tests `etcdctl` (etcd-client), and `openssl` for TLS; `make test` installs them.
"""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.ports import free_ports

PACKAGES = {"etcd": "etcd-server", "etcdctl": "etcd-client", "openssl": "openssl"}
"""Program -> the Debian package that brings it."""
READY = b"ready to serve client requests"
"""Log line of etcd 3.4, 3.5 and 3.6 when they serve clients."""
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0


class EtcdServer:
    """Start, stop and kill one etcd. After `kill` or `stop`, `start` brings it back on the same ports with the same data.

    `host_port` is where clients connect, `log_path` what etcd said. Every wait is bounded; a failure quotes the log.
    """

    def __init__(
        self,
        folder: Path,
        *extra_flags: str,
        tls: bool = False,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        syncs: bool = True,
    ) -> None:
        """`folder` exists, and gets the data and the log. `tls`: clients must know and show `certificate`. `prefix` goes before the command
        line, to run it on another host (tests/namespaces.py), whose `address` is given then. Without `syncs` it does
        not wait for the disk: what a killed process has written is there all the same."""
        self._folder = folder
        self.log_path = folder / "etcd.log"
        self._scheme = "https" if tls else "http"
        client_port, peer_port = free_ports(2)
        self.host_port = f"{address}:{client_port}"
        self._command = [
            *prefix,
            found("etcd"),
            *self._flags(f"http://{address}:{peer_port}"),
            *(() if syncs else no_fsync()),
            *(self._make_certificate() if tls else []),
            *extra_flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def certificate(self) -> tuple[Path, Path]:
        """(certificate, key) of a server with `tls`. Self-signed, so it is its own authority, for the server and for its clients."""
        return self._folder / "cert.pem", self._folder / "key.pem"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it answers clients. Raises RuntimeError with the end of the log."""
        assert self._process is None, "already started"
        with self.log_path.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        overdue = threading.Timer(START_DEADLINE_S, self._process.kill)
        overdue.start()
        try:
            self._await_ready(begin)
        finally:
            overdue.cancel()

    def stop(self) -> None:
        """Ask it to end, and wait. A server not running is left alone; a frozen one is killed in the end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would: SIGKILL, nothing flushed."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it and start it again on the same ports and data."""
        self.kill()
        self.start()

    def remove(self) -> None:
        """Kill it and delete its data, 128 MB at least, which pytest would keep; the log stays."""
        self.kill()
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def freeze(self) -> None:
        """Stop its process without closing its sockets: calls hang instead of being refused. `kill` ends it without a thaw."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _flags(self, peer_url: str) -> list[str]:
        client_url = f"{self._scheme}://{self.host_port}"
        return [
            "--name=only",
            f"--data-dir={self._folder / 'data'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=only={peer_url}",
        ]

    def _make_certificate(self) -> list[str]:
        """Make `certificate` and return the flags that use it. Not with --auto-tls: its P-521 key is refused by gRPC's BoringSSL."""
        cert, key = self.certificate
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        names = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "60"]  # below 14 days status warns
        command = [found("openssl"), "req", "-x509", "-nodes", *curve, *names, "-keyout", str(key), "-out", str(cert)]
        subprocess.run(command, check=True, capture_output=True)
        return [f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={cert}", "--client-cert-auth"]

    def _await_ready(self, begin: int) -> None:
        """Read the log as it grows until etcd says it is ready or ends."""
        assert self._process is not None
        while READY not in self.log_path.read_bytes()[begin:]:
            try:
                self._process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            self._process = None
            raise RuntimeError(f"etcd did not start: {self.log_path.read_bytes()[begin:][-2000:].decode(errors='replace')}")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


@cache
def no_fsync() -> list[str]:
    """The flag by which etcd does not wait for the disk; none for one that does not know it."""
    flag = "--unsafe-no-fsync"
    return [flag] if subprocess.run([found("etcd"), flag, "--version"], capture_output=True, check=False).returncode == 0 else []


def found(program: str) -> str:
    """Return the path of the program. Raises RuntimeError with the package that installs it."""
    path = shutil.which(program)
    if path is None:
        raise RuntimeError(f"{program} is not on PATH: `make test` installs it (Debian: apt-get install {PACKAGES[program]})")
    return path
