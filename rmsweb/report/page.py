"""The report's page: what it shows of a set of run folders, and its rendering by the templates.

Purpose: this module prepares data and the templates in templates/ say how it looks; one template a section.
Everything comes from what the scripts wrote into their run folders. Every text of a page or a model is
escaped by jinja2, and pictures are linked relatively, so the folder can be moved as a whole.

ours: the paper's figures are printed beside ours as a reference, never as a baseline: the benchmarks are
others.
"""

import json
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from rmsweb.evaluation.figures import UNSOLVED, Results, RunRow, figures_of, percent, turned
from rmsweb.jsonl import RecordError, from_json
from rmsweb.mining.taxonomy import MODES, TITLES
from rmsweb.records import record
from rmsweb.report.charts import Point, curves, layout
from rmsweb.stats import evidence, paired_difference

LABELS = {"base": "base", "sft": "SFT", "rl": "SFT + RL"}


@record
class GateCells:
    """Groups by failure mode and outcome of the gates, in a line of metrics.jsonl."""

    cells: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """The runs whose outcome turned in one direction from one policy to the next."""

    before: Results
    after: Results
    to_success: bool
    pairs: list[tuple[RunRow, RunRow]]


def label(name: str) -> str:
    """Return how the page names the policy of a run folder."""
    return LABELS.get(name, name)


# ------------------------------------------------------------------------------------------------- the data


def evaluations_of(folders: Iterable[Results]) -> list[Results]:
    """Return the evaluations of held-out tasks, in their order."""
    return [folder for folder in folders if folder.role == "evaluation"]


def comparison(folders: Sequence[Results], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return summary.json: figures of each policy, paired differences, seconds by stage, scripted roles."""
    evaluations = evaluations_of(folders)
    return {
        "policies": {folder.name: figures_of(folder, evaluations) for folder in evaluations},
        "differences": {
            f"{after.name} - {before.name}": _difference(before, after)
            for before, after in pairwise(evaluations)
        },
        "seconds": seconds,
        "scripted": sorted(set().union(*(folder.scripted for folder in folders))),
    }


def _difference(before: Results, after: Results) -> dict[str, Any]:
    found = paired_difference(after.outcomes, before.outcomes)
    values = {name: None if math.isnan(value) else value for name, value in asdict(found).items()}
    return values | {"evidence": evidence(found)}


def changes(folders: Iterable[Results]) -> list[Change]:
    """Return the runs that turned from each policy to the next, by direction."""
    return [
        Change(before, after, good, [(a, b) for a, b in turned(before, after) if b.success is good])
        for before, after in pairwise(evaluations_of(folders))
        for good in (True, False)
    ]


def named(paths: Iterable[Path]) -> list[Results]:
    """Return run folders under names that differ: the folder's own, its path where two are called alike."""
    unique = list(dict.fromkeys(path.resolve() for path in paths))
    counts, root = Counter(path.name for path in unique), os.path.commonpath(unique)
    return [
        Results(path, path.name if counts[path.name] == 1 else path.relative_to(root).as_posix())
        for path in unique
    ]


@record
class Environment:
    """What env.json says of a run."""

    started: str = ""
    commit: str = ""
    argv: tuple[str, ...] = ()
    cpu: str = ""
    cpus: int | None = None
    gpus: tuple[str, ...] = ()
    platform: str = ""
    world_size: int = 1
    defaults: dict[str, Any] | None = None


@dataclass(frozen=True)
class Origin:
    """Where a run folder comes from, as the head of the page shows it."""

    folder: Results
    environment: Environment
    command: str
    model: str
    machine: str
    changed: dict[str, Any] | None  # settings that differ from the defaults; None where none are recorded


def origin(folder: Results) -> Origin:
    """Return where a run folder comes from; RecordError for an env.json of other types."""
    config = folder.json("config.json")
    found = from_json(Environment, folder.json("env.json"), str(folder.path / "env.json"))
    names = [config.get(name) for name in ("policy", "policy_model", "model")]
    machine = ", ".join(found.gpus) or f"{found.cpus or '?'} x {found.cpu or 'CPU'}, {found.platform}"
    if found.world_size > 1:
        machine += f", {found.world_size} processes"
    return Origin(
        folder=folder,
        environment=found,
        command=shlex.join(["python", *found.argv]) if found.argv else "",
        model=folder.first.source.policy if folder.first else str(next(filter(None, names), "")),
        machine=machine,
        changed=None
        if found.defaults is None
        else {name: value for name, value in config.items() if value != found.defaults.get(name)},
    )


def gate_outcomes(lines: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the sampled groups by failure mode and outcome of the gates, all steps together."""
    cells: dict[str, Counter[str]] = {}
    for line in lines:
        for mode, counts in from_json(GateCells, line, "metrics.jsonl").cells.items():
            cells.setdefault(mode, Counter()).update(counts)
    return dict(sorted(cells.items()))


def solved_by_round(data: Mapping[str, Any]) -> list[float]:
    """Return the solve@2 of a collection by round, over the tasks that failed round 1."""
    found = (value for name, value in data.items() if name.endswith("failed_round_1"))
    return next((value for value in found if isinstance(value, list)), [])


def tenths(data: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Return the histograms of the miner's scores as lines."""
    return {
        name: [Point(number / 10, count) for number, count in enumerate(counts)]
        for name, counts in data.get("score_histograms", {}).items()
    }


# -------------------------------------------------------------------------------------------- the rendering


def _shown(value: object) -> object:
    """Return what the page prints for a value: three digits of a float, a dash for nothing."""
    if value is None or isinstance(value, jinja2.Undefined):
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    extensions=["jinja2.ext.do"],
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {
    "address": partial(quote, safe="/"),
    "label": label,
    "percent": percent,
    "pretty": partial(json.dumps, indent=1, ensure_ascii=False),
    "plain": partial(json.dumps, ensure_ascii=False),
}
TEMPLATES.globals |= {
    "changes": changes,
    "curves": curves,
    "gate_outcomes": gate_outcomes,
    "layout": layout,
    "modes": MODES,
    "origin": origin,
    "solved_by_round": solved_by_round,
    "tenths": tenths,
    "titles": TITLES | {UNSOLVED: "no run of any policy solved the task"},
}


def terminal_table(policies: Mapping[str, Mapping[str, Any]], scripted: Iterable[str] = ()) -> str:
    """Return the figures of policies as a table for a terminal."""
    return TEMPLATES.get_template("table.txt.j2").render(policies=policies, scripted=scripted)


def render(folders: Sequence[Results], summary: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return report.html; `counts` are the lengths of the lists that the viewer shows.

    Raises RecordError where a summary holds other types than a script writes.
    """
    try:
        return TEMPLATES.get_template("report.html.j2").render(
            folders=folders,
            summary=summary,
            counts=counts,
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    except (TypeError, AttributeError, jinja2.UndefinedError) as error:
        names = ", ".join(str(folder.path) for folder in folders)
        raise RecordError(
            f"a summary or metrics of {names} holds another type than expected: {error}"
        ) from error
