"""What pip installs: the wheel has every module of the checkout, in one package, and works outside of it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from queue_core.schema import head_revision
from tests.support.databases import PostgresDatabase, SqliteDatabase

CHECKOUT = Path(__file__).parent.parent

SHIPPED = {"queue_core": "queue_core", "backends": "queue_core/backends", "alembic": "queue_core/migrations"}
"""The folders of the checkout that are installed, and where."""


@dataclass(frozen=True)
class Built:
    """The two archives, and the copy of the checkout that they were built from."""

    source: Path
    wheel: Path
    sdist: Path

    def shipped_files(self) -> set[str]:
        """What has to be installed of the source, by its installed name."""
        return {
            f"{target}/{path.relative_to(self.source / folder).as_posix()}"
            for folder, target in SHIPPED.items()
            for path in (self.source / folder).rglob("*")
            if path.suffix == ".py" or path.name in ("py.typed", "script.py.mako")
        }

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The archives, built once: the wheel from the source archive, so that it is known to be complete."""
    folder = tmp_path_factory.mktemp("built")
    source, output = folder / "source", folder / "dist"
    for name in _output("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=CHECKOUT).splitlines():
        if (CHECKOUT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, source / name)
    isolation = ["--no-isolation"] if _has_setuptools() else []
    _output(sys.executable, "-m", "build", *isolation, "--outdir", str(output), cwd=source)
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    return Built(source, wheel, sdist)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it asks for, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("installed")
    _output(sys.executable, "-m", "venv", "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    _output(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(built.wheel), cwd=folder)
    return python


def test_the_wheel_has_every_module_of_the_checkout_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == built.shipped_files()


def test_the_source_archive_has_what_the_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {PurePosixPath(member.name) for member in archive if member.isfile()}
    inside = {str(name.relative_to(name.parts[0])) for name in names}
    assert {_installed_name(name) for name in inside if name.partition("/")[0] in SHIPPED} == built.shipped_files()
    assert inside >= {"pyproject.toml", "README.md", "LICENSE"}


def test_the_metadata_asks_for_what_the_library_needs_and_for_no_tool_of_its_developers(built: Built) -> None:
    project = tomllib.loads((built.source / "pyproject.toml").read_text())
    needed = _names(line for line in built.metadata().get_all("Requires-Dist", []) if "extra ==" not in line)
    assert needed == _names(project["project"]["dependencies"])
    tools = _names(project["dependency-groups"]["dev"])
    assert {"mypy", "pydantic", "pytest"} <= set(tools)
    assert set(tools).isdisjoint(needed)


def test_the_checkouts_alembic_folder_is_no_package_that_hides_the_library() -> None:
    assert not (CHECKOUT / "alembic" / "__init__.py").exists()


def test_an_installation_adds_no_top_level_name_but_queue_core(installed: Path, tmp_path: Path) -> None:
    record = _output(str(installed), "-c", _RECORD, cwd=tmp_path).split()
    scripts = {name for name in record if name.startswith("../")}
    assert [PurePosixPath(name).name for name in scripts] == ["queue-core"]
    tops = {name.partition("/")[0] for name in record if name not in scripts}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"queue_core"}


def test_an_installation_works_outside_the_checkout(
    installed: Path, tmp_path: Path, new_postgres: Callable[[], PostgresDatabase]
) -> None:
    sqlite, postgres = SqliteDatabase(tmp_path / "jobs.db"), new_postgres()
    found = Path(_output(str(installed), "-c", _USE, sqlite.url, postgres.url, cwd=tmp_path).strip())
    assert found.is_relative_to(installed.parent.parent)
    for database in (sqlite, postgres):
        assert database.jobs("job_type, status") == [("Note", "pending")]


def test_an_installation_has_the_command(
    installed: Path, tmp_path: Path, new_postgres: Callable[[], PostgresDatabase]
) -> None:
    command = str(installed.parent / "queue-core")
    for database in (SqliteDatabase(tmp_path / "jobs.db"), new_postgres()):
        said = _output(command, "migrate", "--url", database.url, cwd=tmp_path)
        assert said == f"the tables are at revision {head_revision()}\n"
        assert database.count() == 0


def test_the_import_brings_in_no_driver_and_nothing_optional(tmp_path: Path) -> None:
    modules = _output(
        sys.executable, "-c", "import sys, queue_core; queue_core.Queue; print(*sys.modules)", cwd=tmp_path
    ).split()
    assert "queue_core.queue" in modules
    assert {"asyncpg", "aiosqlite", "sqlite3", "psycopg", "pydantic", "rich"}.isdisjoint(modules)


# Helpers


def _output(*command: str, cwd: Path) -> str:
    """What a command prints. It inherits none of our paths, and if it fails all that it said is shown."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _has_setuptools() -> bool:
    """Whether the environment of the tests can build; otherwise the build fetches its own."""
    try:
        return int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def _installed_name(name: str) -> str:
    folder, _, rest = name.partition("/")
    return f"{SHIPPED[folder]}/{rest}"


def _names(requirements: Iterable[str]) -> Sequence[str]:
    return [re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements]


_RECORD = """
from importlib.metadata import files
print(*files("queue-core"))
"""

_USE = """
import asyncio, sys
from sqlalchemy.ext.asyncio import create_async_engine
import queue_core
from queue_core import Context, Job, Queue

class Note(Job):
    async def run(self, ctx: Context) -> None: ...

async def main(url):
    engine = create_async_engine(url)
    queue = await Queue.init(engine, jobs=[Note])
    await Note().enqueue()
    await queue.close()
    await engine.dispose()

for url in sys.argv[1:]:
    asyncio.run(main(url))
print(queue_core.__file__)
"""
