"""Who this process is, and whether another worker is provably dead.

A worker's claims may be taken back before its lease has run out only on a proof that it is dead:

it stopped     its row says so
it let go      the lock that its process held on a file beside the database is free (the backend looks)
its process    is gone, is a zombie, or another one has its number

The last is looked up in the table of processes of this machine. A number means the same process only within one boot
and one pid namespace, so both have to be the same here as there: the rest is left to the lease. That the kernel gives
the number of a pid namespace to a new one does no harm, because all that ran in the old one has ended by then.

gone           a signal of number 0 finds nobody. That `/proc` or `ps` does not show it is no proof: with `hidepid` a
               living process of another user is not there either
zombie         it has exited and nobody has waited for it. A process whose main thread alone has ended looks the same
               but for the number of its threads, and may well be a worker
another one    the process of that number started at another time. That is in ticks since the boot, which a time
               namespace moves: two of them can't be compared, so the time namespace is part of the pid namespace's name

Whatever can't be read, is denied or contradicts itself proves nothing: a doubt never takes a job. A stopped process
(SIGSTOP, a debugger) lives. Where the system tells nothing (Windows; Linux without `/proc`) the boot id is empty, and
an empty one is nobody's. Copies of a running machine made from one snapshot of its memory can't be told apart: they
have the same boot id, and a worker of one is not to be found in the other.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from queue_core.ids import time_ordered_uuid
from queue_core.model import Holder, JobTypeName, QueueName, Worker, WorkerId

_LARGEST_PID: Final = 2**31 - 1


class Process(Struct, frozen=True, kw_only=True):
    """What tells this process from any other, on any machine and at any time."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_started: str


class Entry(Struct, frozen=True):
    """What a table of processes shows under a number. `started` only has to differ for different processes."""

    started: str
    ended: bool


class ProcessTable(Protocol):
    """How a system tells about its processes."""

    @property
    def blocks(self) -> bool:
        """Whether a look takes so long that an event loop must not wait for it."""
        ...

    def boot_id(self) -> str:
        """New at each start of the machine; empty when that can't be known."""
        ...

    def pid_namespace(self) -> str:
        """Within which a number is one process; empty when that can't be known."""
        ...

    def entry(self, pid: int) -> Entry | None:
        """The process of that number; None when none is shown, which does not prove that there is none."""
        ...


def process_table() -> ProcessTable:
    """The one of this system."""
    return ProcFs() if sys.platform == "linux" else Ps()


def this_process(table: ProcessTable | None = None) -> Process:
    """The process that calls. Never kept from before a fork: the child would go by its parent's number."""
    table = table or process_table()
    entry = table.entry(os.getpid())
    return Process(
        # A host's name may be any bytes, and no database takes what Python makes of those that are no text.
        host=socket.gethostname().encode(errors="replace").decode(),
        boot_id=table.boot_id(),
        pid_namespace=table.pid_namespace(),
        pid=os.getpid(),
        process_started=entry.started if entry else "",
    )


def new_worker(
    *, queues: Sequence[QueueName], job_types: Sequence[JobTypeName], lease: timedelta, version: str
) -> Worker:
    """A worker of this process, under an id that no other start has had. To be made where its jobs will run."""
    here = this_process()
    return Worker(
        id=WorkerId(time_ordered_uuid()),
        host=here.host,
        boot_id=here.boot_id,
        pid_namespace=here.pid_namespace,
        pid=here.pid,
        process_started=here.process_started,
        version=version,
        queues=queues,
        job_types=job_types,
        lease=lease,
    )


def proof_of_death(holder: Holder, here: Process, table: ProcessTable | None = None) -> str | None:
    """How we know that a worker is dead, in words; None while there is a doubt."""
    if holder.stopped:
        return "it said that it stopped"
    if holder.let_go:
        return "the lock on its file is free"
    worker = holder.worker
    if _same(worker.boot_id, here.boot_id) and _same(worker.pid_namespace, here.pid_namespace):
        return _proof_of_end(worker.pid, worker.process_started, table or process_table())
    return None


def _same(theirs: str, ours: str) -> bool:
    """Whether two names are the same one; what is not known is not the same as anything."""
    return theirs != "" and theirs == ours


def _proof_of_end(pid: int, started: str, table: ProcessTable) -> str | None:
    # To signal 0 or a negative number is to signal a group of processes, or all of them.
    if not 0 < pid <= _LARGEST_PID:
        return None
    if _is_gone(pid):
        return "its process is gone"
    entry = table.entry(pid)
    if entry is None:
        return None
    if started and entry.started and entry.started != started:
        return "its process is gone and another one has its number"
    return "its process has exited and is a zombie" if entry.ended else None


def _is_gone(pid: int) -> bool:
    """Whether the system knows no process of that number. On Windows this would end it: see the boot id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # not permitted: it is somebody else's, and there
        return False
    return False


class ProcFs:
    """Linux: the files below `/proc`."""

    blocks = False

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root

    def boot_id(self) -> str:
        try:
            return (self._root / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def pid_namespace(self) -> str:
        spaces = self._root / "self/ns"
        try:
            pid = str((spaces / "pid").readlink())
        except OSError:
            return ""
        try:
            return f"{pid} {(spaces / 'time').readlink()}"
        except FileNotFoundError:  # Linux before 5.6 has no time namespaces
            return pid
        except OSError:
            return ""

    def entry(self, pid: int) -> Entry | None:
        if not self._shows_our_namespace():
            return None
        try:
            stat = (self._root / str(pid) / "stat").read_bytes()
        except OSError:
            return None
        # Behind the last parenthesis: the command's name before it may hold spaces and parentheses of its own.
        fields = stat[stat.rfind(b")") + 1 :].split()
        try:
            state, threads, started = fields[0], int(fields[17]), fields[19].decode()
        except (IndexError, ValueError):
            return None
        # A main thread that has exited is counted for as long as others run: 2 are a living process.
        return Entry(started, ended=state in (b"Z", b"X") and threads <= 1)

    def _shows_our_namespace(self) -> bool:
        """Whether the numbers in here are those that we use.

        After `unshare --pid` without a new `/proc`, number 1 in here is the init of the machine and not ours.
        """
        try:
            status = (self._root / "self/status").read_bytes()
        except OSError:
            return False
        # Our number in each namespace from that of this /proc down to our own: a single one when they are the same.
        numbers = [line.split()[1:] for line in status.splitlines() if line.startswith(b"NSpid:")]
        return numbers == [[str(os.getpid()).encode()]]


class Ps:
    """macOS: what `ps` and `sysctl` print. Each look is a process of its own."""

    blocks = True

    def boot_id(self) -> str:
        return _printed("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")

    def pid_namespace(self) -> str:
        return "the only one"

    def entry(self, pid: int) -> Entry | None:
        # Two options: behind the first equals sign, the rest of one is the title of its column.
        started, _, state = _printed("/bin/ps", "-o", "lstart=", "-o", "state=", "-p", str(pid)).rpartition(" ")
        return Entry(started.strip(), ended=state.startswith("Z")) if started else None


def _printed(*command: str) -> str:
    """What a command says in one line; empty when there is no such command, or it fails or hangs."""
    try:
        done = subprocess.run(  # noqa: S603 a number is all that we put into these
            command,
            # A start is printed in local time, by local custom: two workers may not agree on either.
            env={"LC_ALL": "C", "TZ": "UTC0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
