"""Daemons and commands as processes that are forked from a template, which has loaded their modules already.

Each test process has one template, or one for each set of Python options. Loading the modules takes 0.6 s of processor time, five times as
long as the rest of a daemon's start. A forked process runs the same `main`, with flags, environment, signals and exit status. It only skips
the teardown of modules at its end. Tests of the program itself and of its launchers start it by its name.
"""

import array
import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from kvstore.cli.main import kvstore
from kvstore.cli.tools.launch import end_with
from tests.entering import enter

MODULES: Final = ("tests.tuned_daemon", "kvstore.master.daemon", "kvstore.store.daemon")
DEFERRED: Final = ("kvstore.telemetry.http.aiohttp_server", "kvstore.telemetry.routes", "kvstore.console.web")
"""Modules that daemons load at their first HTTP request. The template loads them once."""
FORKABLE: Final = (*MODULES, "tests.faults.daemon", "tests.faults.client")
"""Modules with a `main`. The template loads their other imports at the first request for them."""
COMMAND: Final = "kvstore.cli.main"
"""Module with a `main` that loads the module of a subcommand on demand; so does the template."""
FDS: Final = 4
"""Descriptors of a request: standard input, standard output, standard error, and the pipe for the exit status."""
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Request:
    """A program to run. `folder` is "" for the checkout, `host` is "" for the template's host."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    host: str = ""
    hidden: Sequence[str] = ()


class Forked:
    """One daemon or command. Methods and attributes are those of `subprocess.Popen` of the same name."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[Any] | None = None,
        host: str = "",
        hidden: Sequence[str] = (),
        options: tuple[str, ...] = (),
        folder: Path | None = None,
        has_input: bool = False,
    ) -> None:
        """`stderr` is a file that its log goes to; without, the attribute of that name reads it. It has a process group of its own.
        `host` is the network namespace of another host (tests/namespaces.py) to run on, where the folders `hidden` are empty. `options`
        are those of the template's Python, and there is one for each. `folder` is where it runs; without, in the checkout. Its standard
        input is what is written to the attribute `stdin`, or empty."""
        self.returncode: int | None = None
        self._lock = threading.Lock()
        given, given_end = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), -1)
        out, out_end = os.pipe()
        error, error_end = os.pipe() if stderr is None else (-1, os.dup(stderr.fileno()))
        self._status, status_end = os.pipe()
        request = Request(module, list(arguments), dict(environment), str(folder or ""), host, list(hidden))
        self.pid = template(options).fork(request, [given, out_end, error_end, status_end])
        for descriptor in (given, out_end, error_end, status_end):
            os.close(descriptor)
        self.stdin: IO[str] | None = open(given_end, "w", encoding="utf-8") if has_input else None  # noqa: SIM115 - as below
        self.stdout: IO[str] | None = open(out, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by the caller
        self.stderr: IO[str] | None = None if error < 0 else open(error, encoding="utf-8", errors="replace")  # noqa: SIM115

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is None:
                poll = select.poll()  # `select` takes no descriptors above 1023
                poll.register(self._status, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
                told = os.read(self._status, 16)
                os.close(self._status)
                self.returncode = int(told) if told else -signal.SIGKILL  # the template is gone, and its children with it
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def said(module: str, *arguments: str, host: str = "") -> str:
    """Return the output of this program, which must succeed."""
    forked = Forked(module, arguments, environment=os.environ, host=host)
    assert forked.stdout is not None
    assert forked.stderr is not None
    with forked.stdout, forked.stderr:
        printed, complained = forked.stdout.read(), forked.stderr.read()
    assert forked.wait() == 0, complained
    return printed


class Template:
    """The process that forks daemons and commands. It ends with this process. Thread-safe."""

    def __init__(self, options: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, *options, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1])
        atexit.register(self.close)

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """Return the new process's pid. Its exit status is written in decimal to the last descriptor, which is then closed."""
        text = json.dumps(asdict(request)).encode()
        with self._lock:
            socket.send_fds(self._sock, [len(text).to_bytes(_LENGTH_BYTES)], descriptors)
            self._sock.sendall(text)
            return int.from_bytes(_exactly(self._sock, _LENGTH_BYTES))

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


@cache
def template(options: tuple[str, ...] = ()) -> Template:
    """Return this process's template for these Python options."""
    return Template(options)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        if not got:
            raise EOFError
        data += got
    return data


def is_forked() -> bool:
    """Return whether a template forked this process. Its own template would load all modules again, without a gain."""
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == __spec__.name


# --- in the template ---


def _request(sock: socket.socket) -> tuple[Request, list[int]]:
    """Receive a request. Raises EOFError when the requester has closed its end."""
    length, descriptors, _flags, _place = socket.recv_fds(sock, _LENGTH_BYTES, FDS)
    if not length:
        raise EOFError
    length += _exactly(sock, _LENGTH_BYTES - len(length))
    return Request(**json.loads(_exactly(sock, int.from_bytes(length)))), list(array.array("i", descriptors))


def serve(sock: socket.socket) -> Request | None:
    """Fork a process for each request. Return the request in each new process, and None in the template when requests end."""
    template_pid = os.getpid()
    statuses: dict[int, tuple[int, int]] = {}
    """By pidfd: the process, and the descriptor for its exit status."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        for ready, _event in poll.poll():
            if ready != sock.fileno():
                poll.unregister(ready)
                pid, status_end = statuses.pop(ready)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status_end, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status_end)
                os.close(ready)
                continue
            try:
                request, descriptors = _request(sock)
            except (EOFError, ConnectionError):
                return None
            _load(request)
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)
                end_with(template_pid)
                _become(request, descriptors)
                return request
            pidfd = os.pidfd_open(pid)
            *streams, status_end = descriptors
            statuses[pidfd] = pid, status_end
            poll.register(pidfd, select.POLLIN)
            for descriptor in streams:
                os.close(descriptor)
            sock.sendall(pid.to_bytes(_LENGTH_BYTES))


def _load(request: Request) -> None:
    """Load the modules of a request once for all later forks. Import errors are left to the forked process."""
    wanted = [request.module]
    if request.module == COMMAND and request.arguments:
        room, _, _ = COMMAND.rpartition(".")
        wanted.append(f"{room}.{kvstore.modules.get(request.arguments[0], 'main')}")
    missing = [module for module in wanted if module not in sys.modules]
    for module in missing:
        with contextlib.suppress(ImportError):
            import_module(module)
    if missing:
        gc.collect()
        gc.freeze()


def _become(request: Request, descriptors: Sequence[int]) -> None:
    """Set up descriptors, environment, folder and host as `subprocess.Popen` would."""
    for ours, given in enumerate(descriptors[:3]):
        os.dup2(given, ours)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request.environment)
    if request.folder:
        os.chdir(request.folder)
    sys.argv = [request.module, *request.arguments]
    if request.host:
        enter(request.host, request.hidden)


def main() -> None:
    for module in (*MODULES, *DEFERRED):
        import_module(module)
    gc.collect()
    gc.freeze()
    sock = socket.socket(fileno=int(sys.argv[1]))
    request = serve(sock)
    if request is not None:
        sock.detach()
        _run(import_module(request.module).main)


def _run(program: Callable[[], object]) -> None:
    """Run the program and end as Python does, but without the teardown of modules.

    The teardown would write to, and so copy, every page of the fork: 65 ms of processor time, most of the cost of a short process."""
    try:
        program()
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # Python says it
        status = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
