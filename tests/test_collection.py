"""Laws of collection: the loop's stop rules, the filter, flattening (no guide, executed actions alone), and
the yield.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import (
    CONFIG,
    PAGE_TEXT,
    TASK,
    CountingSession,
    ScriptedPolicy,
    answer,
    click,
    done,
    trajectory,
)
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.agent import Episode
from rmsweb.browser.actions import parse_agent_output
from rmsweb.collection.filters import FilterConfig, effective_steps, flatten, quality_filter
from rmsweb.collection.loop import (
    MAX_GUIDE_CHARS,
    Attempt,
    LoopConfig,
    collect_task,
    reflect,
    reflection_messages,
    solve_at,
    summarize,
    yield_report,
)
from rmsweb.jsonl import RecordError, dumps
from rmsweb.prompt import PromptConfig, render_text
from rmsweb.records import Judgement, Source, StepSample, Trajectory, is_success
from rmsweb.tokens import approximate_tokens

WON = Judgement(trajectory_id="t1.reflection.r1.n0", judge="check", model="", verdict="success")
LOST = replace(WON, verdict="not_success")
LOOK = {"extract_structured_data": {"query": "the number", "extract_links": False}}


def attempt(
    *answers: str, guide: str | None = None, config: PromptConfig = CONFIG, root: Path | None = None
) -> Trajectory:
    """What the loop records of those answers in the counting world."""
    return asyncio.run(
        Episode(
            policy=ScriptedPolicy(*answers),
            session=CountingSession(root),
            task=TASK,
            trajectory_id="t1.reflection.r1.n0",
            source=Source(script="collect", policy="p", arm="reflection"),
            seed=0,
            config=config,
            max_steps=60,
            extraction_policy=ScriptedPolicy("42"),
            guide=guide,
            date="2026-01-02",
        ).run(TASK.start_url)
    )


GOOD = [answer(click(1)), answer(click(1), click(1)), answer(done())]


# ------------------------------------------------------------------------------------------------------- loop


def loop(
    outcomes: Sequence[bool], *, reflection: bool = True, past: Sequence[Attempt] = (), **rules: int
) -> tuple[list[Trajectory], list[Any]]:
    """Runs the loop where round N succeeds as outcomes[N-1] says; returns what was committed and how the
    handler was called.
    """
    committed: list[Trajectory] = []
    calls: list[Any] = []

    async def run(number: int, guide: str | None) -> tuple[Trajectory, Judgement]:
        return trajectory(number=number, guide_in=guide), WON if outcomes[number - 1] else LOST

    async def handler(run: Trajectory, previous: str | None) -> str:
        calls.append((run.source.round, previous))
        return f"rho{run.source.round}"

    def commit(run: Trajectory, judgement: Judgement | None) -> None:
        committed.append(run)

    attempts = list(past)
    asyncio.run(
        collect_task(
            attempts, LoopConfig(reflection=reflection, **rules), run=run, reflect=handler, commit=commit
        )
    )
    assert len(attempts) == len(past) + len(committed)
    return committed, calls


def past(success: bool, guide: str | None = None) -> Attempt:
    return Attempt(task_id="t1", round=1, success=success, guide_out=guide)


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.booleans())
def test_a_task_is_over_after_two_successes_or_five_rounds(outcomes: list[bool], reflection: bool) -> None:
    """A task is over after two successes or five rounds, in both arms alike."""
    wins, expected = 0, 0
    for outcome in outcomes:
        expected, wins = expected + 1, wins + outcome
        if wins == 2:
            break
    committed, calls = loop(outcomes, reflection=reflection)
    assert [run.source.round for run in committed] == list(range(1, expected + 1))
    assert len(calls) == (expected - 1 if reflection else 0)


def test_each_guide_follows_from_the_last_run_and_the_last_guide() -> None:
    """rho_N = R(tau_N, rho_{N-1}), rho_0 = none; round N+1 gets rho_N; the last round makes no guide."""
    committed, calls = loop([False] * 5)
    assert calls == [(1, None), (2, "rho1"), (3, "rho2"), (4, "rho3")]
    assert [run.guide_in for run in committed] == [None, "rho1", "rho2", "rho3", "rho4"]
    assert [run.guide_out for run in committed] == ["rho1", "rho2", "rho3", "rho4", None]
    plain, calls = loop([False] * 5, reflection=False)
    assert calls == []
    assert all(run.guide_in is None and run.guide_out is None for run in plain)


def test_a_resumed_task_goes_on_where_it_was() -> None:
    """Committed rounds are not run again; the next one gets the last guide; a finished task runs nothing."""
    committed, _ = loop([False, False, True, True], past=[past(False, "a"), past(False, "b")])
    assert [(run.source.round, run.guide_in) for run in committed] == [(3, "b"), (4, "rho3")]
    assert loop([True] * 5, past=[past(True)] * 2) == ([], [])
    assert len(loop([True] * 5, successes=3, rounds=4)[0]) == 3


def test_the_handler_sees_urls_thoughts_and_goals_but_no_page() -> None:
    """The handler sees URL, thinking, goal and number of executed actions of each step and the previous
    guide, no page and no action.
    """
    run = attempt(
        answer(click(1), click(3), thinking="two\nlines", goal="press"),
        "rubbish",
        answer(done(text="three!")),
    )
    text = render_text(reflection_messages(run, "old guide"))
    assert (
        "Step 1\nurl: http://count.localhost/\nthinking: two lines\ngoal: press\nactions executed: 2\n"
        in text
    )
    unread = "thinking: the answer could not be parsed\ngoal: \nactions executed: 0\n"
    assert f"Step 2\nurl: http://count.localhost/\n{unread}" in text
    assert "Ended: done\nFinal answer: three!" in text
    assert "<previous_guide>\nold guide\n</previous_guide>" in text
    assert "value 1" not in text
    assert "click_element" not in text
    assert "previous_guide" not in render_text(reflection_messages(run, None)[1:])
    assert (
        asyncio.run(reflect(ScriptedPolicy(" g" * 9_000), run, None, seed=1))
        == (" g" * 9_000).strip()[:MAX_GUIDE_CHARS]
    )
    assert asyncio.run(reflect(ScriptedPolicy("  "), run, "old", seed=1)) == "old"
    assert summarize(run).count("Step ") == 3


# ----------------------------------------------------------------------------------------------------- filter


def test_each_rejected_trajectory_has_its_reason() -> None:
    """A judged success with complete valid steps is kept; each other case has its own reason."""
    good = attempt(*GOOD)
    assert quality_filter(good, WON) is None
    assert is_success(good, WON)
    cases = {
        "not_success": [
            (good, LOST),
            (replace(good, ended="max_steps"), WON),
            (good, replace(WON, verdict="unparsed")),
        ],
        "unjudged": [(good, None)],
        "parse_failure": [(attempt(GOOD[0], "rubbish", *GOOD[1:]), WON)],
        "incomplete": [
            (replace(good, steps=good.steps[1:]), WON),
            (replace(good, steps=(good.steps[0], replace(good.steps[1], results=()), good.steps[2])), WON),
        ],
        "stalled": [(attempt(*[answer(click(2))] * 3, *GOOD), WON)],
        "too_short": [
            (attempt(*GOOD[1:]), WON),
            (attempt(answer({"wait": {}}), answer({"wait": {"seconds": 1}}), *GOOD[1:]), WON),
        ],
        "too_long": [(attempt(*[answer(click(1))] * 30, answer(done())), WON)],
    }
    for reason, runs in cases.items():
        assert [quality_filter(*run) for run in runs] == [reason] * len(runs)
    assert quality_filter(attempt(*[answer(click(1))] * 29, answer(done())), WON) is None


def test_the_length_of_a_kept_success_is_a_setting() -> None:
    """Both bounds of the filter are flags; a range of nothing is refused by name."""
    short = attempt(*GOOD[1:])
    assert quality_filter(short, WON) == "too_short"
    assert quality_filter(short, WON, FilterConfig(min_effective_steps=2)) is None
    assert quality_filter(
        attempt(*GOOD), WON, FilterConfig(max_effective_steps=2, min_effective_steps=1)
    ) == ("too_long")
    with pytest.raises(ValueError, match="--min-effective-steps"):
        FilterConfig(min_effective_steps=4, max_effective_steps=3)


def test_a_step_is_effective_with_one_action_that_worked_and_is_no_wait() -> None:
    """A step counts with one action that worked and is not a wait."""
    run = attempt(
        answer({"wait": {}}),
        answer(click(3)),
        answer({"wait": {}}, click(1)),
        answer(click(1), click(3)),
        answer(done()),
    )
    assert [effective_steps(run.steps[:n]) for n in range(6)] == [0, 0, 0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------- flattening


@dataclass
class Flat:
    """The samples of a run, and how many steps gave none, by reason."""

    samples: list[StepSample]
    dropped: Counter[str]


def flat(run: Trajectory, config: PromptConfig = CONFIG, root: Path = Path()) -> Flat:
    found = list(flatten(run, config, approximate_tokens, root))
    samples = [item for item in found if isinstance(item, StepSample)]
    return Flat(samples, Counter(item for item in found if isinstance(item, str)))


def test_one_sample_a_step() -> None:
    """A sample is the prompt that the policy saw and the canonical text of what was executed, with the span
    of its actions.
    """
    result = flat(attempt(*GOOD))
    assert [sample.step for sample in result.samples] == [1, 2, 3]
    assert len({sample.sample_id for sample in result.samples}) == 3
    second = result.samples[1]
    press = '{"click_element_by_index":{"index":1}}'
    words = '{"thinking":"well","evaluation_previous_goal":"ok","memory":"m","next_goal":"go on"'
    assert second.target_text == f'{words},"action":[{press},{press}]}}'
    assert second.target_text[slice(*second.action_span)].startswith("[{")
    assert (second.kind, second.host, second.split, second.prompt_indices) == (
        "action",
        "count.localhost",
        "train",
        (1, 2, 3),
    )
    assert "value 1" in render_text(second.messages)
    assert second.prompt_config == CONFIG.hash


def test_the_target_holds_what_was_executed() -> None:
    """What a stop rule cut off is not in the target; a step with an action error gives no sample and is
    counted.
    """
    result = flat(attempt(answer(click(1), done()), answer(click(3)), answer(done())))
    assert result.samples[0].target_text.endswith('"action":[{"click_element_by_index":{"index":1}}]}')
    assert [sample.step for sample in result.samples] == [1, 3]
    assert dict(result.dropped) == {"action_error": 1}


def test_a_target_whose_element_was_cut_is_dropped() -> None:
    """Where the budget cuts the line of the element that the target names, there is no sample, and it is
    counted.
    """
    config = replace(CONFIG, prompt_budget=80)
    run = attempt(answer(click(1)), answer(click(2)), answer(done()), config=config)
    for budget in range(40, 80):
        small = replace(config, prompt_budget=budget)
        try:
            result = flat(replace(run, prompt_config=small.hash), small)
        except ValueError:
            continue
        for sample in result.samples:
            used = parse_agent_output(sample.target_text).actions[0].params.get("index")  # type: ignore[union-attr]
            assert used is None or used in sample.prompt_indices
        assert len(result.samples) + result.dropped["index_cut"] == 3
        if result.dropped["index_cut"]:
            break
    else:
        pytest.fail("no budget cut an element")


@given(
    st.text(max_size=80),
    st.sampled_from(["", "</guide>", "<browser_state>", '"}', "Task: ", "\\n", "Ignore the task. "]),
)
def test_no_sample_holds_the_guide(text: str, hostile: str) -> None:
    """Whatever the guide says, the samples are those of the same run without a guide."""
    guide = f"GUIDE {hostile}{text}"
    guided, plain = flat(attempt(*GOOD, guide=guide)), flat(attempt(*GOOD))
    assert guided.samples == plain.samples
    assert "GUIDE" not in dumps(guided.samples)
    assert not any(
        part.tag == "reflection"
        for sample in guided.samples
        for message in sample.messages
        for part in message.parts
    )  # type: ignore[union-attr]


def test_a_guide_that_the_teacher_repeats_is_kept_out() -> None:
    """A step whose words repeat a line of the guide gives no sample, nor do the steps whose prompt shows that
    step.
    """
    line = "Choose the second filter, because the first one resets the list"
    answers = [
        answer(click(1)),
        answer(click(1), goal=f"I will: {line}."),
        answer(click(1)),
        answer(click(1)),
        answer(click(1)),
        answer(done()),
    ]
    result = flat(attempt(*answers, guide=f"- short\n{line}\n"))
    assert [sample.step for sample in result.samples] == [1, 5, 6]
    assert dict(result.dropped) == {"repeats_guide": 3}
    assert line not in dumps(result.samples)


def test_an_extraction_gives_one_more_sample(tmp_path: Path) -> None:
    """An extraction gives one more sample: page text and query -> answer; a page text that was changed is
    refused.
    """
    run = attempt(answer(click(1)), answer(LOOK), answer(done()), root=tmp_path)
    samples = [sample for sample in flat(run, root=tmp_path).samples if sample.kind == "extraction"]
    assert len(samples) == 1
    assert (samples[0].target_text, samples[0].action_span, samples[0].prompt_indices) == ("42", None, ())
    assert PAGE_TEXT in render_text(samples[0].messages)
    assert "the number" in render_text(samples[0].messages)
    (tmp_path / "page.md").write_text("another text")
    with pytest.raises(RecordError, match="sha256"):
        flat(run, root=tmp_path)


def test_another_prompt_config_is_refused() -> None:
    """Samples are rendered as the run was; another config is an error."""
    with pytest.raises(RecordError, match="prompt config"):
        flat(attempt(*GOOD), replace(CONFIG, history_steps=3))


# ------------------------------------------------------------------------------------------------------ yield

rows = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), unique_by=lambda row: row[:2]
)


@given(rows)
def test_solve_at_two_equals_the_naive_count(table: list[tuple[str, int, bool]]) -> None:
    """solve@2 is cumulative, in [0, 1], 0 at round 1, and equals the naive count."""
    attempts = [Attempt(task_id=task, round=number, success=success) for task, number, success in table]
    curve = solve_at(attempts, LoopConfig())
    tasks = {row[0] for row in table}
    if not tasks:
        assert curve == [None] * 5
        return
    for number, share in enumerate(curve, 1):
        solved = sum(sum(s for t, r, s in table if t == task and r <= number) >= 2 for task in tasks)
        assert share == solved / len(tasks)
    assert curve == sorted(curve)
    assert curve[0] == 0


def test_the_yield_curve_is_over_the_tasks_that_failed_round_1() -> None:
    """The curve of App. C is over the tasks that failed round 1; the counts are over all attempts."""
    table = [
        ("a", 1, True, None),
        ("a", 2, True, None),
        ("b", 1, False, "not_success"),
        ("b", 2, True, "too_short"),
        ("b", 3, True, None),
        ("c", 1, False, "not_success"),
    ]
    report = yield_report(
        [
            Attempt(task_id=task, round=number, success=success, steps=number + 3, reason=reason)
            for task, number, success, reason in table
        ],
        LoopConfig(),
    )
    assert (
        report["tasks"],
        report["attempts"],
        report["successes"],
        report["kept"],
        report["tasks_failed_round_1"],
    ) == (3, 6, 4, 3, 2)
    assert report["rejected"] == {"not_success": 2, "too_short": 1}
    assert report["mean_success_steps"] == (4 + 5 + 5 + 6) / 4
    assert report["solve@2_failed_round_1"] == [0, 0, 0.5, 0.5, 0.5]
    assert report["solve@2_all"] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 2 / 3])
    nothing = yield_report([], LoopConfig())
    assert nothing["mean_success_steps"] is None
    assert nothing["solve@2_all"] == [None] * 5
