"""Measure the miner against what is known: planted errors, and what the playground's sites know.

    python scripts/mining_check.py [--pairs 500] [--tasks 400]

Prints recall and precision by kind of planted error, with the true labels and with the rules', and of the
states mined from the scripted teacher's runs the share that the sites call critical, by category. No browser
and no model is needed.
"""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mining_world import render  # noqa: E402
from planted_pairs import ERRORS, planted_pairs  # noqa: E402
from teacher_pool import collect_pool, runs_of, sample_of, wrong_moves  # noqa: E402

from rmsweb.mining.alignment import Contrast  # noqa: E402
from rmsweb.mining.search import MinerConfig, mine  # noqa: E402
from rmsweb.mining.taxonomy import Features, Label  # noqa: E402
from rmsweb.playground.tasks import make_worlds  # noqa: E402


def share(part: int, whole: int) -> str:
    """Return a share with its counts."""
    return f"{part / whole:.2f} ({part}/{whole})" if whole else "- (0/0)"


def planted(count: int, true_labels: bool) -> None:
    """Print recall and precision by kind of error."""
    tried, found, right = Counter[str](), Counter[str](), Counter[str]()
    for pair in planted_pairs(count):

        async def judge(
            contrast: Contrast, seen: Features, opinions: Sequence[Label], name: str = pair.label
        ) -> Label:
            return Label(name, 0.9)

        runs = [pair.success, pair.failure]
        result = asyncio.run(
            mine(runs, render=render, judge=judge if true_labels else None, config=MinerConfig())
        )
        tried[pair.error] += 1
        found[pair.error] += len(result.found)
        right[pair.error] += any(item.state.step == pair.critical for item in result.found)
    print(f"\nplanted errors, {'true' if true_labels else 'rule'} labels   recall   precision")
    for name in ERRORS:
        print(f"{name:<18}{share(right[name], tried[name]):>16}{share(right[name], found[name]):>18}")
    print(f"{'all':<18}{share(right.total(), tried.total()):>16}{share(right.total(), found.total()):>18}")


def playground(tasks: int) -> None:
    """Print the share of critical states by category."""
    runs = runs_of(collect_pool(make_worlds("train", tasks)))
    by_id = {item.trajectory.trajectory_id: item for item in runs}
    result = asyncio.run(mine(runs, render=sample_of, judge=None, config=MinerConfig(secondary=False)))
    states, critical = Counter[str](), Counter[str]()
    for item in result.found:
        won = by_id[item.audit.success_trajectory].trajectory.steps[item.audit.success_step - 1]
        lost = by_id[item.audit.failure_trajectory].trajectory
        states[item.state.category] += 1
        critical[item.state.category] += bool(won.output and won.output.next_goal in wrong_moves(lost))
    print(f"\nstates of the scripted teacher's runs of {tasks} tasks that the sites call critical")
    for name, count in states.most_common():
        print(f"{name:<18}{share(critical[name], count):>16}")
    print(f"{'all':<18}{share(critical.total(), states.total()):>16}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=500, help="planted pairs (default: 500)")
    parser.add_argument("--tasks", type=int, default=400, help="tasks of the playground (default: 400)")
    options = parser.parse_args()
    for true_labels in (True, False):
        planted(options.pairs, true_labels)
    playground(options.tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
