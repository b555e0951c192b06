"""Figures of evaluations, read from run folders: success, steps, failure modes, and which runs turned.

Purpose: the figures of Tables 1-3 from what the scripts wrote, for summary.json, the report and the study.
A run becomes one `RunRow`. All figures are made of rows; a whole trajectory is read only where a figure needs
it, because a long evaluation exceeds memory.

ours: a failed run is labelled by the rules of the miner against the shortest success of its task in any of
the given folders; a task that no run solved has no label ("unsolved"). ours: the share of unusable answers
counts turns, so that a gain in format is not taken for one in decisions.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rmsweb.mining.alignment import AlignedRun, Contrast
from rmsweb.mining.search import evidence_of
from rmsweb.mining.taxonomy import rule_label
from rmsweb.records import Judgement, Trajectory, is_success
from rmsweb.runs import RunFolder
from rmsweb.stats import pass_at_1_estimate, pass_at_k

K = 3  # App. A: three runs a task
UNSOLVED = "unsolved"
COMPARED = [
    "pass1",
    "pass1_interval",
    "pass3",
    "steps",
    "n",
    "runs",
    "format_errors",
    "unparsed",
    "ended",
    "failures",
]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """What the figures need of one run."""

    trajectory_id: str
    task_id: str
    task: str = ""  # its text
    policy: str = ""
    round: int = 1
    run: int
    site: str
    category: str
    success: bool  # a `done` was executed and the judge agrees (App. A)
    declared: bool  # a `done` with success true was executed
    judgement: Judgement | None
    ended: str
    turns: int
    unusable: int  # turns whose answer could not be parsed
    actions: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float = 0.0
    usage_unknown: int = 0  # calls whose tokens are unknown and in no sum

    @classmethod
    def of(cls, trajectory: Trajectory, judgement: Judgement | None) -> "RunRow":
        """Return the row of a trajectory with its judgement."""
        task, steps = trajectory.task, trajectory.steps
        return cls(
            trajectory_id=trajectory.trajectory_id,
            task_id=task.task_id,
            task=task.text,
            policy=trajectory.source.policy,
            round=trajectory.source.round,
            run=trajectory.source.run,
            site=str(task.environment.get("site") or urlsplit(task.start_url or "").hostname or "(none)"),
            category=task.category or "(none)",
            success=is_success(trajectory, judgement),
            declared=bool(trajectory.declared_success),
            judgement=judgement,
            ended=trajectory.ended,
            turns=len(steps),
            unusable=sum(step.parse_failure is not None for step in steps),
            actions=sum(len(step.results) for step in steps),
            prompt_tokens=trajectory.usage.prompt_tokens,
            completion_tokens=trajectory.usage.completion_tokens,
            seconds=sum(step.duration_s for step in steps),
            usage_unknown=trajectory.usage.usage_unknown,
        )

    @property
    def verdict(self) -> str:
        """The judge's verdict, "unjudged" without a judgement."""
        return self.judgement.verdict if self.judgement else "unjudged"


def read_rows(folder: RunFolder) -> list[RunRow]:
    """Return the rows of the committed runs of a folder, by trajectory id."""
    return [RunRow.of(trajectory, judgement) for trajectory, judgement in folder.judged()]


class Results(RunFolder):
    """A finished run folder with the rows of its runs, which are read once."""

    def __init__(self, path: Path, name: str = "") -> None:
        super().__init__(path)
        self.name = name or path.resolve().name

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What the script counted at its end: summary.json, or report.json of an older collection."""
        return self.json("summary.json") or self.json("report.json")

    @cached_property
    def rows(self) -> list[RunRow]:
        """The rows of the folder's runs."""
        return read_rows(self)

    @cached_property
    def outcomes(self) -> dict[str, list[bool]]:
        """Successes by task."""
        return outcomes_of(self.rows)


# ------------------------------------------------------------------------------------------------- figures


def outcomes_of(rows: Iterable[RunRow]) -> dict[str, list[bool]]:
    """Return successes by task, in the order of the runs."""
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for row in sorted(rows, key=attrgetter("task_id", "run")):
        outcomes[row.task_id].append(row.success)
    return outcomes


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _best_of(outcomes: Mapping[str, Sequence[bool]], k: int) -> float | None:
    """Return pass@k over the tasks that have k runs; None if no task has."""
    full = {task: runs for task, runs in outcomes.items() if len(runs) >= k}
    return pass_at_k(full, k) if full else None


def _breakdown(rows: Iterable[RunRow], group_of: Callable[[RunRow], str]) -> dict[str, Any]:
    """Return pass@1 with its interval by group; n counts tasks."""
    groups = groupby(sorted(rows, key=group_of), group_of)
    return {group: asdict(pass_at_1_estimate(outcomes_of(members))) for group, members in groups}


def summarize(found: Sequence[RunRow], *, tasks: int, runs: int) -> dict[str, Any]:
    """Return the figures of an evaluation that was to run `tasks` tasks `runs` times each.

    n counts the tasks with a run. `missing` runs are not finished and `unjudged` ones have no verdict so far;
    the figures are those of the others. Steps and actions are means over the successful runs. Tokens are
    None where an endpoint did not report those of each call.
    """
    rows = [row for row in found if row.judgement]
    unknown = sum(row.usage_unknown for row in found)
    outcomes = outcomes_of(rows)
    estimate = pass_at_1_estimate(outcomes)
    solved = [row for row in rows if row.success]
    verdicts, ended = Counter(row.verdict for row in rows), Counter(row.ended for row in rows)
    return {
        "pass1": estimate.value if rows else None,
        "pass1_interval": [estimate.low, estimate.high] if rows else [None, None],
        **{f"pass{k}": _best_of(outcomes, k) for k in sorted({K, runs} - {1})},
        "pass1_by_run": [_mean([row.success for row in rows if row.run == number]) for number in range(runs)],
        "steps": _mean([row.turns for row in solved]),
        "actions": _mean([row.actions for row in solved]),
        "n": len(outcomes),
        "runs": len(rows),
        "missing": tasks * runs - len(found),
        "unjudged": len(found) - len(rows),
        "declared": ended["done"],
        "declared_success": sum(row.declared for row in rows),
        "verdicts": verdicts,
        "unparsed": verdicts["unparsed"],
        "ended": ended,
        "prompt_tokens_per_run": None if unknown else _mean([row.prompt_tokens for row in found]),
        "completion_tokens_per_run": None if unknown else _mean([row.completion_tokens for row in found]),
        "usage_unknown": unknown,
        "by_site": _breakdown(rows, attrgetter("site")),
        "by_category": _breakdown(rows, attrgetter("category")),
    }


def figures_of(results: Results, evaluations: Iterable[Results]) -> dict[str, Any]:
    """Return the figures by which evaluations are compared, failure modes among them."""
    turns = sum(row.turns for row in results.rows)
    found = summarize(results.rows, tasks=len(results.outcomes), runs=K) | {
        "format_errors": sum(row.unusable for row in results.rows) / turns if turns else None,
        "failures": Counter(failure_modes(results, evaluations).values()),
    }
    return {name: found[name] for name in COMPARED}


def failure_modes(results: Results, evaluations: Iterable[Results]) -> dict[str, str]:
    """Return the failure mode of each failed run of `results` by trajectory id.

    Each is compared with the shortest success of its task in any of the evaluations; one success is in memory
    at a time.
    """
    shortest: dict[str, RunRow] = {}
    owner: dict[str, Results] = {}
    for other in evaluations:
        for row in other.rows:
            if row.success and (row.task_id not in shortest or row.turns < shortest[row.task_id].turns):
                shortest[row.task_id], owner[row.task_id] = row, other
    failed = [row for row in results.rows if row.judgement and not row.success]
    modes = {row.trajectory_id: UNSOLVED for row in failed}
    for task, rows in groupby(sorted(failed, key=attrgetter("task_id")), attrgetter("task_id")):
        if task in shortest:
            success = AlignedRun(owner[task].trajectory(shortest[task].trajectory_id), True)
            for row in rows:
                failure = AlignedRun(results.trajectory(row.trajectory_id), False)
                modes[row.trajectory_id] = rule_label(evidence_of(Contrast(success, failure))).category
    return modes


def turned(before: Results, after: Results) -> list[tuple[RunRow, RunRow]]:
    """Return (before, after) of each run, by task and number, whose outcome differs."""
    first = {(row.task_id, row.run): row for row in before.rows}
    pairs = [(first.get((row.task_id, row.run), row), row) for row in after.rows]
    return [(old, new) for old, new in pairs if old.success != new.success]


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in [0, 1] as a percentage.

    >>> percent(0.5), percent(None)
    ('50.0', '–')
    """
    return "–" if share is None or math.isnan(share) else f"{100 * share:.{digits}f}"
