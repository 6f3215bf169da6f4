"""Programs that a test starts, stops and kills, and may leave as zombies; namespaces of the kernel to run them in."""

import os
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_ORDINARY_USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
_UNSHARE = ("unshare", *_ORDINARY_USER, "--fork", "--kill-child")

PID_NAMESPACE: Sequence[str] = (*_UNSHARE, "--pid", "--mount-proc")
"""What goes before a command to run it as number 1 of a pid namespace of its own, as a container does."""
OTHER_UPTIME: Sequence[str] = (*_UNSHARE, "--time", "--boottime", "1000")
"""The same for a time namespace: to the command, the machine has been up for 1,000 seconds longer."""
OWN_HOST_NAME: Sequence[str] = (*_UNSHARE, "--uts")
HIDDEN_PROCESSES: Sequence[str] = (
    *(*_UNSHARE, "--pid", "--mount", "sh", "-c"),
    'mount -t proc -o hidepid=2 proc /proc && exec "$0" "$@"',
)
"""A pid namespace whose /proc shows each user only processes of that user."""


class Child:
    """A running program. It waits for the end of its input, so that it never outlives the tests."""

    def __init__(self, process: "subprocess.Popen[str]", pid: int) -> None:
        self._process = process
        self.pid = pid

    def says(self) -> str:
        """Its next line, without the end; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def hear(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Take the processor away from it."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """As the kernel does when memory runs out; its parent has heard of it."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def kill_without_waiting(self) -> None:
        """The same with a parent that does not care: the child is a zombie from now on."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@contextmanager
def running(*command: str | Path, program: Path | None = None, **variables: str) -> Generator[Child]:
    """A program, by its command; `program` is the file if that is not the command's first word."""
    with _process(command, program, variables) as process:
        yield Child(process, process.pid)


@contextmanager
def running_inside(namespace: Sequence[str], *command: str | Path) -> Generator[Child]:
    """A program in a namespace. Its number is the one that it has out here."""
    require(namespace)
    with _process([*namespace, *command], None, {}) as process:
        # `unshare` answers for it: its first child is the program, once that has spoken.
        yield _Inside(process, 0)


class _Inside(Child):
    def says(self) -> str:
        line = super().says()
        unshare = self._process.pid
        self.pid = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())
        return line


def require(namespace: Sequence[str]) -> None:
    """Skip the test where the kernel does not let us have such a namespace."""
    try:
        tried = subprocess.run([*namespace, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare: namespaces are Linux's")
    if tried.returncode != 0:
        pytest.skip(f"this system does not allow the namespace: {tried.stderr.strip()}")


@contextmanager
def _process(
    command: Sequence[str | Path], program: Path | None, variables: Mapping[str, str]
) -> "Generator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        command,
        executable=program,
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
