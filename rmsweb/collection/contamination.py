"""The contamination check: tasks that a benchmark asks too, in the same words or in nearly the same.

    python -m rmsweb.collection.contamination tasks.jsonl --against webvoyager.jsonl online-mind2web.json

Purpose: App. A compares every training task with every benchmark task by exact match, containment of the
whole question, and word 3-grams: Jaccard 0.4, containment 0.6, both times 0.6 where the tasks are about one
domain. Prints the overlaps, the closest pairs below the limits, and the hosts that both sides name; exit
code 2 if a task overlaps.

ours: containment is the share of the smaller set of 3-grams. ours: a question of fewer than three words is
compared for equality only, because it stands in half of all longer ones.
"""

import argparse
import csv
import heapq
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rmsweb.config import main_guard
from rmsweb.jsonl import RecordError, parse_json
from rmsweb.similarity import host_of

JACCARD, CONTAINMENT = 0.4, 0.6  # App. A
SAME_DOMAIN = 0.6  # App. A: factor of both limits
GRAM = 3  # words
# fmt: off
QUESTION_KEYS = (
    "ques", "confirmed_task", "task_summary", "task", "question", "text", "intent", "instruction", "prompt",
)
# fmt: on
URL_KEYS = ("web", "website", "start_url", "url")
ID_KEYS = ("id", "task_id")

Kind = Literal["exact", "contained", "jaccard", "containment"]


@dataclass(frozen=True, order=True)
class Question:
    """A task as the check sees it."""

    name: str
    text: str
    host: str = ""

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words, without case and punctuation."""
        return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", self.text).casefold()))


@dataclass(frozen=True, slots=True, order=True)
class Overlap:
    """How close two questions are, by the first test of App. A that they pass, else by the nearest one."""

    closeness: float  # value / limit of the kind; 1 or more is an overlap
    kind: Kind
    value: float
    task: Question
    other: Question

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.value:.2f}: {self.task.name} {self.task.text!r} ~ "
            f"{self.other.name} {self.other.text!r}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check."""

    overlaps: list[Overlap]  # the closest of each offending task
    closest: list[Overlap]  # the closest pairs below the limits
    common_hosts: list[str]


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a benchmark file: a JSON list, JSON Lines (our task file too), or a .tsv table.

    Raises RecordError naming file and entry where no question is found.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".tsv":
        rows = list(csv.DictReader(text.splitlines(), delimiter="\t"))
    elif text.lstrip().startswith("["):
        rows = parse_json(text.encode(), str(path), finite=False)
    else:
        lines = [line for line in enumerate(text.splitlines(), 1) if line[1].strip()]
        rows = [parse_json(line.encode(), f"{path}:{number}", finite=False) for number, line in lines]
    found = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict) and "schema_version" in row:
            continue
        question = _first(row, QUESTION_KEYS)
        if question is None:
            raise RecordError(
                f"{path}: entry {number} has no question, expected one of {', '.join(QUESTION_KEYS)}"
            )
        name = _first(row, ID_KEYS) or str(number)
        found.append(Question(f"{path.stem}:{name}", question, host_of(_first(row, URL_KEYS) or "")))
    return found


def _first(row: object, keys: Iterable[str]) -> str | None:
    values = (row.get(key) for key in keys) if isinstance(row, dict) else ()
    return next((str(value) for value in values if isinstance(value, str | int) and str(value).strip()), None)


def _grams(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the runs of three words; a shorter text is one run."""
    return {tuple(words[start : start + GRAM]) for start in range(max(1, len(words) - GRAM + 1))}


def _same_domain(a: str, b: str) -> bool:
    a, b = a.removeprefix("www."), b.removeprefix("www.")
    return bool(a and b) and (a == b or a.endswith(f".{b}") or b.endswith(f".{a}"))


def _closest(task: Question, other: Question, common: int, sizes: tuple[int, int]) -> Overlap:
    """Return the measure by which two questions are closest; `common` 3-grams of `sizes`."""
    a, b = task.words, other.words
    factor = SAME_DOMAIN if _same_domain(task.host, other.host) else 1.0
    values: dict[Kind, tuple[float, float]] = {
        "jaccard": (common / (sum(sizes) - common), JACCARD * factor),
        "containment": (common / min(sizes) if min(len(a), len(b)) >= GRAM else 0.0, CONTAINMENT * factor),
    }
    short, long = sorted((" ".join(a), " ".join(b)), key=len)
    if a == b:
        values = {"exact": (1.0, 1.0)}
    elif min(len(a), len(b)) >= GRAM and f" {short} " in f" {long} ":
        values = {"contained": (1.0, 1.0)}
    kind = max(values, key=lambda name: values[name][0] / values[name][1])
    value, limit = values[kind]
    return Overlap(round(value / limit, 9), kind, value, task, other)


class Index:
    """The questions of benchmarks by their 3-grams."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.questions = list(questions)
        self.sizes: list[int] = []
        self.places: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for place, question in enumerate(self.questions):
            grams = _grams(question.words)
            self.sizes.append(len(grams))
            for gram in grams:
                self.places[gram].append(place)

    def overlaps(self, task: Question) -> Iterator[Overlap]:
        """Yield the closeness of a task to every question that shares a 3-gram with it."""
        grams = _grams(task.words)
        common = Counter(place for gram in grams for place in self.places.get(gram, ()))
        for place, count in common.items():
            yield _closest(task, self.questions[place], count, (len(grams), self.sizes[place]))


def check(tasks: Iterable[Question], against: Iterable[Question], *, closest: int = 20) -> Report:
    """Compare tasks with benchmark questions; `closest` pairs below the limits are reported too."""
    index, asked = Index(against), list(tasks)
    best = [max(found, default=None) for found in (list(index.overlaps(task)) for task in asked)]
    known = [overlap for overlap in best if overlap is not None]
    hosts = {question.host for question in index.questions} & {task.host for task in asked} - {""}
    return Report(
        overlaps=[overlap for overlap in known if overlap.closeness >= 1],
        closest=heapq.nlargest(closest, (overlap for overlap in known if overlap.closeness < 1)),
        common_hosts=sorted(hosts),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rmsweb.collection.contamination",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", type=Path, help="task file to check")
    parser.add_argument("--against", nargs="+", type=Path, required=True, help="published benchmark files")
    options = parser.parse_args(argv)
    against = [question for path in options.against for question in read_questions(path)]
    report = check(read_questions(options.tasks), against)
    print(f"{len(report.overlaps)} tasks overlap with the {len(against)} questions of the benchmarks")
    print("".join(f"  {overlap}\n" for overlap in report.overlaps), end="")
    print(f"closest below the limits ({JACCARD}, {CONTAINMENT}; x {SAME_DOMAIN} on one domain)")
    print("".join(f"  {overlap}\n" for overlap in report.closest), end="")
    print(f"hosts on both sides: {', '.join(report.common_hosts) or 'none'}")
    return 2 if report.overlaps else 0


if __name__ == "__main__":
    sys.exit(main_guard(main))
