"""Measurements of the rooms that must be fast; every one prints JSON lines.

`python scripts/benchmark.py reward` times the reward on one core: single-action scores of parsed answers, the
same with parsing, and the soft-F1 of four actions against four. `observe` times a browser state, a line for
each page (benchmark_observe.py). `episode` compares an episode in the browser with one in the replay
(benchmark_episode.py). `sampler`, `update`, `memory`, `sft` and
`step` compare the training engine with the plain way (benchmark_engine.py); `--pairs` says how many
interleaved pairs of runs a line is made of.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rmsweb.browser.actions import canonical_text, parse_action  # noqa: E402 (the checkout need not be installed)
from rmsweb.records import AgentOutput  # noqa: E402
from rmsweb.salvage.reward import score, soft_f1  # noqa: E402

PAIRS = [  # target, prediction: every kind of comparison, exact and not
    ({"click": {"index": 18}}, {"click": {"index": 18}}),
    ({"click": {"index": 18}}, {"click": {"index": 19}}),
    (
        {"input": {"index": 3, "text": "red running shoes"}},
        {"input": {"index": 3, "text": "Red running shoe"}},
    ),
    ({"input": {"index": 3, "text": "100"}}, {"input": {"index": 3, "text": "1000"}}),
    (
        {"navigate": {"url": "https://a.com/h?checkin=2026-05-01"}},
        {"navigate": {"url": "https://www.a.com/h/?checkin=2026-05-02"}},
    ),
    ({"search": {"query": "flights from Rome to Paris"}}, {"search": {"query": "cheap flights Rome Paris"}}),
    ({"scroll": {"down": True, "num_pages": 1}}, {"scroll": {"down": True, "num_pages": 2}}),
    ({"select_dropdown": {"index": 4, "text": "Large"}}, {"select_dropdown": {"index": 4, "text": "Large"}}),
    (
        {"done": {"text": "The price is 12 euros.", "success": True}},
        {"done": {"text": "12 euros", "success": True}},
    ),
    ({"go_back": {}}, {"wait": {"seconds": 3}}),
]


def per_second(work: Callable[[], None], units: int, repeats: int = 5, least_s: float = 0.3) -> float:
    """Return the median over `repeats` of units of work a second; each repeat runs for at least `least_s`."""
    rates = []
    for _ in range(repeats):
        rounds, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < least_s:
            work()
            rounds += 1
        rates.append(rounds * units / spent)
    return statistics.median(rates)


def reward() -> dict[str, float | str]:
    """Return scores a second on one core."""
    answers = [
        tuple(AgentOutput(actions=(parse_action(side),), next_goal="go on") for side in pair)
        for pair in PAIRS
    ]
    texts = [tuple(canonical_text(answer) for answer in pair) for pair in answers]
    indices = frozenset(range(1, 40))
    fours = [
        tuple(
            tuple(answers[(first + k) % len(answers)][side].actions[0] for k in range(4)) for side in (1, 0)
        )
        for first in range(len(answers))
    ]

    def parsed() -> None:
        for target, prediction in answers:
            score(prediction, target, indices)

    def unparsed() -> None:
        for (_, text), (target, _) in zip(texts, answers, strict=True):
            score(text, target, indices)

    def lists() -> None:
        for prediction, target in fours:
            soft_f1(prediction, target, indices)

    return {
        "benchmark": "reward",
        "scores_per_s": round(per_second(parsed, len(answers))),
        "parse_and_score_per_s": round(per_second(unparsed, len(answers))),
        "soft_f1_per_s": round(per_second(lists, len(fours))),
    }


ENGINE = ("memory", "sampler", "sft", "step", "update")  # in benchmark_engine.py, which needs torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(("episode", "observe", "reward", *ENGINE)))
    parser.add_argument(
        "--pairs",
        type=int,
        default=5,
        help="of the engine's benchmarks: pairs of runs a line (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    name = args.name
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}: expected at least 1")
    if name in ENGINE:
        import benchmark_engine

        benchmark_engine.run(name, args.pairs)
    elif name == "observe":
        import benchmark_observe

        for line in benchmark_observe.observe():
            print(json.dumps(line))
    elif name == "episode":
        import benchmark_episode

        print(json.dumps(benchmark_episode.episode()))
    else:
        print(json.dumps(reward()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
