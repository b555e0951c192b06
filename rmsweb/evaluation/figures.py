"""Results out of run folders: outcomes, figures of an evaluation, what its failures are, and which runs
turned.

Purpose: the figures of Tables 1-3 from what the scripts wrote, for the report and the study; nothing here
renders. A folder's role is known by what lies in it: evaluations and collections by their trajectories,
trainings by their metrics.

ours: a failed run is labelled by the rules of the miner against the shortest success of its task in any of
the folders; a task that no run solved has no label ("unsolved"). ours: the share of unusable answers counts
turns, so that a gain in format is not taken for one in decisions.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rmsweb.mining.taxonomy import features, rule_label
from rmsweb.records import Judgement, RecordError, Trajectory, is_success, read_records
from rmsweb.stats import pass_at_1_estimate, pass_at_k

K = 3  # App. A: three runs a task
UNSOLVED = "unsolved"


@dataclass(frozen=True)
class Folder:
    """A run folder; everything is read when it is first asked for."""

    path: Path

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder, empty where there is none; RecordError naming the file where it is not
        JSON.
        """
        file = self.path / name
        if not file.exists():
            return {}
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordError(f"{file}: not JSON ({error})") from None
        return data if isinstance(data, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        lines = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise RecordError(f"{file}:{number}: not JSON ({error})") from None
        return lines

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of all ranks, by id."""
        files = sorted(self.path.glob("trajectories.rank*.jsonl"))
        return sorted(
            (found for file in files for found in read_records(file, Trajectory)),
            key=lambda found: found.trajectory_id,
        )

    @cached_property
    def judgements(self) -> dict[str, Judgement]:
        """Judgements by trajectory id."""
        files = sorted(self.path.glob("judgements.rank*.jsonl"))
        return {found.trajectory_id: found for file in files for found in read_records(file, Judgement)}

    def success(self, found: Trajectory) -> bool:
        """App. A: a `done` was executed and the judge agrees."""
        return is_success(found, self.judgements.get(found.trajectory_id))

    @cached_property
    def outcomes(self) -> dict[str, list[bool]]:
        """Successes by task, in the order of the runs."""
        outcomes: dict[str, list[bool]] = {}
        for found in self.trajectories:
            outcomes.setdefault(found.task.task_id, []).append(self.success(found))
        return outcomes

    @cached_property
    def role(self) -> str:
        """evaluation, pool, collection, mined, rl, sft or empty."""
        if self.trajectories:
            first = self.trajectories[0]
            return (
                "collection"
                if first.source.script == "collect"
                else "evaluation"
                if first.task.split == "held-out"
                else "pool"
            )
        if (self.path / "mined.jsonl").exists():
            return "mined"
        return (
            "rl"
            if any("std_rejected_frac" in line for line in self.metrics)
            else "sft"
            if self.metrics
            else ""
        )

    @cached_property
    def scripted(self) -> set[str]:
        """Scripted roles that this folder's run used."""
        config = self.json("config.json")
        used = {
            str(value)
            for name, value in config.items()
            if name.endswith("_model") and (name != "judge_model" or config.get("judge_url"))
        }
        used |= {found.source.policy for found in self.trajectories[:1]} | {
            found.model for found in self.judgements.values()
        }
        return {name for name in used if name.startswith("scripted-")}


def figures(folder: Folder) -> dict[str, Any]:
    """pass@1 with its 95% interval, pass@3, mean turns on success, and counts, of an evaluation."""
    outcomes, estimate = folder.outcomes, pass_at_1_estimate(folder.outcomes)
    won = [len(found.steps) for found in folder.trajectories if folder.success(found)]
    full = {task: runs for task, runs in outcomes.items() if len(runs) >= K}
    return {
        "pass1": estimate.value,
        "pass1_interval": [estimate.low, estimate.high],
        "pass3": pass_at_k(full, K) if full else None,
        "steps": sum(won) / len(won) if won else None,
        "n": len(outcomes),
        "runs": sum(map(len, outcomes.values())),
        "format_errors": format_error_share(folder.trajectories),
        "unparsed": sum(found.verdict == "unparsed" for found in folder.judgements.values()),
        "ended": dict(Counter(found.ended for found in folder.trajectories)),
    }


def format_error_share(runs: Iterable[Trajectory]) -> float | None:
    """Share of the turns whose answer was unusable; None without turns."""
    steps = [step for found in runs for step in found.steps]
    return sum(step.parse_failure is not None for step in steps) / len(steps) if steps else None


def failure_modes(folder: Folder, pool: Iterable[Folder]) -> Counter[str]:
    """Failed runs of `folder` by failure mode; the success that each is compared with comes from `pool`."""
    best: dict[str, Trajectory] = {}
    for found in (found for other in pool for found in other.trajectories if other.success(found)):
        known = best.get(found.task.task_id)
        best[found.task.task_id] = found if known is None or len(found.steps) < len(known.steps) else known
    failed = [found for found in folder.trajectories if not folder.success(found)]
    modes: Counter[str] = Counter()
    for found in failed:
        success = best.get(found.task.task_id)
        modes[rule_label(features(found.task.text, success, found))[0] if success else UNSOLVED] += 1
    return modes


def turned(
    before: Folder, after: Folder
) -> tuple[list[tuple[Trajectory, Trajectory]], list[tuple[Trajectory, Trajectory]]]:
    """Runs (same task, same number) that failed before and succeeded after, and those that turned the other
    way.
    """
    first = {(found.task.task_id, found.source.run): found for found in before.trajectories}
    pairs = [
        (first[key], found)
        for found in after.trajectories
        if (key := (found.task.task_id, found.source.run)) in first
    ]
    changed = [(a, b, after.success(b)) for a, b in pairs if before.success(a) != after.success(b)]
    won, lost = ([(a, b) for a, b, good in changed if good is wanted] for wanted in (True, False))
    return won, lost
