"""The programs in the README run as they are printed, and print what it says; the examples run too."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.databases import PostgresDatabase
from tests.support.processes import output_of

ROOT = Path(__file__).parent.parent
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
PROGRAMS = PROGRAM.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_program_of_the_readme_is_followed_by_what_it_prints() -> None:
    assert len(PROGRAMS) == (ROOT / "README.md").read_text(encoding="utf-8").count("```python") == 2


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=["first minute", "in a transaction"])
def test_a_program_of_the_readme_prints_what_the_readme_says(program: str, printed: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    assert output_of(script, cwd=tmp_path) == printed


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=["first minute", "in a transaction"])
def test_with_one_line_changed_it_does_the_same_on_postgres(
    program: str, printed: str, tmp_path: Path, new_postgres: Callable[[], PostgresDatabase]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(re.sub(r"sqlite\+aiosqlite:///\w+\.db", new_postgres().url, program), encoding="utf-8")
    assert output_of(script, cwd=tmp_path) == printed


def test_the_demo_runs_on_sqlite(tmp_path: Path) -> None:
    printed = output_of(ROOT / "examples" / "demo.py", cwd=tmp_path)
    assert "200 inserted, 1800 were there already" in printed
    assert re.search(r"mail +6,100 +200\n", printed)


def test_the_demo_runs_on_postgres(tmp_path: Path, new_postgres: Callable[[], PostgresDatabase]) -> None:
    printed = output_of(ROOT / "examples" / "demo.py", new_postgres().url, cwd=tmp_path)
    assert "200 inserted, 1800 were there already" in printed
    assert re.search(r"images +20,000 +0\n", printed)


def test_the_commands_of_the_readme_are_in_the_makefile() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"make ([a-z-]+)", readme))
    assert {"demo", "test", "help"} <= commands
    assert all(re.search(rf"^{command}:.*## ", makefile, re.MULTILINE) for command in commands)
