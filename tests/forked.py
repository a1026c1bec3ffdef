"""Daemons and commands as processes of their own that need not load their modules: forked from one that has, the template, of which each
process of the tests has one, or one for each set of Python's options.

To load them takes 0.6 s of processor time, five times as long as all else that a daemon does to begin. What follows is the same: its
`main` with flags, environment, signals and exit status; only what was loaded is not taken apart at the end. Tests of the program itself and
of whoever starts it start it by its name.
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
"""What they load when somebody asks them over HTTP: here once for all of them."""
FORKABLE: Final = (*MODULES, "tests.faults.daemon", "tests.faults.client")
"""What has a `main`. What they load beside these is loaded when the first of them is asked for, by the template too."""
COMMAND: Final = "kvstore.cli.main"
"""It has a `main` too, and loads the module of a subcommand when that is asked for; so does the template."""
FDS: Final = 4
"""That come with a request: standard input, standard output, standard error, and where the status goes."""
_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. `folder` is "" for the checkout, `host` for that of the template."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    host: str = ""
    hidden: Sequence[str] = ()


class Forked:
    """One daemon, or command. What it can be asked is what `subprocess.Popen` has of the same name."""

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
        self.stdout: IO[str] | None = open(out, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by whoever started it
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
    """What this program, which succeeds, prints."""
    forked = Forked(module, arguments, environment=os.environ, host=host)
    assert forked.stdout is not None
    assert forked.stderr is not None
    with forked.stdout, forked.stderr:
        printed, complained = forked.stdout.read(), forked.stderr.read()
    assert forked.wait() == 0, complained
    return printed


class Template:
    """The process that forks them, and ends with this one. Thread-safe."""

    def __init__(self, options: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, *options, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[1])
        atexit.register(self.close)

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The new process's pid. Its status is written to the last of the descriptors, in decimal, and that is closed."""
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
    """The one of this process for these."""
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
    """Is this process one that a template forked? To it, a template of its own is worth nothing: that would have to load all anew."""
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == __spec__.name


# --- in the template ---


def _request(sock: socket.socket) -> tuple[Request, list[int]]:
    """Raises EOFError when nobody asks any more."""
    length, descriptors, _flags, _place = socket.recv_fds(sock, _LENGTH_BYTES, FDS)
    if not length:
        raise EOFError
    length += _exactly(sock, _LENGTH_BYTES - len(length))
    return Request(**json.loads(_exactly(sock, int.from_bytes(length)))), list(array.array("i", descriptors))


def serve(sock: socket.socket) -> Request | None:
    """Fork as asked until nobody asks any more: None then. In each new process it returns the request."""
    template_pid = os.getpid()
    statuses: dict[int, tuple[int, int]] = {}
    """By pidfd: the process, and where its status goes."""
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
    """Once for all that are forked from then on. What cannot be loaded is the business of the process that runs it."""
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
    """Take on what `subprocess.Popen` would have given it, on its host."""
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
    """Run it and end as Python does, but for taking apart what was loaded. That writes to, and so copies, every page that the fork came
    with: 65 ms of processor time, most of what a process costs that does little."""
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
