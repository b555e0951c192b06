"""Laws of the contamination check: planted overlaps of every kind are found, unrelated tasks are not."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.collection.contamination import (
    CONTAINMENT,
    JACCARD,
    SAME_DOMAIN,
    Index,
    Question,
    check,
    main,
    read_questions,
)
from rmsweb.jsonl import RecordError

WORDS = [
    "apartment",
    "battery",
    "camera",
    "delivery",
    "engine",
    "festival",
    "garden",
    "hotel",
    "insurance",
    "journey",
    "kitchen",
    "laptop",
    "museum",
    "notebook",
    "orchestra",
    "passport",
    "quarter",
    "recipe",
    "scooter",
    "theatre",
    "umbrella",
    "vaccine",
    "weather",
    "yoghurt",
    "zoo",
    "airport",
    "bakery",
    "concert",
    "dentist",
    "exhibition",
    "flight",
    "gallery",
    "harbour",
    "island",
    "jacket",
    "lecture",
    "market",
    "novel",
    "office",
    "painting",
    "railway",
    "stadium",
    "ticket",
    "university",
    "village",
    "workshop",
]

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)


def question(r: random.Random, name: str, words: int = 14, host: str = "") -> Question:
    """Return a question of random words."""
    return Question(name, " ".join(r.choices(WORDS, k=words)), host)


def naive(task: str, other: str, factor: float) -> bool:
    """Say whether two texts overlap, straight from the definition."""
    a, b = task.lower().split(), other.lower().split()
    if a == b:
        return True
    if min(len(a), len(b)) < 3:
        return False
    x, y = ({tuple(words[i : i + 3]) for i in range(len(words) - 2)} for words in (a, b))
    contained = any(
        long[i : i + len(short)] == short
        for short, long in ((a, b), (b, a))
        for i in range(len(long) - len(short) + 1)
    )
    close = round(len(x & y) / len(x | y) / (JACCARD * factor), 9) >= 1
    return contained or close or round(len(x & y) / min(len(x), len(y)) / (CONTAINMENT * factor), 9) >= 1


@given(texts, texts, st.booleans())
def test_the_check_is_the_definition(task: str, other: str, same_domain: bool) -> None:
    """The indexed check says what four comparisons of one pair say."""
    host = "shop.example" if same_domain else ""
    report = check([Question("t", task, host)], [Question("b", other, host)])
    assert bool(report.overlaps) == naive(task, other, SAME_DOMAIN if same_domain else 1.0)


@given(texts, texts)
def test_closeness_is_symmetric(a: str, b: str) -> None:
    """Which side is the benchmark does not matter."""
    x, y = Question("x", a), Question("y", b)
    one, two = list(Index([y]).overlaps(x)), list(Index([x]).overlaps(y))
    assert [item.closeness for item in one] == [item.closeness for item in two]


def test_formatting_does_not_hide_an_overlap() -> None:
    """Case, punctuation, spaces and full-width letters are no difference."""
    asked = Question("t", "Find the  CHEAPEST flight, from Oslo to Rome!")
    report = check([asked], [Question("b", "find the cheapest ｆｌｉｇｈｔ from oslo to rome")])
    assert [overlap.kind for overlap in report.overlaps] == ["exact"]


def test_subdomains_are_one_domain() -> None:
    """The limits fall on one domain, www or not; two names that end alike are two domains."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    asked, other = " ".join(words), " ".join([*words[:6], *["one", "two", "three", "four", "five", "six"]])
    for host, found in (("www.a.com", True), ("m.a.com", True), ("nota.com", False), ("", False)):
        report = check([Question("t", asked, host)], [Question("b", other, "a.com")])
        assert bool(report.overlaps) is found, host
        assert len(report.closest) == (not found)


def test_planted_overlaps_are_found_among_thousands_and_nothing_else() -> None:
    """Fifty of each kind among 5,000 tasks are found against 1,552 questions, and no unrelated one is."""
    r = random.Random(0)
    benchmark = [question(r, f"b{number}", host=f"h{number % 90}.com") for number in range(1_552)]
    tasks, expected = [], set[str]()
    for kind in ("exact", "contained", "jaccard", "containment"):
        for number in range(50):
            source = r.choice(benchmark)
            words, name = source.text.split(), f"{kind}{number}"
            text = {
                "exact": source.text.upper() + ".",
                "contained": f"please {source.text} today or tomorrow at the latest and then tell me " * 1,
                "jaccard": " ".join([*words[:11], *r.choices(WORDS, k=3)]),
                "containment": " ".join([*words[:10], *r.choices(WORDS, k=2)]) + " " + " ".join(words[:2]),
            }[kind]
            expected.add(name)
            tasks.append(Question(name, text))
    tasks += [question(r, f"free{number}") for number in range(5_000 - len(tasks))]
    report = check(tasks, benchmark)  # every question has split its words once now, for both times below
    assert {overlap.task.name for overlap in report.overlaps} == expected

    def cpu_s(asked: list[Question]) -> float:
        """Best of three: a collection of garbage is longer than a short check."""
        times = []
        for _ in range(3):
            began = time.process_time()
            check(asked, benchmark)
            times.append(time.process_time() - began)
        return min(times)

    assert cpu_s(tasks) < 12 * cpu_s(tasks[:1_000])  # linear in the tasks


def test_published_files_are_read(tmp_path: Path) -> None:
    """JSON, JSON Lines and our task files give name, text and host; a file without questions is named."""
    lines = tmp_path / "webvoyager.jsonl"
    lines.write_text(json.dumps({"id": "A--1", "ques": "Find a lamp", "web": "https://www.a.com/x"}) + "\n")
    whole = tmp_path / "om2w.json"
    whole.write_text(json.dumps([{"task_id": "7", "confirmed_task": "Buy it", "website": "https://b.com"}]))
    ours = tmp_path / "ours.jsonl"
    ours.write_text(
        '{"schema_version": 1, "kind": "Task"}\n{"task_id": "t", "text": "Go", "start_url": null}\n'
    )
    table = tmp_path / "tail.tsv"
    table.write_text("benchmark\tid\ttask_summary\nflights\tf1\tFly home\n")
    found = [read_questions(path)[0] for path in (lines, whole, ours, table)]
    assert [(item.name, item.text) for item in found] == [
        ("webvoyager:A--1", "Find a lamp"),
        ("om2w:7", "Buy it"),
        ("ours:t", "Go"),
        ("tail:f1", "Fly home"),
    ]
    assert [item.host.removeprefix("www.") for item in found] == ["a.com", "b.com", "", ""]
    whole.write_text("[{}]")
    with pytest.raises(RecordError, match=r"om2w\.json: entry 1 has no question"):
        read_questions(whole)


def test_the_command_lists_what_overlaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the pair in words where a task overlaps; 0 where none does."""
    bench, tasks = tmp_path / "bench.jsonl", tmp_path / "tasks.jsonl"
    bench.write_text(json.dumps({"id": 1, "ques": "Find the cheapest flight to Rome", "web": "http://a.com"}))
    tasks.write_text(json.dumps({"task_id": "t1", "text": "find the cheapest flight to rome"}))
    assert main([str(tasks), "--against", str(bench)]) == 2
    assert "exact 1.00: tasks:t1 'find the cheapest flight to rome' ~ bench:1" in capsys.readouterr().out
    tasks.write_text(json.dumps({"task_id": "t1", "text": "find the cheapest lamp in town tonight"}))
    assert main([str(tasks), "--against", str(bench)]) == 0
    assert "0 tasks overlap" in capsys.readouterr().out
