"""Laws of the agent loop: what is recorded, how an episode ends, that failures are data and that the guide
stays in the prompts.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import CONFIG, PAGE_TEXT, TASK, CountingSession, ScriptedPolicy, answer, click, done
from hypothesis import given
from hypothesis import strategies as st

from rmsweb.agent import Episode, has_stalled, is_stalled
from rmsweb.browser.actions import parse_agent_output
from rmsweb.browser.chromium import BrowserDied
from rmsweb.jsonl import append_record, dumps, read_records
from rmsweb.prompt import build_prompt, extraction_messages, render_text
from rmsweb.records import ActionResult, AgentOutput, Observation, Source, Step, Text, Trajectory, derive_seed
from rmsweb.tokens import approximate_tokens


def episode(
    policy: Any,
    session: Any = None,
    config: Any = CONFIG,
    task: Any = TASK,
    guide: str | None = None,
    extraction: Any = None,
    **options: Any,
) -> Trajectory:
    """One attempt in the counting world."""
    return asyncio.run(
        Episode(
            policy=policy,
            session=session or CountingSession(),
            task=TASK,
            trajectory_id="x",
            source=Source(script="collect", policy="p"),
            seed=5,
            config=config,
            extraction_policy=extraction,
            guide=guide,
            date="2026-01-02",
            **({"max_steps": 8} | options),
        ).run(TASK.start_url)
    )


def test_a_successful_episode_records_what_was_seen_and_done() -> None:
    """Steps are numbered from 1, hold what was seen and done, tokens add up, and an executed `done` gives
    text and flag.
    """
    session, policy = (
        CountingSession(),
        ScriptedPolicy(answer(click(1)), answer(click(1), click(1)), answer(done())),
    )
    result = episode(policy, session)
    assert (result.ended, result.final_text, result.declared_success) == ("done", "three", True)
    assert [step.number for step in result.steps] == [1, 2, 3]
    assert [len(step.results) for step in result.steps] == [1, 2, 1]
    assert session.value == 3
    assert session.visited == [TASK.start_url]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (300, 30)
    assert policy.calls == [(derive_seed(5, number), "act", CONFIG.response_budget) for number in (1, 2, 3)]
    assert [step.usage.seed for step in result.steps] == [derive_seed(5, number) for number in (1, 2, 3)]
    assert result.task.environment["date"] == "2026-01-02"
    assert result.prompt_config == CONFIG.hash


@pytest.mark.parametrize(("flag", "declared"), [(True, True), (False, False), (None, False)])
def test_done_counts_as_declared_whatever_its_flag(flag: bool | None, declared: bool) -> None:
    """A `done` that was executed ends the episode; its flag is recorded beside it."""
    result = episode(ScriptedPolicy(answer(done(flag))))
    assert (result.ended, result.declared_success) == ("done", declared)


def test_done_that_was_not_executed_does_not_count() -> None:
    """A `done` behind other actions is not executed: the episode goes on."""
    result = episode(ScriptedPolicy(answer(click(1), done()), answer(done(False))))
    assert len(result.steps) == 2
    step = result.steps[0]
    assert step.executed == ((step.output.actions[0], step.results[0]),)


def test_limits_failures_and_stalls_end_an_episode() -> None:
    """The turn limit, unusable answers in a row and, where asked for, a stalled loop end an episode without a
    declaration.
    """
    wandering = ScriptedPolicy(*[answer(click(1 + i % 2), goal=str(i)) for i in range(8)])
    assert (episode(wandering).ended, len(episode(wandering).steps)) == ("max_steps", 8)
    lost = episode(ScriptedPolicy("no json"))
    assert (lost.ended, len(lost.steps), lost.declared_success, lost.final_text) == (
        "parse_failures",
        3,
        None,
        None,
    )
    assert all(step.parse_failure and step.output is None and step.results == () for step in lost.steps)
    assert len(episode(ScriptedPolicy(answer(click(2)))).steps) == 8
    assert len(episode(ScriptedPolicy(answer(click(2))), stop_on_stall=True).steps) == 3
    assert episode(ScriptedPolicy(answer(click(2))), stop_on_stall=True).ended == "stalled"


def test_failures_are_fed_back_as_data() -> None:
    """The reason of an unusable answer and an action's error stand in the next prompt, and a usable answer
    resets the count.
    """
    policy = ScriptedPolicy("rubbish", "rubbish", answer(click(3)), "rubbish", "rubbish", answer(done()))
    config = replace(CONFIG, history_fields=("next_goal", "result"))
    result = episode(policy, config=config)
    assert result.ended == "done"
    assert "was not usable" in policy.prompts[1]
    assert "this button is broken" in policy.prompts[3]


def test_extraction_is_answered_and_counted() -> None:
    """The extraction policy sees query and page text; its answer is read in the next prompt only, its tokens
    are the step's.
    """
    look = {"extract_structured_data": {"query": "the number", "extract_links": False}}
    policy, reader = ScriptedPolicy(answer(look), answer(click(1)), answer(done())), ScriptedPolicy(" 42 ")
    result = episode(policy, extraction=reader)
    assert PAGE_TEXT in reader.prompts[0]
    assert reader.calls[0][:2] == (derive_seed(5, 1), "extract")
    assert result.steps[0].results[0].content == "42"
    assert result.steps[0].usage.prompt_tokens == 200
    assert [("<read_state>\n42" in prompt) for prompt in policy.prompts] == [False, True, False]
    alone = ScriptedPolicy(answer(look), "self read", answer(done()))
    assert episode(alone).steps[0].results[0].content == "self read"
    assert [call[1] for call in alone.calls] == ["act", "extract", "act"]


def test_long_page_text_is_cut_to_the_budget() -> None:
    """An extraction's request fits the prompt budget whatever the page holds."""
    for size in (0, 10, 5_000):
        messages = extraction_messages(CONFIG, "what?", "é" * size)
        assert approximate_tokens(render_text(messages)) <= CONFIG.prompt_budget
        assert "what?" in render_text(messages)


@given(st.text(min_size=1, max_size=200).filter(str.strip))
def test_the_guide_is_in_the_prompts_and_in_no_step(guide: str) -> None:
    """rho is concatenated to every state of its round, whatever its text; no step changes by it, and what
    else is shown stays the same.
    """
    with_guide, without = (ScriptedPolicy(answer(click(1)), answer(done())) for _ in range(2))
    guided, plain = episode(with_guide, guide="GUIDE" + guide), episode(without)
    assert all("GUIDE" in prompt for prompt in with_guide.prompts)
    assert guided.guide_in == "GUIDE" + guide
    slow = {"duration_s": 0.0}
    assert [replace(step, **slow) for step in guided.steps] == [replace(step, **slow) for step in plain.steps]
    block = f"<guide>\n{('GUIDE' + guide).strip()}\n</guide>\n"
    assert [prompt.replace(block, "") for prompt in with_guide.prompts] == without.prompts


def test_a_prompt_follows_from_the_records() -> None:
    """Rendering the recorded steps again gives the very prompts that the policy saw."""
    policy = ScriptedPolicy(
        answer(click(1)),
        "rubbish",
        answer({"write_file": {"file_name": "a.md", "content": "x"}}),
        answer(done()),
    )
    config = replace(CONFIG, blocks=("title", "files", "step_info"))
    result = episode(policy, config=config)
    for number, step in enumerate(result.steps):
        prompt = build_prompt(
            config,
            task_text=TASK.text,
            history=result.steps[:number],
            observation=step.observation,
            date=result.task.environment["date"],
        )
        assert (
            "".join(p.text for m in prompt.messages for p in m.parts if isinstance(p, Text))
            == policy.prompts[number]
        )
    assert "a.md" in policy.prompts[3]


def test_a_first_prompt_that_cannot_fit_is_an_error_and_a_later_one_ends_the_episode() -> None:
    """Too small a budget is the user's error at the first step; a page that outgrows it later ends the
    episode as data.
    """
    with pytest.raises(ValueError, match="prompt budget"):
        episode(ScriptedPolicy(answer(done())), config=replace(CONFIG, prompt_budget=5))

    class Talkative(CountingSession):
        async def observe(self) -> Observation:
            return replace(await super().observe(), dialogs=("x" * 5_000,) if self.value else ())

    result = episode(ScriptedPolicy(answer(click(1)), answer(done())), Talkative())
    assert (result.ended, len(result.steps), result.declared_success) == ("environment", 1, None)
    assert "budget" in (result.error or "")


def moves(pattern: str) -> list[Step]:
    """One step a letter: capital letters are other states, letters other actions."""
    steps = []
    for number, letter in enumerate(pattern, 1):
        output = parse_agent_output(answer({"send_keys": {"keys": letter.lower()}}, goal=str(number)))
        assert isinstance(output, AgentOutput)
        seen = Observation(
            url="u",
            title="",
            tabs=(),
            active_tab="1",
            viewport=(1, 1),
            fingerprint="upper" if letter.isupper() else "lower",
        )
        steps.append(
            Step(number=number, observation=seen, response_text="", output=output, results=(ActionResult(),))
        )
    return steps


@pytest.mark.parametrize(
    ("pattern", "stalled"),
    [
        ("aaa", True),
        ("aa", False),
        ("aab", False),
        ("baaa", True),
        ("ababab", True),
        ("babab", False),
        ("aAa", False),
        ("aBaBaB", True),
        ("abcabcabc", False),
    ],
)
def test_one_move_three_times_or_a_cycle_of_two_is_a_stall(pattern: str, stalled: bool) -> None:
    """Stalled: one move three times running or a cycle of two three times, in unchanged states; other words
    around it do not matter.
    """
    assert is_stalled(moves(pattern)) is stalled


@given(st.text(alphabet="abAB", max_size=12))
def test_a_stall_anywhere_is_found(pattern: str) -> None:
    """`has_stalled` is true exactly where some prefix is stalled, and more steps never undo it."""
    naive = any(p * 3 in pattern for p in {*pattern} | {pattern[i : i + 2] for i in range(len(pattern))})
    assert has_stalled(moves(pattern)) is naive


def test_a_trajectory_is_a_record(tmp_path: Path) -> None:
    """What an episode returns survives its JSON form."""
    result = episode(ScriptedPolicy("rubbish", answer(done())))
    append_record(tmp_path / "t.jsonl", result)
    assert list(read_records(tmp_path / "t.jsonl", Trajectory)) == [result]
    assert "\n" not in dumps(result)


@pytest.mark.parametrize("last_try", [False, True])
def test_a_browser_that_is_gone_ends_the_episode_on_the_last_try_alone(last_try: bool) -> None:
    """It leaves the loop, so that the episode can be run again elsewhere; on the last try it ends the episode
    as data.
    """

    class Fragile(CountingSession):
        async def observe(self) -> Observation:
            if self.value:
                raise BrowserDied("crashed")
            return await super().observe()

    policy = ScriptedPolicy(answer(click(1)), answer(done()))
    if not last_try:
        with pytest.raises(BrowserDied):
            episode(policy, Fragile())
        return
    result = episode(policy, Fragile(), record_broken=True)
    assert (result.ended, result.error, len(result.steps), result.declared_success) == (
        "environment",
        "crashed",
        1,
        None,
    )
