"""The agent loop: observe, ask the policy, parse, act, until it is done.

Purpose: one episode of the browser agent (Sec. 3), the same for collection and evaluation, for an endpoint
and for a checkpoint: a policy is a callable. Nothing that goes wrong on a page or in an answer leaves the
loop as an exception; it is data of the next step. The guide rho of the reflection loop goes into the prompts
of its round and into no Step.

ours: each call draws from (seed of the episode, step), so a sampling policy that comes back to an unchanged
state may answer otherwise.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rmsweb.browser.actions import canonical_action, parse_agent_output
from rmsweb.browser.chromium import BrowserDied
from rmsweb.browser.protocol import SessionLike
from rmsweb.prompt import (
    Prompt,
    PromptConfig,
    build_prompt,
    extraction_messages,
)
from rmsweb.records import (
    ActionResult,
    AgentOutput,
    Ended,
    Observation,
    ParseFailure,
    Policy,
    Reply,
    Source,
    Step,
    Task,
    Trajectory,
    Usage,
    derive_seed,
)
from rmsweb.tokens import CountTokens, approximate_tokens

MAX_FAILURES = 3  # unusable answers in a row that end an episode
MAX_REASON_CHARS = 300


class PromptOverflow(Exception):
    """A page made the uncuttable part of a prompt too long (a dialog of many pages, say)."""


# ------------------------------------------------------------------------------------------- stalled loops


def _move(step: Step) -> tuple[str, ...]:
    """Return what makes two steps one move: the page, its state, and the answer's actions."""
    actions = map(canonical_action, step.output.actions) if step.output else [step.response_text]
    return (step.observation.url, step.observation.fingerprint, *actions)


def is_stalled(steps: Sequence[Step]) -> bool:
    """Say whether the last steps repeat themselves in unchanged states.

    That is one move three times running, or a cycle of two moves three times.
    """
    moves = [_move(step) for step in steps[-6:]]
    return any(len(moves) >= 3 * period and moves[-3 * period :] == moves[-period:] * 3 for period in (1, 2))


def has_stalled(steps: Sequence[Step]) -> bool:
    """Say whether the steps hold a stalled loop anywhere."""
    return any(is_stalled(steps[:end]) for end in range(3, len(steps) + 1))


# ------------------------------------------------------------------------------------------------ the episode


@dataclass(kw_only=True)
class Episode:
    """One attempt at a task.

    `seed` and the step's number give the seed of each policy call; `guide` is rho; `date` (ISO) is shown in
    the prompts and recorded as task.environment["date"]; `extraction_policy` answers extractions (None: the
    policy itself, as in evaluation). `max_steps` counts agent turns. With `stop_on_stall` a stalled loop ends
    the episode; with `record_broken` a browser that is gone for good does, instead of raising.
    """

    policy: Policy
    session: SessionLike
    task: Task
    trajectory_id: str
    source: Source
    seed: int
    config: PromptConfig
    max_steps: int
    stop_on_stall: bool = False
    record_broken: bool = False
    extraction_policy: Policy | None = None
    guide: str | None = None
    date: str | None = None
    count_tokens: CountTokens = approximate_tokens
    on_step: Callable[[], None] = lambda: None
    steps: list[Step] = field(default_factory=list, init=False)
    extractions: list[Reply] = field(default_factory=list, init=False)  # of the running step

    async def run(self, start_url: str | None) -> Trajectory:
        """Run from `start_url`; always a Trajectory, whatever pages and answers do.

        Raises what a policy raises that cannot be reached, BrowserDied for a browser that is gone for good,
        and ValueError where the first prompt does not fit its budget.
        """
        ended, error = None, None
        try:
            if start_url:
                await self.session.goto(start_url)
            while ended is None:
                self.steps.append(await self._step())
                self.on_step()
                ended = self._ending()
        except (PromptOverflow, BrowserDied) as broken:
            if isinstance(broken, BrowserDied) and not self.record_broken:
                raise
            ended, error = "environment", str(broken)
        return self._trajectory(ended, error)

    async def extract(self, query: str, page_text: str, extract_links: bool) -> str:
        """Answer an extraction from the page's text; its tokens count as the step's."""
        reply = await (self.extraction_policy or self.policy)(
            extraction_messages(
                self.config, query, page_text, extract_links=extract_links, count_tokens=self.count_tokens
            ),
            seed=self._call_seed(),
            purpose="extract",
            max_tokens=self.config.response_budget,
        )
        self.extractions.append(reply)
        return reply.text.strip()

    def _prompt(self, observation: Observation) -> Prompt:
        """Return the step's prompt.

        One that does not fit is the user's error at the first step and the page's at a later one.
        """
        try:
            return build_prompt(
                self.config,
                task_text=self.task.text,
                history=self.steps,
                observation=observation,
                date=self.date,
                guide=self.guide,
                count_tokens=self.count_tokens,
            )
        except ValueError as error:
            if not self.steps:
                raise
            raise PromptOverflow(str(error)) from error

    def _call_seed(self) -> int:
        return derive_seed(self.seed, len(self.steps) + 1)

    async def _step(self) -> Step:
        """Take one turn."""
        started, restarts, seed = time.monotonic(), self.session.restarts, self._call_seed()
        self.extractions.clear()
        observation = await self.session.observe()
        reply = await self.policy(
            self._prompt(observation).messages,
            seed=seed,
            purpose="act",
            max_tokens=self.config.response_budget,
        )
        answer = parse_agent_output(reply.text)
        results: tuple[ActionResult, ...] = ()
        if isinstance(answer, AgentOutput):
            results = await self.session.act(answer.actions, observation, self.extract)
        elif not reply.text and reply.finish_reason.startswith("refused"):
            answer = ParseFailure(reason=reply.finish_reason[:MAX_REASON_CHARS])
        return Step(
            number=len(self.steps) + 1,
            observation=observation,
            response_text=reply.text,
            output=answer if isinstance(answer, AgentOutput) else None,
            parse_failure=answer if isinstance(answer, ParseFailure) else None,
            results=results,
            usage=Usage.of(reply, *self.extractions, seed=seed),
            browser_restarts=self.session.restarts - restarts,
            duration_s=round(time.monotonic() - started, 3),
        )

    def _ending(self) -> Ended | None:
        """Return why the episode is over after the steps so far, None where it goes on."""
        steps = self.steps
        if any(result.is_done for result in steps[-1].results):
            return "done"
        if len(steps) >= MAX_FAILURES and all(step.parse_failure for step in steps[-MAX_FAILURES:]):
            return "parse_failures"
        if self.stop_on_stall and is_stalled(steps):
            return "stalled"
        return "max_steps" if len(steps) >= self.max_steps else None

    def _trajectory(self, ended: Ended, error: str | None) -> Trajectory:
        task = self.task
        if self.date:
            task = replace(task, environment=task.environment | {"date": self.date})
        final_text, declared = None, None
        for action, result in self.steps[-1].executed if self.steps else ():
            if result.is_done:
                final_text = result.content or str(action.params.get("text", ""))
                declared = bool(result.success)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task=task,
            source=self.source,
            steps=tuple(self.steps),
            final_text=final_text,
            declared_success=declared,
            ended=ended,
            guide_in=self.guide,
            usage=Usage(
                seed=self.seed,
                prompt_tokens=sum(step.usage.prompt_tokens for step in self.steps),
                completion_tokens=sum(step.usage.completion_tokens for step in self.steps),
                usage_unknown=sum(step.usage.usage_unknown for step in self.steps),
                model=self.steps[-1].usage.model if self.steps else "",
            ),
            prompt_config=self.config.hash,
            error=error,
        )
