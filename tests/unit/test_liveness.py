"""Who this process is and who is provably dead: with real processes, real signals and real namespaces."""

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from queue_core.liveness import Process, ProcessTable, ProcFs, Ps, new_worker, proof_of_death, this_process
from queue_core.model import Holder, Worker
from tests.support.children import (
    HIDDEN_PROCESSES,
    OTHER_UPTIME,
    OWN_HOST_NAME,
    PID_NAMESPACE,
    Child,
    require,
    running,
    running_inside,
)

GONE = "its process is gone"
REPLACED = "its process is gone and another one has its number"
ZOMBIE = "its process has exited and is a zombie"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="/proc and namespaces are Linux's")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(
    params=[
        pytest.param(ProcFs(), id="proc", marks=linux_only),
        pytest.param(Ps(), id="ps", marks=pytest.mark.skipif(not Path("/bin/ps").exists(), reason="there is no ps")),
    ]
)
def table(request: pytest.FixtureRequest) -> ProcessTable:
    """Both ways to look; `ps` can be asked on Linux too."""
    found: ProcessTable = request.param
    return found


# Who we are


def test_a_process_is_the_same_at_every_look() -> None:
    assert this_process() == this_process()
    assert this_process().pid == os.getpid()
    assert all(msgspec.structs.astuple(this_process()))


def test_two_processes_of_one_machine_share_its_boot_and_differ_in_number_and_start() -> None:
    here, there = this_process(), _worker_from()
    assert (there.host, there.boot_id, there.pid_namespace) == (here.host, here.boot_id, here.pid_namespace)
    assert there.pid != here.pid
    assert there.process_started != here.process_started


def test_a_worker_says_where_it_runs_and_what_it_does() -> None:
    here, lease = this_process(), timedelta(seconds=60)
    worker = new_worker(queues=["notes"], job_types=["Note"], lease=lease, version="1.2")
    assert _place(worker) == here
    assert (worker.queues, worker.job_types, worker.lease, worker.version) == (["notes"], ["Note"], lease, "1.2")


def test_each_start_of_a_worker_has_an_id_of_its_own() -> None:
    assert len({_our_worker().id for _ in range(1_000)}) == 1_000


def test_a_forked_child_does_not_take_itself_for_its_parent() -> None:
    parent, child = _output(sys.executable, "-c", _FORK).splitlines()
    assert parent != child


def test_a_host_whose_name_is_no_text_can_still_be_written_down() -> None:
    require(OWN_HOST_NAME)
    assert _output(*OWN_HOST_NAME, sys.executable, "-c", _STRANGE_HOST) == "a?b\n"


# Who is dead


def test_a_living_process_is_not_dead(table: ProcessTable) -> None:
    with _cat() as child:
        assert _proof(child, table) is None
    assert proof_of_death(_holder(_our_worker()), this_process()) is None


def test_a_process_that_was_killed_is_gone(table: ProcessTable) -> None:
    with _cat() as child:
        worker = _worker_of(child, table)
        child.kill()
        assert table.entry(child.pid) is None
        assert _proof(worker, table) == GONE


def test_a_zombie_is_dead(table: ProcessTable) -> None:
    with _cat() as child:
        worker = _worker_of(child, table)
        child.kill_without_waiting()
        assert _proof(worker, table) == ZOMBIE


def test_a_stopped_process_lives(table: ProcessTable) -> None:
    with _cat() as child:
        worker = _worker_of(child, table)
        child.stop()
        assert _proof(worker, table) is None


def test_a_process_whose_number_another_one_has_is_gone(table: ProcessTable) -> None:
    with _cat() as child:
        worker = _worker_of(child, table, process_started="before")
        assert _proof(worker, table) == REPLACED


def test_without_its_start_a_process_is_only_known_to_be_gone_when_its_number_is_free(table: ProcessTable) -> None:
    with _cat() as child:
        worker = _worker_of(child, table, process_started="")
        assert _proof(worker, table) is None
        child.kill()
        assert _proof(worker, table) == GONE


@pytest.mark.parametrize("unlike", ["boot_id", "pid_namespace"])
@pytest.mark.parametrize("value", ["another", ""])
def test_a_number_proves_nothing_in_another_boot_or_namespace_or_an_unknown_one(unlike: str, value: str) -> None:
    with _cat() as child:
        worker = _worker_of(child, ProcFs())
        child.kill()
    assert _proof(worker, ProcFs()) == GONE
    changed = msgspec.structs.replace(worker, **{unlike: value})
    here = msgspec.structs.replace(_here(ProcFs()), **{unlike: value})
    assert _proof(changed, ProcFs()) is None
    assert proof_of_death(_holder(worker), here) is None
    # Two that don't know where they are may be anywhere.
    assert proof_of_death(_holder(changed), here) == (GONE if value else None)


@pytest.mark.parametrize("pid", [0, -1, -os.getpid(), 2**31, 2**70])
def test_a_number_that_is_no_process_is_never_signalled(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[tuple[int, int]] = []

    def note(number: int, signal: int) -> None:
        signalled.append((number, signal))

    monkeypatch.setattr(os, "kill", note)
    nobody = msgspec.structs.replace(_our_worker(), pid=pid, process_started="never")
    assert proof_of_death(_holder(nobody), this_process()) is None
    assert not signalled


def test_a_worker_that_said_so_or_let_go_of_its_lock_is_dead_wherever_it_was() -> None:
    elsewhere = msgspec.structs.replace(_our_worker(), boot_id="another")
    assert proof_of_death(_holder(elsewhere), this_process()) is None
    assert proof_of_death(_holder(elsewhere, stopped=True), this_process()) == "it said that it stopped"
    assert proof_of_death(_holder(elsewhere, let_go=True), this_process()) == "the lock on its file is free"


# What Linux has in store


@linux_only
@pytest.mark.parametrize("name", ["a) Z 1 (b", ") (", "a b)", "))((", "a\nb) Z 1"])
def test_a_command_may_have_any_name(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.symlink_to("/bin/cat")
    with _cat(program) as child:
        assert Path(f"/proc/{child.pid}/comm").read_text() == f"{name}\n"
        entry = ProcFs().entry(child.pid)
        assert entry is not None
        assert entry.started.isdigit()
        assert not entry.ended


@linux_only
def test_a_process_lives_when_only_its_main_thread_has_ended() -> None:
    with running(sys.executable, "-c", _WITHOUT_MAIN_THREAD) as child:
        assert child.says() == "the main thread is a zombie"
        assert b") Z " in Path(f"/proc/{child.pid}/stat").read_bytes()
        worker = _worker_of(child, ProcFs())
        assert _proof(worker, ProcFs()) is None
        child.kill_without_waiting()
        assert _proof(worker, ProcFs()) == ZOMBIE


@linux_only
@root_only
def test_a_process_of_another_user_lives() -> None:
    assert _output(sys.executable, "-c", _AS_NOBODY) == "not permitted, shown: True, None\n"


@linux_only
@root_only
def test_a_process_that_proc_hides_lives() -> None:
    require(HIDDEN_PROCESSES)
    said = _output(*HIDDEN_PROCESSES, sys.executable, "-c", _AS_NOBODY)
    assert said == "not permitted, shown: False, None\n"


@linux_only
def test_across_pid_namespaces_nothing_is_proved() -> None:
    with running_inside(PID_NAMESPACE, sys.executable, "-c", _INTRODUCE) as child:
        inside, outside = _read(child), _our_worker()
        assert (inside.boot_id, inside.pid) == (outside.boot_id, 1)
        assert inside.pid_namespace != outside.pid_namespace
        child.kill()
    # Number 1 out here is another process, and in there no other number is anybody's.
    assert proof_of_death(_holder(inside), this_process()) is None
    assert _proof_from(PID_NAMESPACE, outside) is None


@linux_only
def test_a_proc_of_another_namespace_proves_nothing() -> None:
    with running_inside(PID_NAMESPACE, sys.executable, "-c", _INTRODUCE) as child:
        inside = _read(child)
        # In its namespace, but with the /proc of ours: there number 1 is another process.
        enter = ("nsenter", "--target", str(child.pid), "--pid", *(["--user"] if os.geteuid() else []))
        assert _worker_from(enter).pid_namespace == inside.pid_namespace
        assert _worker_from(enter).process_started == ""
        assert _proof_from(enter, inside) is None
        assert _proof_from(enter, msgspec.structs.replace(inside, pid=30_000)) == GONE


@linux_only
def test_starts_as_two_time_namespaces_see_them_are_not_compared() -> None:
    require(OTHER_UPTIME)
    ours = _our_worker()
    there = _worker_from(OTHER_UPTIME)
    assert int(there.process_started) - int(ours.process_started) >= 1_000 * os.sysconf("SC_CLK_TCK")
    assert _proof_from(OTHER_UPTIME, ours) is None


@linux_only
def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    nothing = ProcFs(tmp_path)
    assert (nothing.boot_id(), nothing.pid_namespace(), nothing.entry(os.getpid())) == ("", "", None)
    assert proof_of_death(_holder(_our_worker()), this_process(nothing), nothing) is None


@linux_only
@pytest.mark.parametrize("stat", ["", "7 (cat", "7 (cat) Z", "7 (cat) Z" + " x" * 40])
def test_an_entry_that_can_not_be_read_proves_nothing(stat: str, tmp_path: Path) -> None:
    assert _entry_of(stat, tmp_path) is None


@linux_only
@pytest.mark.parametrize(
    ("state", "threads", "ended"), [("Z", 1, True), ("X", 0, True), ("Z", 2, False), ("T", 1, False), ("D", 1, False)]
)
def test_the_state_and_the_number_of_threads_tell_who_has_ended(
    state: str, threads: int, ended: bool, tmp_path: Path
) -> None:
    entry = _entry_of(f"7 (cat) {state} {'0 ' * 16}{threads} 0 4711 0", tmp_path)
    assert entry == ("4711", ended)


# What ps has in store


@pytest.mark.skipif(not Path("/bin/ps").exists(), reason="there is no ps")
def test_ps_tells_the_same_start_to_users_of_any_time_zone_and_language(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Ps().entry(os.getpid())
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert entry is not None
    assert Ps().entry(os.getpid()) == entry
    assert datetime.strptime(entry.started, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC) <= datetime.now(UTC)


# Helpers


@contextmanager
def _cat(program: Path | None = None) -> Generator[Child]:
    """A program that waits, under any name."""
    with running("cat", program=program) as child:
        # An answer comes from it alone: for a moment after its start, the new process still has our name.
        child.hear("hello")
        assert child.says() == "hello"
        yield child


def _here(table: ProcessTable) -> Process:
    """Us, in a boot that has a name: `ps` on Linux does not know it."""
    return msgspec.structs.replace(this_process(table), boot_id="this boot")


def _our_worker() -> Worker:
    return new_worker(queues=["notes"], job_types=["Note"], lease=timedelta(seconds=60), version="0")


def _worker_of(child: Child, table: ProcessTable, **changes: Any) -> Worker:
    """The worker that a child would be."""
    entry, here = table.entry(child.pid), _here(table)
    assert entry is not None
    place = {"boot_id": here.boot_id, "pid_namespace": here.pid_namespace, "process_started": entry.started}
    return msgspec.structs.replace(_our_worker(), **{**place, "pid": child.pid, **changes})


def _holder(worker: Worker, *, stopped: bool = False, let_go: bool = False) -> Holder:
    return Holder(worker, datetime(2030, 1, 1, tzinfo=UTC), stopped, let_go)


def _proof(who: Child | Worker, table: ProcessTable) -> str | None:
    worker = who if isinstance(who, Worker) else _worker_of(who, table)
    return proof_of_death(_holder(worker), _here(table), table)


def _place(worker: Worker) -> Process:
    return msgspec.convert(worker, Process, from_attributes=True)


def _entry_of(stat: str, proc: Path) -> tuple[str, bool] | None:
    """What is made of the text of a stat file."""
    for number, name, text in (("self", "status", f"NSpid:\t{os.getpid()}\n"), ("7", "stat", stat)):
        (proc / number).mkdir()
        (proc / number / name).write_text(text)
    entry = ProcFs(proc).entry(7)
    return None if entry is None else (entry.started, entry.ended)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _read(child: Child) -> Worker:
    return msgspec.json.decode(child.says(), type=Worker)


def _worker_from(namespace: Sequence[str] = ()) -> Worker:
    """Who a process in that namespace takes itself for."""
    with running(*namespace, sys.executable, "-c", _INTRODUCE) as child:
        return _read(child)


def _proof_from(namespace: Sequence[str], worker: Worker) -> str | None:
    """What a process in that namespace makes of a worker."""
    said = _output(*namespace, sys.executable, "-c", _LOOK, msgspec.json.encode(_holder(worker)).decode())
    return msgspec.json.decode(said, type=str | None)


_FORK = """
import os
from queue_core.liveness import this_process
print(this_process().pid, flush=True)
if os.fork() == 0:
    print(this_process().pid, flush=True)
else:
    os.wait()
"""

_STRANGE_HOST = """
import socket
from queue_core.liveness import this_process
socket.sethostname(b"a\\xffb")
print(this_process().host)
"""

_INTRODUCE = """
import sys
from datetime import timedelta
import msgspec
from queue_core.liveness import new_worker
worker = new_worker(queues=["notes"], job_types=["Note"], lease=timedelta(seconds=60), version="0")
print(msgspec.json.encode(worker).decode(), flush=True)
sys.stdin.read()
"""

_LOOK = """
import sys
import msgspec
from queue_core.liveness import proof_of_death, this_process
from queue_core.model import Holder
proof = proof_of_death(msgspec.json.decode(sys.argv[1], type=Holder), this_process())
print(msgspec.json.encode(proof).decode())
"""

_AS_NOBODY = """
import os, subprocess
from datetime import UTC, datetime, timedelta
import msgspec
from queue_core.liveness import ProcFs, new_worker, proof_of_death, this_process
from queue_core.model import Holder
with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
    worker = new_worker(queues=[], job_types=[], lease=timedelta(seconds=60), version="0")
    started = ProcFs().entry(child.pid).started
    worker = msgspec.structs.replace(worker, pid=child.pid, process_started=started)
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    try:
        os.kill(child.pid, 0)
    except PermissionError:
        print("not permitted", end=", ")
    print("shown:", os.path.exists(f"/proc/{child.pid}"), end=", ")
    print(proof_of_death(Holder(worker, datetime.now(UTC), False, False), this_process()))
"""

_WITHOUT_MAIN_THREAD = """
import ctypes, os, sys, threading
def go_on():
    while b") Z " not in open("/proc/self/stat", "rb").read():
        os.sched_yield()
    print("the main thread is a zombie", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
