"""Alignment: how alike two states of two runs are, how different the next actions, and what their
surroundings show of a failure mode.

Purpose: the three scores of App. K, each in [0, 1], over a pair of runs of one task. Elements are compared
across branches by (tag, text), never by index.

ours: every weight below is a named constant; the paper gives the ingredients of the three scores and no
numbers for them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from rmsweb.browser.actions import ACTIONS
from rmsweb.jsonl import dumps
from rmsweb.mining.taxonomy import Features, Move, closing, features, moves_of, violations
from rmsweb.records import Step, Trajectory, sha256_text
from rmsweb.similarity import compare_urls, host_of, jaccard, text_similarity, texts_similar

RADIUS = 2  # App. K: steps on each side of a candidate that are searched for evidence

# S_state, ours. The weight of the memories falls away where an agent writes none.
W_URL, W_DOM, W_MEMORY, W_PROGRESS = 0.35, 0.35, 0.15, 0.15
SAME_PATH, SAME_HOST = (
    0.8,
    0.3,
)  # URL scores where only the query differs, and where only the host is the same
# S_action, ours.
W_CONTRAST, W_CHANGE, LOW_INFORMATION = 0.6, 0.4, 0.3
OTHER_TYPE, OTHER_PARAMETERS = 1.0, 0.7
# S_category, ours: the prior alone stays below MIN_CATEGORY, so local evidence is necessary.
W_CLOSING, W_VIOLATION, W_PRIOR, W_SHARED = 0.40, 0.30, 0.30, 0.40


@dataclass(frozen=True)
class Run:
    """One trajectory of the pool.

    `success` is None where no judge could tell; `folder` is where its pictures lie.
    """

    trajectory: Trajectory
    success: bool | None
    folder: Path = Path()
    work_checked: bool = False  # a check saw the work done, not only its outcome

    @cached_property
    def key(self) -> tuple[str, str]:
        """Sort key that does not depend on the order of the pool."""
        return self.trajectory.trajectory_id, sha256_text(dumps(self.trajectory))

    @cached_property
    def steps(self) -> tuple["Aligned", ...]:
        """The steps as the alignment sees them."""
        last = max(1, len(self.trajectory.steps) - 1)
        return tuple(Aligned(step, number / last) for number, step in enumerate(self.trajectory.steps))


@dataclass(frozen=True)
class Aligned:
    """A step and how far into its run it stands (0 first, 1 last)."""

    step: Step
    progress: float

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Executed moves, failed ones too: they are what the branch chose."""
        return moves_of(self.step, failed=True)

    @cached_property
    def visible(self) -> Counter[tuple[str, str]]:
        """Visible (tag, text) pairs."""
        return Counter((node.tag, node.text) for node in self.step.observation.nodes if node.in_viewport)

    @property
    def memory(self) -> str:
        """What the agent noted in its answer."""
        return self.step.output.memory if self.step.output else ""

    @property
    def is_done(self) -> bool:
        return any(move.verb == "done" for move in self.moves)

    @property
    def is_progress(self) -> bool:
        """A valid step with an action that changes the browser or reads from it, and none that failed or
        finished.
        """
        clean = not self.step.parse_failure and not any(result.error for result in self.step.results)
        return clean and not self.is_done and any(ACTIONS[move.verb].changes_state for move in self.moves)


@dataclass(frozen=True)
class Contrast:
    """A pair of runs of one task, as the failure judge sees it."""

    success: Run
    failure: Run
    kind: Literal["success-failure", "short-long"] = "success-failure"

    @cached_property
    def features(self) -> Features:
        """Rule features of the pair."""
        return features(self.success.trajectory.task.text, self.success.trajectory, self.failure.trajectory)


@dataclass(frozen=True, order=True)
class Candidate:
    """A step of each branch (positions from 0) with the scores that need no label."""

    success_step: int
    failure_step: int
    state: float
    action: float


# ----------------------------------------------------------------------------------------------------- scores


@lru_cache(maxsize=65_536)
def url_score(a: str, b: str) -> float:
    """Identity and path of two URLs, in [0, 1]."""
    match = compare_urls(a, b)
    if match == "same":
        return 1.0
    return SAME_PATH if match != "other" else SAME_HOST if host_of(a) and host_of(a) == host_of(b) else 0.0


def state_score(a: Aligned, b: Aligned) -> float:
    """S_state in [0, 1]: URL, overlap of the visible (tag, text) pairs, similarity of the memories, nearness
    of the progress.
    """
    x, y = a.step.observation, b.step.observation
    parts = [(W_URL, url_score(x.url, y.url)), (W_DOM, jaccard(a.visible.elements(), b.visible.elements()))]
    parts.append((W_PROGRESS, 1 - abs(a.progress - b.progress)))
    if a.memory and b.memory:
        parts.append((W_MEMORY, text_similarity(a.memory, b.memory)))
    return sum(weight * score for weight, score in parts) / sum(weight for weight, _ in parts)


def _differs(a: Move, b: Move) -> bool:
    """Whether two moves of the same verb differ materially: another element, or another value."""
    if (a.tag, a.label) != (b.tag, b.label):
        return True
    return (
        compare_urls(a.value, b.value) not in ("same", "query differs")
        if a.verb == "go_to_url"
        else not texts_similar(a.value, b.value)
    )


def action_score(a: Sequence[Move], b: Sequence[Move]) -> float | None:
    """S_action in [0, 1]; None where the two compositions are the same or the pair is trivial (only searches,
    or only wait, scroll and go_back).
    """
    verbs = {move.verb for move in (*a, *b)}
    if not a or not b or verbs == {"search_engine"} or all(ACTIONS[verb].passive for verb in verbs):
        return None
    other_type = [move.verb for move in a] != [move.verb for move in b]
    if not other_type and not any(_differs(x, y) for x, y in zip(a, b, strict=True)):
        return None
    difference = (Counter(a) - Counter(b)) + (Counter(b) - Counter(a))
    low = all(ACTIONS[move.verb].passive or move.verb == "search_engine" for move in difference)
    changes = any(ACTIONS[verb].changes_state for verb in verbs)
    score = (
        W_CONTRAST * (OTHER_TYPE if other_type else OTHER_PARAMETERS)
        + W_CHANGE * changes
        - LOW_INFORMATION * low
    )
    return min(1.0, max(0.0, score))


def _window(run: Run, position: int) -> list[Step]:
    return [aligned.step for aligned in run.steps[max(0, position - RADIUS) : position + RADIUS + 1]]


def category_score(pair: Contrast, candidate: Candidate, category: str, confidence: float) -> float:
    """S_category in [0, 1]: closing behaviour near the success, the violation near the failure, less what the
    failing branch shows too.
    """
    task = pair.success.trajectory.task.text
    won, lost = _window(pair.success, candidate.success_step), _window(pair.failure, candidate.failure_step)
    wanted, there = closing(category, won, task), closing(category, lost, task)
    has_end = candidate.failure_step + RADIUS >= len(pair.failure.steps) - 1
    violated = violations(category, lost, wanted, ended=pair.failure.trajectory.ended, has_end=has_end)
    shared = len(wanted & there) / len(wanted) if wanted else 0.0
    return min(
        1.0,
        max(
            0.0, W_CLOSING * bool(wanted) + W_VIOLATION * violated + W_PRIOR * confidence - W_SHARED * shared
        ),
    )
