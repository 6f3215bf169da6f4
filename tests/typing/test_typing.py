"""What type checkers say: nothing about good usage, and something about each misuse."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import queue_core

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.py")
REJECTED = sorted(Path(__file__).with_name("rejected").glob("*.py"))

Errors: TypeAlias = Mapping[Path, Mapping[int, Sequence[str]]]
"""The messages of one type checker, by file and line."""


@pytest.fixture(scope="session")
def mypy() -> Errors:
    options = ["--strict", "--config-file=", "--explicit-package-bases", "--follow-imports=silent", "--output=json"]
    # A cache of its own: one with other options would be thrown away by the next `make check`.
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'tests'}"
    lines = _output("mypy", *options, cache, str(ACCEPTED), *map(str, REJECTED)).splitlines()
    reports = [json.loads(line) for line in lines]
    return _by_place((each["file"], each["line"], each["message"]) for each in reports if each["severity"] == "error")


@pytest.fixture(scope="session")
def basedpyright(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    config = tmp_path_factory.mktemp("basedpyright") / "pyrightconfig.json"
    settings = {
        "include": [os.path.relpath(file, config.parent) for file in (ACCEPTED, *REJECTED)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "strict",
    }
    config.write_text(json.dumps(settings))
    output = _output("basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(config))
    reports = [each for each in json.loads(output)["generalDiagnostics"] if each["severity"] == "error"]
    return _by_place((each["file"], each["range"]["start"]["line"] + 1, each["message"]) for each in reports)


@pytest.fixture(params=["mypy", "basedpyright"])
def errors(request: pytest.FixtureRequest) -> Errors:
    found: Errors = request.getfixturevalue(request.param)
    return found


def _output(checker: str, *arguments: str) -> str:
    """What a type checker prints; both exit with 1 when they have found errors."""
    command = [sys.executable, "-m", checker, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


def _by_place(reports: Any) -> Errors:
    found: dict[Path, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file, line, message in reports:
        found[ROOT / file][line].append(message)
    return found


def test_good_usage_has_no_type_errors(errors: Errors) -> None:
    assert errors.get(ACCEPTED, {}) == {}


@pytest.mark.parametrize("file", REJECTED, ids=[file.stem for file in REJECTED])
def test_each_misuse_is_a_type_error_and_nothing_else_is(errors: Errors, file: Path) -> None:
    lines = file.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if "# rejected" in line}
    found = errors.get(file, {})
    assert marked
    assert {line: lines[line - 1] for line in marked - found.keys()} == {}, "misuse that goes unnoticed"
    assert {line: found[line] for line in found.keys() - marked} == {}, "errors where there is no misuse"


def test_good_usage_can_be_defined() -> None:
    importlib.import_module("tests.typing.accepted")


def test_good_usage_covers_the_whole_api() -> None:
    used = set(re.findall(r"\w+", ACCEPTED.read_text()))
    assert set(queue_core.__all__) - used == set()
