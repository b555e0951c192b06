"""Laws of the judges: strict verdicts, what the outcome judge is shown, and when it is asked at all."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from fake_world import TASK, ScriptedPolicy, trajectory
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.evaluation.judges import (
    VERDICTS,
    judge_failure,
    judge_outcome,
    judge_run,
    outcome_messages,
    parse_failure_label,
    parse_verdict,
)
from rmsweb.mining.taxonomy import CATEGORIES, Label
from rmsweb.records import Image, Judgement, Observation, Step


def steps(count: int) -> list[Step]:
    """Steps with one picture each; every third has none."""
    shots = [
        Image(path=f"{i}.png", sha256="", width=1, height=1) if i % 3 else None for i in range(1, count + 1)
    ]
    seen = [
        Observation(url="u", title="", tabs=(), active_tab="1", viewport=(1, 1), screenshot=shot)
        for shot in shots
    ]
    return [Step(number=i, observation=o, response_text="", output=None) for i, o in enumerate(seen, 1)]


@given(st.text())
def test_any_text_has_a_verdict(text: str) -> None:
    """The parser is total, and words without an object are unparsed."""
    assert parse_verdict(text)[0] in (*VERDICTS, "unparsed")
    if "{" not in text:
        assert parse_verdict(text)[0] == "unparsed"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"reason":"r","verdict":"success"}', "success"),
        ('Well.\n```json\n{"verdict": "not_success"}\n```', "not_success"),
        ('{"verdict":"unknown","reason":3}', "unknown"),
        ('{"verdict":"SUCCESS"}', "unparsed"),
        ('{"verdict":true}', "unparsed"),
        ('{"verdict":["success"]}', "unparsed"),
        ('{"verdict":"success"} {"verdict":"not_success"}', "unparsed"),
        ('{"verdict":"success"', "unparsed"),
        ("success", "unparsed"),
        ("", "unparsed"),
        ("{" * 5000, "unparsed"),
    ],
)
def test_verdicts_are_strict(text: str, verdict: str) -> None:
    """Exactly one object with a known verdict counts; nothing is guessed."""
    assert parse_verdict(text)[0] == verdict


def test_the_outcome_judge_sees_task_answer_and_the_last_four_pictures() -> None:
    """The request holds the task, the final answer and the last four screenshots, oldest first; no step's
    thinking.
    """
    run = trajectory(steps(8), final_text="it costs 3")
    messages = outcome_messages(run)
    parts = messages[1].parts
    assert [part.path for part in parts if isinstance(part, Image)] == ["4.png", "5.png", "7.png", "8.png"]
    assert TASK.text in parts[0].text  # type: ignore[union-attr]
    assert "it costs 3" in parts[0].text  # type: ignore[union-attr]


def test_a_judgement_records_the_request_and_the_words() -> None:
    """The same run gives the same request and seed; an unreadable verdict is kept as it was said."""
    judge = ScriptedPolicy(json.dumps({"verdict": "success", "reason": "fine"}), "hm")
    first, second = (asyncio.run(judge_outcome(judge, trajectory(steps(2)))) for _ in range(2))
    assert (first.verdict, first.reason, first.model, first.judge) == (
        "success",
        "fine",
        "scripted",
        "outcome",
    )
    assert (second.verdict, second.raw) == ("unparsed", "hm")
    assert first.prompt_sha256 == second.prompt_sha256
    assert judge.calls[0] == judge.calls[1]
    assert judge.calls[0][1] == "judge"


def test_a_check_comes_before_the_judge_and_nobody_is_asked_without_a_done() -> None:
    """Without an executed `done` nobody is asked; a site's check comes before the LLM; with neither the run
    stops.
    """
    judge, checks = ScriptedPolicy('{"verdict":"success"}'), []
    check_says: list[Judgement | None] = [None]

    async def check() -> Judgement | None:
        checks.append(1)
        return check_says[0]

    def verdict(run: Any, policy: Any = judge) -> Judgement:
        return asyncio.run(judge_run(run, check, policy))

    unfinished = verdict(trajectory(ended="max_steps", declared_success=None))
    assert (unfinished.verdict, unfinished.judge, checks, judge.calls) == ("not_success", "rule", [], [])
    assert verdict(trajectory(declared_success=False)).judge == "outcome"
    check_says[0] = Judgement(trajectory_id="x", judge="check", model="", verdict="not_success")
    assert verdict(trajectory()) == check_says[0]
    assert len(judge.calls) == 1
    check_says[0] = None
    with pytest.raises(ValueError, match="--judge-url"):
        verdict(replace(trajectory()), None)


@given(
    st.text()
    | st.builds(
        json.dumps,
        st.dictionaries(
            st.sampled_from(["category", "confidence", "reason"]), st.text() | st.floats() | st.booleans()
        ),
    )
)
def test_failure_labels_are_strict(text: str) -> None:
    """Any text gives a known category with a confidence in [0, 1], or None."""
    label = parse_failure_label(text)
    assert label is None or (label.category in CATEGORIES and 0 <= label.confidence <= 1)


@pytest.mark.parametrize(
    "text",
    [
        '{"category":"c","confidence":1}',
        '{"category":"date"}',
        '{"category":"date","confidence":1.5}',
        '{"category":"date","confidence":true}',
    ],
)
def test_unknown_categories_and_impossible_confidences_are_no_labels(text: str) -> None:
    """Unknown categories and missing or impossible confidences are no labels."""
    assert parse_failure_label(text) is None


def test_the_failure_judge_sees_both_runs_and_the_evidence() -> None:
    """Task, both summaries, the rules' evidence and every category are in the request; a review also sees
    the opinions so far.
    """
    judge = ScriptedPolicy('{"reason":"r","category":"endpoint","confidence":0.9}')
    case = {"task_text": "buy it", "success": "good run\n", "failure": "bad run\n", "evidence": "cue\n"}
    assert asyncio.run(judge_failure(judge, **case)) == Label("endpoint", 0.9, reason="r")
    assert asyncio.run(judge_failure(judge, **case, opinions=[Label("date", 0.4, reason="day")])) is not None
    assert all(words in judge.prompts[0] for words in (*case.values(), *CATEGORIES))
    assert "judge: date 0.40 day" in judge.prompts[1]
    assert judge.calls[0][1] == "failure_judge"
    assert judge.calls[0][0] != judge.calls[1][0]
