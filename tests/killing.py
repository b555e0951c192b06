"""Runs of a script that die in the middle: a forked process that kills itself, as SIGKILL would, at a chosen
write to the disk.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmsweb import runs
from rmsweb.jsonl import dumps

TIMES = ("_s", "_gb", "seconds")  # what two equal runs may differ in
WRITES = (
    (os, "replace"),
    (os, "fsync"),
    (os, "unlink"),
    (runs.RunWriter, "log"),
    (runs, "append_record"),
)


class Fatal:
    """Counts replacements, syncs, deletions, metrics lines and records; the process dies at number `at`, in
    the middle of a line or just before the rest.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if owner in (runs.RunWriter, runs):
                    path, torn = (
                        (args[0].metrics_path, '{"step": 1, "torn')
                        if owner is runs.RunWriter
                        else (args[0], dumps(args[1])[:-9])
                    )
                    with open(path, "a", encoding="utf-8") as file:
                        file.write(torn)
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(owner, name, counted)


def forked(main: Callable[[Sequence[str]], int], argv: Sequence[str], *, die_at: int) -> int:
    """Runs main(argv) in a fork that dies at its write number `die_at`; returns its exit code, negative for a
    signal.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 2)
            fatal = Fatal(die_at)
            for owner, name in WRITES:
                fatal.wrap(owner, name)
            code = main(argv)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rows(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]


def summary(out: Path) -> dict[str, Any]:
    """summary.json without times."""
    return {
        name: value
        for name, value in json.loads((out / "summary.json").read_text(encoding="utf-8")).items()
        if not name.endswith(TIMES)
    }
