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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jinja2

from rmsweb.browser.actions import canonical_action
from rmsweb.evaluation.figures import UNSOLVED, Results, RunRow, figures_of, percent, turned
from rmsweb.jsonl import read_records
from rmsweb.mining.taxonomy import MODES, TITLES
from rmsweb.records import AuditRow, Image
from rmsweb.report.charts import Point, curves, layout
from rmsweb.stats import evidence, paired_difference

LABELS = {"base": "base", "sft": "SFT", "rl": "SFT + RL"}


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
        "policies": {folder.path.name: figures_of(folder, evaluations) for folder in evaluations},
        "differences": {
            f"{after.path.name} - {before.path.name}": _difference(before, after)
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


def gate_outcomes(lines: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return the sampled groups by failure mode and outcome of the gates, all steps together."""
    cells: dict[str, Counter[str]] = {}
    for line in lines:
        for mode, counts in line.get("cells", {}).items():
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
    "canonical": canonical_action,
    "label": label,
    "percent": percent,
    "pretty": partial(json.dumps, indent=1, ensure_ascii=False),
}
TEMPLATES.globals |= {
    "changes": changes,
    "curves": curves,
    "gate_outcomes": gate_outcomes,
    "layout": layout,
    "modes": MODES,
    "solved_by_round": solved_by_round,
    "tenths": tenths,
    "titles": TITLES | {UNSOLVED: "no run of any policy solved the task"},
}


def terminal_table(policies: Mapping[str, Mapping[str, Any]], scripted: Iterable[str] = ()) -> str:
    """Return the figures of policies as a table for a terminal."""
    return TEMPLATES.get_template("table.txt.j2").render(policies=policies, scripted=scripted)


def render(folders: Sequence[Results], summary: Mapping[str, Any], out: Path, examples: int) -> str:
    """Return report.html for the folder `out`, with `examples` runs and mined states of each run folder."""

    def link(folder: Results, image: Image) -> str:
        return Path(os.path.relpath(folder.path / image.path, out)).as_posix()

    def audit_rows(folder: Results) -> list[AuditRow]:
        return list(islice(read_records(folder.path / "audit.jsonl", AuditRow), examples))

    return TEMPLATES.get_template("report.html.j2").render(
        folders=folders, summary=summary, examples=examples, link=link, audit_rows=audit_rows
    )
