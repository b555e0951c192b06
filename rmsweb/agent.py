"""The agent loop: observe, ask the policy, parse, act, until it is done.

Purpose: one episode of the browser agent (Sec. 3), the same for collection and evaluation, for an endpoint
and for a checkpoint: a policy is a callable. Nothing that goes wrong on a page or in an answer leaves the
loop as an exception; it is data of the next step. The guide rho of the reflection loop goes into the prompts
of its round and into no Step.

ours: a prompt is a function of the records alone (`step_prompt`), so flattening and mining render exactly
what the policy saw, less the guide. ours: each call draws from (seed of the episode, step), so a sampling
policy that comes back to an unchanged state may answer otherwise.
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
    approximate_tokens,
    build_prompt,
    extraction_messages,
    render_text,
)
from rmsweb.records import (
    Action,
    ActionResult,
    AgentOutput,
    Ended,
    Message,
    Observation,
    ParseFailure,
    Policy,
    Source,
    Step,
    Task,
    Trajectory,
    Usage,
    derive_seed,
)

GUIDE_TAG_TOKENS = 16  # the lines around the guide
CountTokens = Callable[[str], int]


class PromptOverflow(Exception):
    """A page made the uncuttable part of a prompt too long (a dialog of many pages, say)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """Limits of an episode."""

    max_steps: int = 50  # agent turns
    max_failures: int = 3  # unusable answers in a row
    stop_on_stall: bool = False  # collection stops at a stalled loop, evaluation goes on
    record_broken: bool = False  # a browser that is gone for good ends the episode instead of raising

    def __post_init__(self) -> None:
        if min(self.max_steps, self.max_failures) < 1:
            raise ValueError(
                f"--max-steps {self.max_steps} and the number of unusable answers must be at least 1"
            )


# ---------------------------------------------------------------------------------- what follows from records


def executed_actions(step: Step) -> tuple[Action, ...]:
    """The actions of a step that were really executed: those that have a result."""
    return step.output.actions[: len(step.results)] if step.output else ()


def read_state(history: Sequence[Step]) -> str:
    """What the last step's actions have for reading: extracted answers, files, options."""
    return "\n".join(result.content for result in history[-1].results if result.content) if history else ""


def file_list(history: Sequence[Step]) -> str:
    """Names of the files that the agent has written or downloaded so far, one a line."""
    names: dict[str, None] = {}
    for step in history:
        names |= dict.fromkeys(step.observation.downloads)
        for action, result in zip(executed_actions(step), step.results, strict=False):
            if action.name == "write_file" and not result.error:
                names[str(action.params.get("file_name"))] = None
    return "".join(f"{name}\n" for name in names)


def step_prompt(
    config: PromptConfig,
    *,
    task_text: str,
    history: Sequence[Step],
    observation: Observation,
    date: str | None = None,
    guide: str | None = None,
    count_tokens: CountTokens = approximate_tokens,
) -> Prompt:
    """The prompt of the step that follows `history`, from records alone; `guide` is rho, None in every
    training record.

    The guide comes on top of the budget, so the policy sees the very lines that the record without it holds.
    ValueError where the task, the schema and the image alone do not fit.
    """
    if guide:
        config = replace(config, prompt_budget=config.prompt_budget + count_tokens(guide) + GUIDE_TAG_TOKENS)
    return build_prompt(
        config,
        task_text=task_text,
        observation=observation,
        history=history,
        count_tokens=count_tokens,
        date=date,
        reflection=guide,
        read_state=read_state(history),
        files=file_list(history),
        step_info=f"Step {len(history) + 1}.",
    )


def extraction_request(
    config: PromptConfig, query: str, page_text: str, extract_links: bool, count_tokens: CountTokens
) -> tuple[Message, ...]:
    """The messages of an extraction, the page's text cut at its end so that they fit into the prompt budget."""
    budget = (
        config.prompt_budget
        - count_tokens(render_text(extraction_messages(query, "", extract_links=extract_links)))
        - 16
    )  # 16: chat template
    while page_text and (size := count_tokens(page_text)) > budget:
        page_text = page_text[: min(len(page_text) - 1, int(len(page_text) * max(budget, 0) / size))]
    return extraction_messages(query, page_text, extract_links=extract_links)


def _move(step: Step) -> tuple[str, ...]:
    """What makes two steps the same for the stall rule: the page, the answer's actions, and the state they
    were taken in.
    """
    actions = (
        [canonical_action(action) for action in step.output.actions] if step.output else [step.response_text]
    )
    return (step.observation.url, step.observation.fingerprint, *actions)


def is_stalled(steps: Sequence[Step]) -> bool:
    """Whether the last steps are a stalled loop: one move three times running, or a cycle of two repeated
    three times, in unchanged states.
    """
    moves = [_move(step) for step in steps[-6:]]
    if len(moves) >= 3 and moves[-1] == moves[-2] == moves[-3]:
        return True
    return len(moves) == 6 and moves[0] == moves[2] == moves[4] and moves[1] == moves[3] == moves[5]


def has_stalled(steps: Sequence[Step]) -> bool:
    """Whether a stalled loop stands anywhere in the steps."""
    return any(is_stalled(steps[:end]) for end in range(3, len(steps) + 1))


# ------------------------------------------------------------------------------------------------ the episode


@dataclass(kw_only=True)
class Episode:
    """One attempt at a task.

    `seed` and the step's number give the seed of each policy call; `guide` is rho; `date` (ISO) stands in the
    prompts and is recorded as task.environment["date"]; `extraction_policy` answers extractions (None: the
    policy itself, as in evaluation).
    """

    policy: Policy
    session: SessionLike
    task: Task
    trajectory_id: str
    source: Source
    seed: int
    config: PromptConfig
    options: AgentOptions
    extraction_policy: Policy | None = None
    guide: str | None = None
    date: str | None = None
    count_tokens: CountTokens = approximate_tokens
    on_step: Callable[[Step], None] = lambda step: None
    steps: list[Step] = field(default_factory=list, init=False)
    extra: Usage = field(
        default_factory=Usage, init=False
    )  # tokens of the extraction calls of the running step

    async def run(self, start_url: str | None) -> Trajectory:
        """Runs from `start_url`; always a Trajectory, whatever pages and answers do.

        Exceptions are those of a policy that cannot be reached and of a browser that is gone for good, and
        ValueError where the first prompt does not fit its budget.
        """
        ended, error = None, None
        try:
            if start_url:
                await self.session.goto(start_url)
            while ended is None:
                self.steps.append(await self._step())
                self.on_step(self.steps[-1])
                ended = self._ending()
        except (PromptOverflow, BrowserDied) as broken:
            if isinstance(broken, BrowserDied) and not self.options.record_broken:
                raise
            ended, error = "environment", str(broken)
        return self._trajectory(ended, error)

    async def extract(self, query: str, page_text: str, extract_links: bool) -> str:
        """Answers an extraction from the page's text; its tokens count as the step's."""
        messages = list(extraction_request(self.config, query, page_text, extract_links, self.count_tokens))
        reply = await (self.extraction_policy or self.policy)(
            messages, seed=self._call_seed(), purpose="extract", max_tokens=self.config.response_budget
        )
        tokens = (
            self.extra.prompt_tokens + reply.prompt_tokens,
            self.extra.completion_tokens + reply.completion_tokens,
        )
        self.extra = Usage(prompt_tokens=tokens[0], completion_tokens=tokens[1])
        return reply.text.strip()

    def _prompt(self, observation: Observation) -> Prompt:
        """The step's prompt.

        One that does not fit is the user's error at the first step and the page's at a later one.
        """
        try:
            return step_prompt(
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
        """One turn."""
        started, restarts, self.extra, seed = (
            time.monotonic(),
            self.session.restarts,
            Usage(),
            self._call_seed(),
        )
        observation = await self.session.observe()
        prompt = self._prompt(observation)
        reply = await self.policy(
            list(prompt.messages), seed=seed, purpose="act", max_tokens=self.config.response_budget
        )
        answer = parse_agent_output(reply.text)
        if isinstance(answer, ParseFailure) and not reply.text and reply.finish_reason.startswith("refused"):
            answer = ParseFailure(reason=reply.finish_reason[:300])
        results: tuple[ActionResult, ...] = ()
        if isinstance(answer, AgentOutput):
            results = await self.session.act(answer.actions, observation, self.extract)
        return Step(
            number=len(self.steps) + 1,
            observation=observation,
            response_text=reply.text,
            output=answer if isinstance(answer, AgentOutput) else None,
            parse_failure=answer if isinstance(answer, ParseFailure) else None,
            results=results,
            usage=Usage(
                seed=seed,
                prompt_tokens=reply.prompt_tokens + self.extra.prompt_tokens,
                completion_tokens=reply.completion_tokens + self.extra.completion_tokens,
                finish_reason=reply.finish_reason,
                model=reply.model,
            ),
            browser_restarts=self.session.restarts - restarts,
            duration_s=round(time.monotonic() - started, 3),
        )

    def _ending(self) -> Ended | None:
        """Why the episode is over after the steps so far, None where it goes on."""
        steps, options = self.steps, self.options
        if any(result.is_done for result in steps[-1].results):
            return "done"
        if len(steps) >= options.max_failures and all(
            step.parse_failure for step in steps[-options.max_failures :]
        ):
            return "parse_failures"
        if options.stop_on_stall and is_stalled(steps):
            return "stalled"
        return "max_steps" if len(steps) >= options.max_steps else None

    def _trajectory(self, ended: Ended, error: str | None) -> Trajectory:
        final_text, declared = _final(self.steps)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task=replace(self.task, environment={**self.task.environment, "date": self.date})
            if self.date
            else self.task,
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
                model=self.steps[-1].usage.model if self.steps else "",
            ),
            prompt_config=self.config.hash,
            error=error,
        )


def _final(steps: Sequence[Step]) -> tuple[str | None, bool | None]:
    """Answer text and success flag of an executed `done`; (None, None) where none was executed."""
    if steps:
        for action, result in zip(executed_actions(steps[-1]), steps[-1].results, strict=False):
            if result.is_done:
                return result.content or str(action.params.get("text", "")), bool(result.success)
    return None, None
