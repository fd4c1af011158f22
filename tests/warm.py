"""Processes of tests, forked from one that has imported torch and gdntune.

A sweep of a test is a second's work, and its timing process imported torch for 2.5 s of CPU time
before it. Here processes come from one server for all of a run's tests: it forks, and the child
runs what `python -c PROGRAM ...` or `python -m MODULE ...` would. Tests marked `cold` start
processes as a user does.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Where the server listens; set for all processes of a run of tests.
PLACE = "GDNTUNE_TEST_WARM"
PRELOADED = (
    "pandas",
    "torch",
    "gdntune.checking.cases",
    "gdntune.checking.check",
    "gdntune.cli.app",
    "gdntune.report.report",
    "gdntune.runtime.parts",
    "gdntune.search",
    "gdntune.tuning.chain",
    "gdntune.tuning.worker",
)
START = "import sys; sys.path[:] = sys.argv[2:]; import warm; warm.main(sys.argv[1])"
_STARTED: list["subprocess.Popen[bytes]"] = []
# The server's own path of modules, without what it was given.
_OWN = list(sys.path)


# -- the server and its children


def _quick() -> None:
    """A timing process of tests times nothing that anyone believes: it flushes little, and measures
    the peak of little.
    """
    from functools import partial

    from gdntune import timing
    from gdntune.tuning import session

    timing.flush_bytes = lambda device, l2: (1 << 20) * (l2 in ("cold-clean", "cold-dirty"))  # type: ignore[assignment]
    session.measured_peaks = partial(timing.measured_peaks, size=1 << 20, rounds=3)


def _run(asked: dict[str, Any], fds: list[int]) -> None:
    """In the child: the program, as an interpreter runs it."""
    os.setsid()
    out, error, *given = fds
    for source, goal in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (error, 2)):
        os.dup2(source, goal)
    os.close(out)
    os.close(error)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    # by which a test finds it
    Path("/proc/self/comm").write_text(f"of {asked['parent']}")
    command = asked["command"]
    how, what, *arguments = command if command[0] in ("-c", "-m") else ("a file", *command)
    paths = asked["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(what).parent) if how == "a file" else "", *filter(None, paths), *_OWN]
    # The descriptor has another number here.
    arguments = [str(given[0]) if x == str(asked["fd"]) else x for x in arguments]
    if how == "-c":
        sys.argv = ["-c", *arguments]
        exec(what, {"__name__": "__main__"})  # noqa: S102
    elif how == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")


def _child(asked: dict[str, Any], fds: list[int]) -> None:
    code = 1
    try:
        _run(asked, fds)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001  as an interpreter that ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(place: str) -> None:
    """Serves at a place until the first process of the tests is gone."""
    import importlib

    # Ctrl-C reaches the whole group; the tests' first process decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    _quick()
    # What is imported is there to stay: no child looks through it for garbage, nor copies its pages.
    gc.collect()
    gc.freeze()
    from gdntune.tuning import program

    program.subprocess = sys.modules["warm"]  # type: ignore[attr-defined]
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{place}.new")
    server.listen(64)
    tests = os.pidfd_open(int(Path(f"{place}.pid").read_text()))
    # Now whoever connects is heard.
    os.rename(f"{place}.new", place)
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        for fd in (server.fileno(), tests):
            selector.register(fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == tests:
                    return
                if key.fd == server.fileno():
                    if made := _serve(server, [server.fileno(), tests, selector.fileno()], running):
                        running[made[0]] = made[1]
                        selector.register(made[0], selectors.EVENT_READ)
                    continue
                selector.unregister(key.fd)
                pid, connection = running.pop(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with connection, contextlib.suppress(OSError):
                    connection.sendall(f"{code}\n".encode())


def _serve(
    server: socket.socket, mine: list[int], running: dict[int, tuple[int, socket.socket]]
) -> tuple[int, tuple[int, socket.socket]] | None:
    """One request: a child, by its pidfd, and the connection that waits for its end; None where
    who asked was killed meanwhile.
    """
    connection, _ = server.accept()
    data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 4)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(1 << 20)):
            for fd in (*fds, connection.detach()):
                os.close(fd)
            return None
        data += more
    pid = os.fork()
    if not pid:
        # What others wait at is not this child's to hold open.
        for fd in (*mine, *running, *(c.fileno() for _, c in running.values())):
            os.close(fd)
        connection.close()
        _child(json.loads(data), fds)
    for fd in fds:
        os.close(fd)
    # It may have been killed meanwhile.
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    return os.pidfd_open(pid), (pid, connection)


# -- the tests' side


class Popen:
    """As subprocess.Popen, as far as it is used here; a session of its own, nothing to read."""

    def __init__(
        self,
        command: Sequence[Any],
        *,
        pass_fds: tuple[int, ...] = (),
        env: Mapping[str, str] | None = None,
        stdout: Any = 1,
        stderr: Any = 2,
        cwd: Any = None,
        **_: Any,
    ):
        self._connection = _connected()
        asked = {
            "command": [str(x) for x in command[1:]],
            "fd": pass_fds[0] if pass_fds else None,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or os.getcwd()),
            "parent": os.getpid(),
        }
        data = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(self._connection, [data], [stdout, stderr, *pass_fds])
        self._connection.sendall(data[sent:])
        self._said = self._connection.makefile()
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(0):
                    self.wait()
        return self.returncode

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, waited for."""
        if self.returncode is None:
            self.returncode = int(self._said.readline() or -signal.SIGKILL)
            self._said.close()
            self._connection.close()
        return self.returncode


DEVNULL = subprocess.DEVNULL


def run(
    command: Sequence[Any], env: Mapping[str, str], cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """What `subprocess.run` gives of text that is captured."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        code = Popen(command, env=env, cwd=cwd, stdout=out.fileno(), stderr=error.fileno()).wait()
        for file in (out, error):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), error.read())


def _connected() -> socket.socket:
    """A connection to the server, which the first to ask starts."""
    from filelock import FileLock

    place = os.environ[PLACE]
    found = socket.socket(socket.AF_UNIX)
    with FileLock(f"{place}.lock"):
        if not Path(place).exists():
            here = [str(Path(__file__).parent), *sys.path]
            log = Path(f"{place}.log")
            # Not this process's output: whoever reads that waits for its end.
            with log.open("w") as said:
                _STARTED.append(
                    subprocess.Popen(
                        [sys.executable, "-c", START, place, *here],
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                        start_new_session=True,
                    )
                )
            until = time.monotonic() + 600
            while not Path(place).exists():
                assert _STARTED[-1].poll() is None, log.read_text()
                assert time.monotonic() < until, "the server of warm processes does not start"
                time.sleep(0.01)
    try:
        found.connect(place)
    except ConnectionRefusedError as e:
        raise AssertionError(f"the server is gone: {Path(f'{place}.log').read_text()}") from e
    return found


def place(folder: Path) -> None:
    """Says where the server of a run of tests will be: it ends with this process."""
    os.environ[PLACE] = str(folder / "warm")
    Path(f"{os.environ[PLACE]}.pid").write_text(str(os.getpid()))


def patch(monkeypatch: Any) -> None:
    """Timing processes that this process starts are warm from here on."""
    from gdntune.tuning import program

    monkeypatch.setattr(program, "subprocess", sys.modules[__name__])


if __name__ == "__main__":
    # As a program it is a Python that is warm: `python tests/warm.py -m gdntune ...`.
    sys.exit(Popen(sys.argv, stdout=1, stderr=2).wait())
