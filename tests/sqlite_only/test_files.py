"""Which SQLite files can carry a queue, and what is said of those that can't."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from queue_core import Queue, QueueError
from tests.support.jobs import Note


async def refusal(url: str) -> str:
    """What opening a queue there says, at once and not after the time that it waits for a database."""
    engine = create_async_engine(url)
    with pytest.raises(QueueError) as refused:
        await Queue(engine, give_up_after=60).open()
    await engine.dispose()
    return f"{type(refused.value).__name__}: {refused.value}"


async def test_a_file_by_its_uri_is_a_file_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "my jobs.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///file:{path}?uri=true")
    plain = create_engine(f"sqlite:///{path}")
    async with Queue(engine, jobs=[Note]) as queue:
        async with AsyncSession(engine) as session, session.begin():
            await queue.enqueue(Note(), session=session)
        with Session(plain) as sync_session, sync_session.begin():
            queue.enqueue_sync(Note(), session=sync_session)
        assert (await queue.counts())["notes"].pending == 2
    await engine.dispose()
    plain.dispose()
    assert path.exists()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    for url in (
        f"sqlite+aiosqlite:///{tmp_path}/no/jobs.db",
        f"sqlite+aiosqlite:///file:{tmp_path}/no/jobs.db?uri=true",
    ):
        told = await refusal(url)
        assert told.startswith("ConfigurationError: the folder of the SQLite file")
        assert told.endswith(f"does not exist: create {tmp_path}/no first")


async def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100, encoding="utf-8")
    assert "file is not a database" in await refusal(f"sqlite+aiosqlite:///{path}")
    assert path.read_text(encoding="utf-8").startswith("dear diary")


async def test_a_file_that_can_not_be_opened_for_writing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.symlink_to(path)  # even root can't open this
    told = await refusal(f"sqlite+aiosqlite:///{path}")
    assert told.startswith("ConfigurationError: the SQLite file")
    assert "can't be opened for writing (Too many levels of symbolic links): give this user the right" in told
