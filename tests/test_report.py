"""Laws of the report: figures from records alone, escaped texts, relative links, scripted roles by name."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import BAD, EVIL, GOOD, held_out, run, write_folder

import mine
from rmsweb.config import main_guard
from rmsweb.evaluation.figures import Results
from rmsweb.report.__main__ import main
from rmsweb.report.charts import Point, layout, ticks
from rmsweb.report.page import TEMPLATES


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
    """Markup in texts of a run stays text; the page loads nothing but pictures that lie beside it."""
    folder = held_out(tmp_path / "sft", "+-", hostile=True)
    assert call(folder) == 0
    page = page_of(folder)
    assert "script" not in page.tags
    assert EVIL in page.text
    assert page.sources
    assert all(
        not address.startswith(("/", "http")) and (folder / address).is_file() for address in page.sources
    )


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
        "Runs",
        "instead of",
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
