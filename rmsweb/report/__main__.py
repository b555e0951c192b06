"""The report of a set of runs: results beside the paper's, RL curves, yield, mining, times, and a viewer of
trajectories.

    python -m rmsweb.report runs/demo/base runs/demo/sft runs/demo/rl runs/demo/train-rl ... --out runs/demo

Purpose: one page that a person reads after a run; it is rendered from what the scripts wrote into their run
folders and nothing else. Writes report.html and summary.json into --out. Pictures are linked relatively, so
the folder can be moved as a whole.

ours: the paper's figures are printed beside ours as a reference, never as a baseline: the benchmarks are
others.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rmsweb.evaluation.figures import UNSOLVED, K, Results, figures, print_table, turned
from rmsweb.mining.taxonomy import MODES, TITLES
from rmsweb.records import AuditRow, read_records
from rmsweb.report.html import bars, chart, link, page, percent, pretty, table, text, trajectory
from rmsweb.stats import evidence, paired_difference

TURNED = (10, 5)  # runs shown that turned to success, and to failure
NAMES = {"base": "base", "sft": "SFT", "rl": "SFT + RL"}
PAPER = (  # Table 1: success in %
    ("8B base", 51.13, 36.56, 23.31),
    ("8B SFT", 82.65, 59.44, 55.39),
    ("8B SFT + RL", 86.39, 66.44, 57.74),
    ("32B base", 75.68, 53.67, 39.57),
    ("32B SFT", 86.45, 66.11, 51.62),
    ("32B SFT + RL", 87.64, 68.11, 59.28),
)


@dataclass(kw_only=True)
class Report:
    """The folders by role, and where the page goes."""

    out: Path
    folders: list[Results]
    seconds: dict[str, float] = field(default_factory=dict)
    examples: int = 4

    def of(self, role: str) -> Iterator[Results]:
        """Folders of a role."""
        return (folder for folder in self.folders if folder.role == role)

    @property
    def scripted(self) -> list[str]:
        """Every scripted role of the report."""
        return sorted({name for folder in self.folders for name in folder.scripted})

    def summary(self) -> dict[str, Any]:
        """The figures for a machine: policies.{name}.{pass1,pass3,steps,n,...}, differences, seconds,
        scripted roles.
        """
        evaluations = list(self.of("evaluation"))
        differences = {
            f"{b.path.name} - {a.path.name}": paired_difference(b.outcomes, a.outcomes)
            for a, b in pairwise(evaluations)
        }
        return _finite(
            {
                "policies": {folder.path.name: figures(folder, evaluations) for folder in evaluations},
                "differences": {
                    name: asdict(found) | {"evidence": evidence(found)} for name, found in differences.items()
                },
                "seconds": self.seconds,
                "scripted": self.scripted,
            }
        )


def _finite(value: Any) -> Any:
    """JSON has no nan: None instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------------------- sections


def results(report: Report, summary: dict[str, Any]) -> str:
    """The table of policies with paired differences, and the paper's Table 1."""
    header = (
        "policy",
        "pass@1 %",
        "95% interval",
        f"pass@{K} %",
        "steps on success",
        "tasks",
        "runs",
        "unparsed verdicts",
    )
    rows: list[list[object]] = []
    for name, row in summary["policies"].items():
        low, high = row["pass1_interval"]
        rows.append(
            [
                NAMES.get(name, name),
                percent(row["pass1"]),
                f"{percent(low)} – {percent(high)}",
                percent(row["pass3"]),
            ]
        )
        rows[-1] += [row["steps"], row["n"], row["runs"], row["unparsed"]]
    body = (
        table(header, rows, caption="Measured in this run. Intervals: bootstrap over tasks.")
        if rows
        else "<p>No evaluation of held-out tasks.</p>"
    )
    for name, row in summary["differences"].items():
        gap = f"{percent(row['value'])} points, 95% interval {percent(row['low'])} – {percent(row['high'])}, n = {row['n']} tasks: {row['evidence']}"
        body += f"<p>{text(name)}: {text(gap)}</p>"
    paper = table(
        ("paper, Table 1", "WebVoyager", "Online-Mind2Web", "WebTailBench"),
        PAPER,
        caption="Success in %, on live sites with Qwen3-VL. Other tasks",
    )
    return f"<h2>Results</h2>{body}{paper}"


def changes(report: Report, summary: dict[str, Any]) -> str:
    """Failures of each policy by mode, and runs that turned from one policy to the next."""
    evaluations, policies = list(report.of("evaluation")), summary["policies"]
    if len(evaluations) < 2:
        return ""
    names = list(policies)
    rows: list[list[object]] = [
        ["unusable answers, % of the turns", *(percent(policies[name]["format_errors"]) for name in names)]
    ]
    for mode in (*TITLES, UNSOLVED):
        counts = [policies[name]["failures"].get(mode, 0) for name in names]
        if any(counts):
            rows.append([TITLES.get(mode, "no run of any policy solved the task"), *counts])
    parts = [
        table(
            ("failed runs", *(NAMES.get(name, name) for name in names)),
            rows,
            caption="By the miner's rules, against a success of the same task",
        )
    ]
    for before, after in pairwise(evaluations):
        changed = turned(before, after)
        for good, limit, title in zip(
            (True, False), TURNED, ("from failure to success", "from success to failure"), strict=True
        ):
            runs = [pair for pair in changed if pair[1].success is good]
            shown = [
                f'<div class="turn">{trajectory(folder.trajectory(found.trajectory_id), folder.judgements().get(found.trajectory_id), folder.path, report.out)}</div>'
                for pair in runs[:limit]
                for found, folder in zip(pair, (before, after), strict=True)
            ]
            name = f"{NAMES.get(before.path.name, before.path.name)} to {NAMES.get(after.path.name, after.path.name)}"
            parts.append(
                f"<details><summary>{text(name)}: {len(runs)} runs turned {title}</summary>{''.join(shown)}</details>"
                if runs
                else ""
            )
    return f"<h2>What changed</h2>{''.join(parts)}"


def curves(report: Report) -> str:
    """RL curves of App. J and the SFT losses."""
    figures: list[str] = []
    for folder in report.of("rl"):

        def line(key: str, name: str, folder: Results = folder) -> tuple[str, list[tuple[float, float]]]:
            return name, [
                (row["step"], row[key]) for row in folder.metrics if isinstance(row.get(key), (int, float))
            ]

        figures += [
            chart("Rejected by each gate", dict([line("std_rejected_frac", "std gate"), line("competence_rejected_frac", "competence gate")]),
                  note="Paper: std 32 to 44 %, competence 31 to 21 %"),
            chart("Reward of the rollouts", dict([line("best_of_n", "best of n"), line("reward_mean", "mean"), line("reward_std", "within-group std")]),
                  note="Paper: best of 8 0.63 to 0.72, std 0.19 to 0.14"),
            chart("Dev: success in episodes, greedy reward", dict([line("dev_success", "episodes"), line("dev_reward", "reward"),
                  line("dev_mined", "mined"), line("dev_ordinary", "ordinary")]), note="The first of these chooses the checkpoint; among equals the latest"),
            chart("Log-probability of actions", dict([line("correct_logprob", "correct"), line("wrong_logprob", "wrong"), line("gap", "gap")]),
                  note="Paper: gap -0.23 to +0.04"),
            chart("Groups of a step", dict([line("generated", "generated"), line("accepted", "accepted"), line("retained", "retained for salvage")])),
            chart("Distance from the SFT policy", dict([line("kl", "KL"), line("ppo_kl", "ppo_kl"), line("clip_frac", "clip fraction")])),
            chart("Losses", dict([line("pg", "policy gradient"), line("nll", "salvage NLL"), line("loss", "joint")])),
            chart("Rollout log-perplexity and gradient norm", dict([line("rollout_log_ppl", "log-perplexity"), line("grad_norm", "gradient norm")])),
        ]  # fmt: skip
    for folder in report.of("sft"):
        points = {
            key: [(row["step"], row[key]) for row in folder.metrics if isinstance(row.get(key), float)]
            for key in ("loss", "dev_loss")
        }
        figures.append(chart("SFT loss", {"train": points["loss"], "dev": points["dev_loss"]}))
    return f'<h2>Training</h2><div class="charts">{"".join(figures)}</div>' if any(figures) else ""


def gates(report: Report) -> str:
    """Gate outcomes by failure mode, over all groups of all steps."""
    parts = []
    for folder in report.of("rl"):
        cells: dict[str, Counter[str]] = {}
        for row in folder.metrics:
            for category, counts in (row.get("cells") or {}).items():
                cells.setdefault(category, Counter()).update(counts)
        names = sorted({name for counts in cells.values() for name in counts})
        rows = [
            (TITLES.get(category, category), *(counts[name] for name in names), counts.total())
            for category, counts in sorted(cells.items())
        ]
        parts.append(
            table(
                ("failure mode", *names, "groups"),
                rows,
                caption="Groups by the outcome of both gates, all steps together",
            )
        )
    return "<h2>Gates</h2>" + "".join(parts) if parts else ""


def collection(report: Report) -> str:
    """Yield of each collection."""
    rows: list[list[object]] = []
    for folder in report.of("collection"):
        data = folder.json("report.json")
        solved = next(
            (
                value
                for name, value in data.items()
                if name.endswith("failed_round_1") and isinstance(value, list)
            ),
            [],
        )
        rows.append(
            [
                folder.path.name,
                *(
                    data.get(name)
                    for name in ("tasks", "attempts", "successes", "kept", "mean_success_steps")
                ),
            ]
        )
        rows[-1] += [
            sum((data.get("samples") or {}).values()),
            " / ".join(percent(value, 0) for value in solved),
        ]
    header = (
        "collection",
        "tasks",
        "attempts",
        "successes",
        "kept",
        "steps on success",
        "samples",
        "solve@2 % by round, tasks that failed round 1",
    )
    scripted = (
        " The teacher and the reflection are scripted: that a guide averts a mistake is so by construction."
        if report.scripted
        else ""
    )
    return (
        f"<h2>Collection</h2>{table(header, rows)}<p>Paper: 33.6 % with and 20.9 % without reflection at round 5.{scripted}</p>"
        if rows
        else ""
    )


def mining(report: Report) -> str:
    """Counts of the mined corpora, and examples with both branches."""
    parts = []
    for folder in report.of("mined"):
        data = folder.json("report.json")
        labels = f" Labels by {', '.join(sorted(folder.scripted))}." if folder.scripted else ""
        sizes = {
            name: data.get(name)
            for name in ("tasks", "runs", "successes", "failures", "pairs", "states", "ordinary")
        }
        parts.append(
            f"<h2>Mining: {text(folder.path.name)}</h2>{table(list(sizes), [list(sizes.values())])}<p>{text(labels)}</p>"
        )
        states = max(data.get("states") or 0, 1)
        ours = data.get("categories") or {}
        shares = [
            (
                mode.title,
                ours.get(mode.name, 0),
                percent(ours.get(mode.name, 0) / states),
                f"{mode.share:.2f}",
            )
            for mode in MODES
        ]
        parts.append(table(("failure mode", "states", "share %", "paper %"), shares))
        for title, key in (
            ("Actions of the mined targets", "verbs"),
            ("Why pairs gave no state", "rejected"),
            ("Shares of the hosts", "host_shares"),
        ):
            if data.get(key):
                parts.append(f"<h4>{title}</h4>{bars(data[key])}")
        histograms = data.get("score_histograms") or {}
        tens = {
            name: [(number / 10, float(count)) for number, count in enumerate(counts)]
            for name, counts in histograms.items()
        }
        parts.append(f'<div class="charts">{chart("Scores of the states (count by tenth)", tens)}</div>')
        parts.append(f"<details><summary>All counts</summary>{pretty(data)}</details>")
        parts += [
            _audit(row, folder, report)
            for row in list(read_records(folder.path / "audit.jsonl", AuditRow))[: report.examples]
        ]
    return "".join(parts)


def _audit(row: AuditRow, folder: Results, report: Report) -> str:
    sides = []
    for name, image, url in (
        ("success", row.success_screenshot, row.success_url),
        ("failure", row.failure_screenshot, row.failure_url),
    ):
        picture = (
            f'<div class="shot"><img loading="lazy" alt="" src="{link(folder.path, image, report.out)}"></div>'
            if image
            else "no picture"
        )
        sides.append(f'<div><em>{name}</em><div class="url">{text(url)}</div>{picture}</div>')
    facts = f"{TITLES.get(row.category, row.category)}, confidence {row.confidence:.2f} ({row.label_source}), S_total {row.scores.total:.2f}"
    return (
        f"<details><summary>{text(row.task_text)} <small>{text(row.why)}</small></summary>"
        f'<p class="facts">{text(facts)}</p><div class="pair">{"".join(sides)}</div></details>'
    )


def viewer(report: Report) -> str:
    """A few runs of every folder: failures and successes by turns, in the order of the ids."""
    parts = []
    for folder in report.folders:
        won, lost = ([found for found in folder.rows if found.success is good] for good in (True, False))
        chosen = (lost[: report.examples // 2] + won)[: report.examples]
        if chosen:
            shown = "".join(
                trajectory(
                    folder.trajectory(found.trajectory_id),
                    folder.judgements().get(found.trajectory_id),
                    folder.path,
                    report.out,
                )
                for found in chosen
            )
            roles = (
                f" <small>scripted: {text(', '.join(sorted(folder.scripted)))}</small>"
                if folder.scripted
                else ""
            )
            parts.append(
                f"<h4>{text(folder.path.name)}: {len(won)} successes, {len(lost)} failures{roles}</h4>{shown}"
            )
    return (
        "<h2>Runs</h2><p>Boxes are the elements that the policy may name; red ones it did name.</p>"
        + "".join(parts)
        if parts
        else ""
    )


def render(report: Report, summary: dict[str, Any]) -> str:
    """The whole page."""
    note = ""
    if report.scripted:
        note = (
            f'<p class="note"><b>Scripted roles in this report: {text(", ".join(report.scripted))}.</b> '
            "What they decide by construction shows that the mechanism works; it is no evidence for the paper's claims.</p>"
        )
    times = {
        name: report.seconds[name]
        for name in sorted(report.seconds, key=lambda name: (name == "total", -report.seconds[name]))
    }
    seconds = f"<h2>Seconds by stage</h2>{bars(times, unit=' s')}" if times else ""
    sections = (
        results(report, summary),
        changes(report, summary),
        curves(report),
        gates(report),
        collection(report),
        mining(report),
        seconds,
        viewer(report),
    )
    return page(
        "RMSWeb report",
        f"<h1>RMSWeb report</h1><small>{text(', '.join(folder.path.name for folder in report.folders))}</small>{note}{''.join(sections)}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 for bad data, 3 for a missing folder."""
    parser = argparse.ArgumentParser(
        prog="python -m rmsweb.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders of the five scripts")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for report.html and summary.json (default: RUN, or the folder that holds all of them)",
    )
    parser.add_argument("--seconds", type=Path, help='JSON file {"stage": seconds}')
    parser.add_argument(
        "--examples", type=int, default=4, metavar="N", help="runs shown of each folder (default: 4)"
    )
    options = parser.parse_args(argv)
    out = options.out or (
        options.runs[0]
        if len(options.runs) == 1
        else Path(os.path.commonpath([run.resolve() for run in options.runs]))
    )
    try:
        missing = [str(run) for run in options.runs if not run.is_dir()]
        if missing:
            raise FileNotFoundError(f"no run folder at {', '.join(missing)}")
        seconds = json.loads(options.seconds.read_text(encoding="utf-8")) if options.seconds else {}
        report = Report(
            out=out,
            folders=[Results(run) for run in options.runs],
            seconds=seconds,
            examples=options.examples,
        )
        summary = report.summary()
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(render(report, summary), encoding="utf-8")
        (out / "summary.json").write_text(
            json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 3 if isinstance(error, FileNotFoundError) else 2
    print_table(
        {NAMES.get(name, name): row for name, row in summary["policies"].items()}, summary["scripted"]
    )
    print(f"{out / 'report.html'}\n{out / 'summary.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
