"""The report of a set of runs: results beside the paper's, curves, yield, mining, times, and runs to look at.

    python -m rmsweb.report runs/demo/base runs/demo/sft runs/demo/rl runs/demo/train-rl ... --out runs/demo

Reads what the scripts wrote into their run folders. Writes report.html, report_files/ and summary.json into
--out. The page works from disk: open report.html in a browser; `report.html#run=sft/ID` opens a run.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsweb.config import main_guard
from rmsweb.jsonl import parse_json, replace_file, write_json
from rmsweb.report.data import FOLDER, Writer, write_data
from rmsweb.report.page import comparison, named, render, terminal_table
from rmsweb.stats import load_prices
from rmsweb.tokens import token_counter

ASSETS = Path(__file__).parent / "templates"


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
        help="folder for the report (default: RUN, or the folder that holds all of them)",
    )
    parser.add_argument("--seconds", type=Path, help='JSON file {"stage": seconds}')
    parser.add_argument(
        "--prices",
        type=Path,
        help='JSON file {"model": {"prompt": X, "completion": Y}}, US dollars for a million tokens',
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="checkpoint folder whose tokenizer cuts the shown prompts as the policy's did (default: an "
        "estimate; prompts below their budget are exact either way)",
    )
    options = parser.parse_args(argv)
    missing = [str(run) for run in options.runs if not run.is_dir()]
    if missing:
        raise FileNotFoundError(f"no run folder at {', '.join(missing)}")
    folders = named(options.runs)
    out = options.out or Path(os.path.commonpath([folder.path for folder in folders]))
    seconds = parse_json(options.seconds.read_bytes(), str(options.seconds)) if options.seconds else {}
    writer = Writer(
        out=out,
        prices=load_prices(options.prices) if options.prices else {},
        count_tokens=token_counter(options.tokenizer),
        estimated=options.tokenizer is None,
    )
    counts = write_data(folders, writer)
    summary = comparison(folders, seconds)
    for name in ("viewer.js", "report.css"):
        shutil.copyfile(ASSETS / name, out / FOLDER / name)
    with replace_file(out / "report.html") as temporary:
        temporary.write_text(render(folders, summary, counts), encoding="utf-8")
    if out.resolve() not in [folder.path for folder in folders]:  # a run's own summary is not ours to replace
        write_json(out / "summary.json", summary)
    print(terminal_table(summary["policies"], summary["scripted"]), end="")
    print(out / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
