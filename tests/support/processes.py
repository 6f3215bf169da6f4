"""Python programs in processes of their own, one or several at once."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Finished: TypeAlias = "subprocess.CompletedProcess[str]"


def run_python(*arguments: str | Path, cwd: Path, **variables: str) -> Finished:
    """`python …` in that folder, whose modules it finds first; no database is named in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "QUEUE_CORE_URL"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def output_of(*arguments: str | Path, cwd: Path) -> str:
    """What a program prints that has to end well."""
    done = run_python(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def run_together(count: int, script: str, *arguments: str, cwd: Path) -> Sequence[tuple[int, str]]:
    """Exit status and complaints of several processes. Each says when it is ready; then all are let go at once."""
    gate, opener = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=cwd,
            stdin=gate,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    os.close(gate)
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    os.close(opener)
    complaints = [process.communicate()[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, complaints, strict=True)]
