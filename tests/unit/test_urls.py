"""Database URLs as hosting providers write them."""

import pytest

from queue_core import ConfigurationError, UnsupportedDatabase
from queue_core.urls import asynchronous_url


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("sqlite:///jobs.db", "sqlite+aiosqlite:///jobs.db"),
        ("sqlite:////var/jobs.db", "sqlite+aiosqlite:////var/jobs.db"),
        ("sqlite+aiosqlite:///jobs.db", "sqlite+aiosqlite:///jobs.db"),
        ("sqlite+pysqlite:///jobs.db", "sqlite+aiosqlite:///jobs.db"),
        ("postgres://u:p@h/d", "postgresql+asyncpg://u:p@h/d"),
        ("postgresql://u:p@h:5433/d", "postgresql+asyncpg://u:p@h:5433/d"),
        ("postgresql+psycopg2://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgres://h/d?sslmode=require", "postgresql+asyncpg://h/d?ssl=require"),
        ("postgresql:///d?host=/run/postgresql", "postgresql+asyncpg:///d?host=%2Frun%2Fpostgresql"),
        ("postgres://u:p%40ss%2Fword@h/d", "postgresql+asyncpg://u:p%40ss%2Fword@h/d"),
    ],
)
def test_a_url_gets_the_asynchronous_driver_of_its_database(given: str, taken: str) -> None:
    assert asynchronous_url(given).render_as_string(hide_password=False) == taken


@pytest.mark.parametrize("given", ["", "jobs.db", "://", "sqlite:jobs.db", "not a url, hunter2"])
def test_a_text_that_is_no_url_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        asynchronous_url(given)
    assert str(refused.value) == (
        "the database URL can't be read: write sqlite:///jobs.db or postgresql://user@host/database"
    )


def test_a_port_that_is_no_number_is_refused_like_any_url_that_can_not_be_read() -> None:
    with pytest.raises(ConfigurationError, match=r"^the database URL can't be read: write sqlite:///jobs\.db or "):
        asynchronous_url("postgresql://u:hunter2@h:port/d")


@pytest.mark.parametrize("driver", ["mysql", "mysql+aiomysql", "oracle", "mongodb"])
def test_a_database_of_another_kind_is_refused_without_its_password(driver: str) -> None:
    with pytest.raises(UnsupportedDatabase) as refused:
        asynchronous_url(f"{driver}://u:hunter2@h/d")
    assert str(refused.value) == (
        f"queue-core can't use {driver}: write sqlite:///jobs.db or postgresql://user@host/database"
    )
