"""The report of a set of runs: results beside the paper's, curves, yield, mining, times, and runs to look at.

    python -m rmsweb.report runs/demo/base runs/demo/sft runs/demo/rl runs/demo/train-rl ... --out runs/demo

Reads what the scripts wrote into their run folders. Writes report.html and summary.json into --out;
where that is a run folder, whose summary.json is its own, report.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsweb.config import main_guard
from rmsweb.evaluation.figures import Results
from rmsweb.jsonl import write_json
from rmsweb.report.page import comparison, render, terminal_table


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its figures."""
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
    missing = [str(run) for run in options.runs if not run.is_dir()]
    if missing:
        raise FileNotFoundError(f"no run folder at {', '.join(missing)}")
    out = options.out or Path(os.path.commonpath([run.resolve() for run in options.runs]))
    folders = [Results(run) for run in options.runs]
    summary = comparison(folders, json.loads(options.seconds.read_bytes()) if options.seconds else {})
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(render(folders, summary, out, options.examples), encoding="utf-8")
    figures = out / ("report.json" if (out / "config.json").exists() else "summary.json")
    write_json(figures, summary)
    print(terminal_table(summary["policies"], summary["scripted"]), end="")
    print(f"{out / 'report.html'}\n{figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
