"""Filters of collection: which trajectories are kept, and the samples that they give.

Purpose: Sec. 3 and App. C. A kept trajectory is a judged success of complete steps; its samples are its raw
(state, action) pairs. A guide is in no sample.

ours: a sample whose own words (or the history in its prompt) repeat a whole line of the guide is dropped, so
rho cannot come in through the teacher's mouth.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rmsweb.agent import has_stalled
from rmsweb.browser.actions import action_span, canonical_text
from rmsweb.config import Config, opt
from rmsweb.jsonl import RecordError, inside
from rmsweb.prompt import PromptConfig, build_prompt, extraction_messages
from rmsweb.records import Judgement, Message, Step, StepSample, Trajectory, is_success, sha256_text
from rmsweb.tokens import CountTokens

GUIDE_LINE_CHARS = 40  # an answer may hold a shorter line of a guide by chance

# ----------------------------------------------------------------------------------------- the quality filter


@dataclass(frozen=True, kw_only=True)
class FilterConfig(Config):
    """Quality filter."""

    min_effective_steps: int = opt(
        3, "shortest success that gives samples, in effective steps", paper=3, at_least=0
    )
    max_effective_steps: int = opt(
        30, "longest success that gives samples, in effective steps", paper=30, at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_effective_steps > self.max_effective_steps:
            raise ValueError(
                f"--min-effective-steps {self.min_effective_steps}: expected at most --max-effective-steps "
                f"({self.max_effective_steps})"
            )


FILTER = FilterConfig()  # of the paper


def effective_steps(steps: Iterable[Step]) -> int:
    """Count the steps with at least one action that was executed without error and is not a wait."""
    return sum(
        any(action.name != "wait" and not result.error for action, result in step.executed) for step in steps
    )


def quality_filter(
    trajectory: Trajectory, judgement: Judgement | None, config: FilterConfig = FILTER
) -> str | None:
    """Return why a trajectory gives no samples (Sec. 3), None where it does.

    One of unjudged, not_success, parse_failure, incomplete, stalled, too_short, too_long.
    """
    steps = trajectory.steps
    if judgement is None:
        return "unjudged"
    if not is_success(trajectory, judgement):
        return "not_success"
    if any(step.parse_failure for step in steps):
        return "parse_failure"
    complete = all(step.output and step.results and step.observation.url for step in steps)
    if not complete or [step.number for step in steps] != list(range(1, len(steps) + 1)):
        return "incomplete"
    if has_stalled(steps):
        return "stalled"
    count = effective_steps(steps)
    if count < config.min_effective_steps:
        return "too_short"
    return "too_long" if count > config.max_effective_steps else None


# ------------------------------------------------------------------------------------------------- flattening


def _repeats_guide(steps: Sequence[Step], guide: str | None) -> bool:
    """Say whether what the agent wrote in these steps repeats a whole line of the guide."""
    outputs = [step.output for step in steps if step.output]
    said = ((o.thinking or "", o.evaluation_previous_goal, o.memory, o.next_goal) for o in outputs)
    words = " ".join(" ".join(text for texts in said for text in texts).split())
    lines = (" ".join(line.split()) for line in (guide or "").splitlines())
    return any(len(line) >= GUIDE_LINE_CHARS and line in words for line in lines)


def _sample(
    trajectory: Trajectory,
    step: Step,
    kind: Literal["action", "extraction"],
    name: str,
    messages: tuple[Message, ...],
    target: str,
    indices: tuple[int, ...] = (),
) -> StepSample:
    return StepSample(
        sample_id=f"{trajectory.trajectory_id}.{name}",
        kind=kind,
        task_id=trajectory.task.task_id,
        trajectory_id=trajectory.trajectory_id,
        step=step.number,
        split=trajectory.task.split,
        host=urlsplit(step.observation.url).hostname or "",
        messages=messages,
        target_text=target,
        action_span=action_span(target) if kind == "action" else None,
        prompt_indices=indices,
        prompt_config=trajectory.prompt_config,
    )


def action_sample(
    trajectory: Trajectory, number: int, config: PromptConfig, count_tokens: CountTokens
) -> StepSample | str:
    """Return the sample of one step, or why there is none.

    What was cut off by a stop rule is not in the target.
    """
    step, history = trajectory.steps[number], trajectory.steps[:number]
    actions = tuple(action for action, _ in step.executed)
    if step.output is None or not actions:
        return "invalid_step"
    if any(result.error for result in step.results):
        return "action_error"
    if _repeats_guide(
        trajectory.steps[max(0, number - config.history_steps) : number + 1], trajectory.guide_in
    ):
        return "repeats_guide"
    prompt = build_prompt(
        config,
        task_text=trajectory.task.text,
        history=history,
        observation=step.observation,
        date=trajectory.task.environment.get("date"),
        count_tokens=count_tokens,
    )
    used = {action.params.get(name) for action in actions for name in ("index", "frame_element_index")}
    if not used - {None, 0} <= set(prompt.indices):
        return "index_cut"
    target = canonical_text(replace(step.output, actions=actions), thinking=config.thinking)
    return _sample(trajectory, step, "action", f"s{step.number}", prompt.messages, target, prompt.indices)


def _extraction_samples(
    trajectory: Trajectory, step: Step, config: PromptConfig, count_tokens: CountTokens, root: Path
) -> Iterator[StepSample]:
    """Yield a sample (page text and query -> answer) for each extraction of a step."""
    number = 0
    for action, result in step.executed:
        extraction = result.extraction
        if extraction is None or result.error or not extraction.answer:
            continue
        number += 1
        path = inside(root, extraction.page_text_path)
        text = path.read_bytes().decode()
        if sha256_text(text) != extraction.page_text_sha256:
            raise RecordError(
                f"{path}: not the text that {trajectory.trajectory_id} read (its sha256 differs)"
            )
        messages = extraction_messages(
            config,
            extraction.query,
            text,
            extract_links=bool(action.params.get("extract_links")),
            count_tokens=count_tokens,
        )
        yield _sample(
            trajectory, step, "extraction", f"s{step.number}.e{number}", messages, extraction.answer
        )


def flatten(
    trajectory: Trajectory, config: PromptConfig, count_tokens: CountTokens, root: Path
) -> Iterator[StepSample | str]:
    """Yield the samples of a kept trajectory: one a step and one an extraction.

    A step without a sample gives the reason instead: an action error, a target that names an index which was
    cut from the prompt, words that repeat the guide. Page texts are read relative to `root`, the run folder.
    Raises RecordError where the trajectory was made with another prompt config.
    """
    if trajectory.prompt_config != config.hash:
        raise RecordError(
            f"{trajectory.trajectory_id}: made with prompt config {trajectory.prompt_config}, "
            f"expected {config.hash}"
        )
    for number, step in enumerate(trajectory.steps):
        yield action_sample(trajectory, number, config, count_tokens)
        yield from _extraction_samples(trajectory, step, config, count_tokens, root)
