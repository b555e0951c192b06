"""Laws of the report: figures from records alone, every run listed, texts as text, links that resolve."""

import json
import math
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import BAD, CONFIG, EVIL, GOOD, held_out, run, write_folder

import mine
from rmsweb.config import Config, main_guard, opt
from rmsweb.evaluation.figures import Results
from rmsweb.jsonl import read_records
from rmsweb.prompt import build_prompt
from rmsweb.records import MinedState, Text
from rmsweb.report.__main__ import main
from rmsweb.report.charts import Point, layout, ticks
from rmsweb.report.page import TEMPLATES
from rmsweb.runs import RunWriter


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """A script's flags."""

    tasks: Path = opt(help="task file")
    max_steps: int = opt(50, "turns")


class Page(HTMLParser):
    """Tags, the addresses that they load, and the text, whose spaces do not count."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text = " ".join(f"{self.text} {data}".split())


def call(*words: object) -> int:
    """The exit code of the report's command line."""
    return main_guard(lambda: main([str(word) for word in words]))


def page_of(folder: Path) -> Page:
    """The report in a folder."""
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_summary_holds_the_contract(tmp_path: Path) -> None:
    """summary.json has policies.{base,sft,rl}.{pass1,pass3,steps,n} and seconds; a missing figure is None."""
    folders = [
        held_out(tmp_path / name, wins) for name, wins in (("base", "---"), ("sft", "+--"), ("rl", "+++"))
    ]
    (tmp_path / "seconds.json").write_text('{"total": 9, "sft": 5}')
    out, seconds = tmp_path / "out", tmp_path / "seconds.json"
    assert call(*folders, "--out", out, "--seconds", seconds) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {
        name: (row["pass1"], row["pass3"], row["steps"], row["n"])
        for name, row in summary["policies"].items()
    } == {
        "base": (0.0, 0.0, None, 1),
        "sft": (pytest.approx(1 / 3), 1.0, 4.0, 1),
        "rl": (1.0, 1.0, 4.0, 1),
    }
    assert summary["seconds"] == {"total": 9, "sft": 5}
    assert set(summary["differences"]) == {"sft - base", "rl - sft"}
    assert summary["scripted"] == []


def test_the_page_shows_the_runs_that_turned(tmp_path: Path) -> None:
    """Changed runs are counted by direction, and the page shows both sides."""
    before, after = (
        Results(held_out(tmp_path / name, wins))
        for name, wins in (("sft", "--+" + "+-"), ("rl", "+--" + "+-" + "+"))
    )
    assert call(before.path, after.path, "--out", tmp_path / "out") == 0
    shown = page_of(tmp_path / "out").text
    assert "SFT to SFT + RL: 1 runs turned from failure to success" in shown
    assert "SFT to SFT + RL: 1 runs turned from success to failure" in shown


def test_page_text_is_escaped_and_links_are_relative(tmp_path: Path) -> None:
    """Markup in texts of a run stays text; the page loads nothing but files that lie beside it."""
    folder = held_out(tmp_path / "sft", "+-", hostile=True)
    assert call(folder) == 0
    page = page_of(folder)
    assert page.tags.count("script") == 1
    own = [address for address in page.sources if not address.startswith(("#", "data:,"))]
    assert own
    assert all((folder / address).is_file() for address in own)
    for file in (folder / "report_files").glob("*.js"):
        if file.name != "viewer.js":
            assert "<" not in file.read_text(encoding="ascii")
    assert EVIL in json.dumps(loaded(folder, "lists"), ensure_ascii=False).replace('\\"', '"')


def loaded(folder: Path, name: str) -> Any:
    """The data of a file of the report in a folder."""
    text = (folder / "report_files" / f"{name}.js").read_text(encoding="ascii")
    return json.loads(text.removeprefix(f'loaded("{name}",').removesuffix(");\n"))


def test_every_run_is_listed_and_its_file_shows_what_the_policy_saw(tmp_path: Path) -> None:
    """The list holds all runs with outcome, mode, end, tokens and cost; a run's file has each step's
    prompt as it was sent, the answer's fields, results and boxes.
    """
    folder = held_out(tmp_path / "sft", "+-?" * 4)
    prices = tmp_path / "prices.json"
    prices.write_text('{"p": {"prompt": 1, "completion": 2}}')
    assert call(folder, "--out", tmp_path / "out", "--prices", prices) == 0
    rows = loaded(tmp_path / "out", "lists")["runs"]
    assert [row["key"] for row in rows] == [f"sft/t{task}.n{run}" for task in range(4) for run in range(3)]
    assert {row["outcome"] for row in rows} == {"success", "failure"}
    assert all(bool(row["mode"]) == (row["outcome"] == "failure") for row in rows)
    assert rows[0]["cost"] == "0.0000"
    found = next(Results(folder).trajectories())
    shown = loaded(tmp_path / "out", rows[0]["file"])
    for number, step in enumerate(shown["steps"]):
        sent = build_prompt(
            CONFIG,
            task_text=found.task.text,
            observation=found.steps[number].observation,
            history=found.steps[:number],
        )
        texts = [part.text for message in sent.messages for part in message.parts if isinstance(part, Text)]
        assert "".join(part["text"] for part in step["prompt"] if part["tag"] != "image") == "".join(texts)
        assert step["note"] == ""
        assert [box["index"] for box in step["boxes"]] == list(sent.indices)
        assert step["goal"].startswith("goal ")
        assert step["results"][0]["message"].startswith("did ")


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two folders that are called alike keep their figures, and one that is given twice counts once."""
    a, b = held_out(tmp_path / "a/sft", "+++"), held_out(tmp_path / "b/sft", "---")
    assert call(a, b, a, "--out", tmp_path / "out") == 0
    policies = json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]
    assert {name: found["pass1"] for name, found in policies.items()} == {"a/sft": 1.0, "b/sft": 0.0}


def test_a_runs_own_summary_stays(tmp_path: Path) -> None:
    """A report written into a run folder does not replace the summary that the run wrote."""
    folder = held_out(tmp_path / "sft", "+")
    (folder / "summary.json").write_text('{"policy": "p"}')
    assert call(folder) == 0
    assert json.loads((folder / "summary.json").read_text()) == {"policy": "p"}


def test_the_head_says_where_a_run_comes_from(tmp_path: Path) -> None:
    """Date, commit, machine, command, and the settings that differ from the defaults, with the default."""
    folder = held_out(tmp_path / "sft", "+")
    with RunWriter(
        folder, Settings(tasks=Path("t"), max_steps=9), resume=True, may_differ=("tasks", "max_steps")
    ):
        written = json.loads((folder / "env.json").read_text())
    assert written["commit"] == "" or len(written["commit"].removesuffix("-dirty")) == 40
    written |= {"commit": "c0ffee", "argv": ["evaluate.py", "--max-steps", "9 <b>"], "cpu": "abacus"}
    (folder / "env.json").write_text(json.dumps(written))
    assert call(folder, "--out", tmp_path / "out") == 0
    shown = page_of(tmp_path / "out").text
    for words in (written["started"][:10], "c0ffee", "abacus", "python evaluate.py --max-steps '9 <b>'"):
        assert words in shown
    assert 'tasks = "t" max_steps = 9 default 50' in shown
    (folder / "env.json").write_text('{"argv": 5}')
    assert call(folder, "--out", tmp_path / "out") == 2


def test_a_pair_shows_the_steps_of_its_runs(tmp_path: Path) -> None:
    """Both sides of a mined pair lead to the step of the run whose picture they have, and to no other run."""
    pool = write_folder(tmp_path / "pool", [run(GOOD, True), run(BAD, False, name="b")])
    assert mine.main(["--pool", str(pool), "--out", str(tmp_path / "mined")]) == 0
    assert call(pool, tmp_path / "mined", "--out", tmp_path / "out") == 0
    lists = loaded(tmp_path / "out", "lists")
    files = {row["key"]: row["file"] for row in lists["runs"]}
    assert lists["pairs"]
    for side in (side for pair in lists["pairs"] for side in pair["sides"]):
        assert side["file"] == files[side["run"]]
        step = loaded(tmp_path / "out", side["file"])["steps"][side["step"] - 1]
        assert (step["url"], step["actions"]) == (side["url"], side["actions"])
    assert call(tmp_path / "mined", "--out", tmp_path / "alone") == 0
    assert all("file" not in side for side in loaded(tmp_path / "alone", "lists")["pairs"][0]["sides"])


def rollouts(mined: Path, rl: Path) -> None:
    """Write an RL folder that sampled every mined state twice, and one state that no folder holds."""
    states = list(read_records(mined / "mined.jsonl", MinedState))
    answers = [{"reward": 1.0, "why": "1 (exact)", "text": EVIL}, {"reward": 0.3, "why": "0.3", "text": "b"}]
    lines = [
        {
            "step": step,
            "state": name,
            "category": "evidence",
            "gate": "accepted",
            "target": target,
            "rollouts": answers,
        }
        for step in (1, 11)
        for name, target in [*((state.state_id, state.target_text) for state in states), ("gone", "x")]
    ]
    rl.mkdir()
    (rl / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn": ')
    (rl / "metrics.jsonl").write_text('{"step": 1, "std_rejected_frac": 0.5}\n')


def test_groups_show_state_answers_rewards_and_gate(tmp_path: Path) -> None:
    """Each line of rollouts.jsonl is a group with its answers and reasons; a state that a given folder holds
    has its prompt and the step of its run. An unfinished last line is left out, a wrong one is named.
    """
    pool = write_folder(tmp_path / "pool", [run(GOOD, True), run(BAD, False, name="b")])
    assert mine.main(["--pool", str(pool), "--out", str(tmp_path / "mined")]) == 0
    rollouts(tmp_path / "mined", tmp_path / "rl")
    assert call(pool, tmp_path / "mined", tmp_path / "rl", "--out", tmp_path / "out") == 0
    groups = loaded(tmp_path / "out", "lists")["groups"]
    assert [group["step"] for group in groups] == [1, 1, 11, 11]
    known, gone = groups[:2]
    assert loaded(tmp_path / "out", known["file"])["answers"][0] == {
        "reward": "1.00",
        "why": "1 (exact)",
        "text": EVIL,
    }
    assert known["sides"][0]["run"] == "pool/t0.a"
    assert loaded(tmp_path / "out", known["state_file"])["prompt"][0]["tag"] == "system"
    assert not gone["sides"]
    (tmp_path / "rl/rollouts.jsonl").write_text('{"step": "1"}\n')
    assert call(tmp_path / "rl", "--out", tmp_path / "out") == 2


def test_a_picture_outside_of_its_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder may come from a stranger: a record that names a file elsewhere ends the report."""
    folder = held_out(tmp_path / "sft", "+")
    path = folder / "trajectories.rank0.jsonl"
    path.write_text(path.read_text().replace("screenshots/", "../../screenshots/"))
    assert call(folder) == 2
    assert "outside" in capsys.readouterr().err


def test_scripted_roles_are_named(tmp_path: Path) -> None:
    """A config or records that name a scripted role make the page say so; an unused judge does not count."""
    plain = write_folder(
        tmp_path / "a", [run(GOOD, True)], config={"judge_model": "scripted-judge", "judge_url": None}
    )
    used = write_folder(
        tmp_path / "b", [run(GOOD, True, script="collect")], config={"policy_model": "scripted-teacher"}
    )
    assert not Results(plain).scripted
    assert call(plain, used, "--out", tmp_path / "out") == 0
    assert "Scripted roles in this report: scripted-teacher" in page_of(tmp_path / "out").text


def test_every_section_has_its_folder(tmp_path: Path) -> None:
    """A section appears if a folder brings its data, and the paper's figures always appear."""
    collected = write_folder(
        tmp_path / "collect", [run(GOOD, True, script="collect"), run(BAD, False, name="b", script="collect")]
    )
    (collected / "summary.json").write_text(
        json.dumps(
            {"tasks": 1, "attempts": 2, "samples": {"action": 4}, "solve@2_failed_round_1": [0.0, 0.5]}
        )
    )
    assert mine.main(["--pool", str(collected), "--out", str(tmp_path / "mined")]) == 0
    rl, sft = tmp_path / "train-rl", tmp_path / "train-sft"
    cells = {"controls": {"accepted": 1, "no contrast": 2}}
    lines = {
        rl: {"step": 1, "std_rejected_frac": 0.5, "reward_mean": 0.3, "cells": cells},
        sft: {"step": 1, "loss": 0.5, "dev_loss": 0.4},
    }
    for folder, line in lines.items():
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    folders = [collected, tmp_path / "mined", rl, sft]
    assert [Results(folder).role for folder in folders] == ["collection", "mined", "rl", "sft"]
    assert call(*folders, "--out", tmp_path / "out") == 0
    shown = page_of(tmp_path / "out").text
    for words in (
        "Collection",
        "Mining: mined",
        "Gates",
        "Rejected by each gate",
        "SFT loss",
        "nats a token",
        "Band: the paper's course, std gate 0.32 to 0.44",
        "Look at the mined pairs",
        "86.4",
        "No evaluation of held-out tasks",
    ):
        assert words in shown


def test_bad_input_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder is exit 3, a broken metrics file exit 2 with its line."""
    assert call(tmp_path / "none") == 3
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "metrics.jsonl").write_text('{"step": 1}\nnot json\n')
    assert call(tmp_path / "rl") == 2
    assert "metrics.jsonl:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"samples": 5}'),
        ("summary.json", '{"samples": {"action": "x"}}'),
        ("env.json", '{"defaults": []}'),
        ("rollouts.jsonl", '{"step": 1}\n'),
        ("prompt_config.json", "[]"),
    ],
)
def test_a_file_of_other_types_ends_in_one_line(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of a stranger may hold anything: exit code 2 and one line that names the folder."""
    folder = write_folder(tmp_path / "collect", [run(GOOD, True, script="collect")])
    (folder / name).write_text(text)
    assert call(folder, "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert str(folder) in told


def test_a_line_of_metrics_without_a_step_is_no_point(tmp_path: Path) -> None:
    """Lines that another tool added to metrics.jsonl are left out of the curves."""
    (tmp_path / "rl").mkdir()
    lines = ({"std_rejected_frac": 0.5}, {"step": 1, "std_rejected_frac": 0.25})
    (tmp_path / "rl" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call(tmp_path / "rl", "--out", tmp_path / "out") == 0
    assert "std gate 0.25" in page_of(tmp_path / "out").text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_span_the_data(low: float, width: float) -> None:
    """Round ticks, at most seven, from below the data to above it."""
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 7
    slack = 1e-6 * (abs(low) + width)
    assert found[0] <= low + slack
    assert found[-1] >= low + width - slack


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(allow_nan=True, allow_infinity=True, width=32)), max_size=8
    )
)
def test_a_chart_takes_any_numbers(points: list[tuple[float, float]]) -> None:
    """Not-a-number and infinite values are left out; without points there is no chart."""
    series = {"x": [Point(x, y) for x, y in points], "empty": []}
    found = TEMPLATES.from_string('{% import "parts.html.j2" as parts %}{{ parts.chart("a & b", series) }}')
    drawn = found.render(series=series)
    assert ("<svg" in drawn) == any(math.isfinite(y) for _, y in points)
    assert "nan" not in drawn.replace("legend", "")
    assert (layout(series) is None) == ("<svg" not in drawn)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500)), min_size=1, max_size=400))
def test_counts_and_steps_have_whole_ticks_and_every_chart_few_columns(points: list[tuple[int, int]]) -> None:
    """Ticks of counts and of steps are whole numbers within the axis; a long curve stays a small page."""
    chart = layout({"x": [Point(x, y) for x, y in points]}, counts=True)
    assert chart is not None
    assert all(float(tick.value).is_integer() for tick in (*chart.x_ticks, *chart.y_ticks))
    assert all(0 <= tick.at <= 1 for tick in (*chart.x_ticks, *chart.y_ticks))
    assert 1 <= len(chart.columns) <= 200
    assert all(0 <= column.left <= column.x <= column.right <= 1 for column in chart.columns)
