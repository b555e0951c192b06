"""Alignment: how alike two states of two runs are, and how different the actions chosen in them.

Purpose: the three scores of App. K, each in [0, 1], over a pair of runs of one task. Elements are compared
across branches by (tag, text), never by index.

ours: every weight below is a named constant; the paper gives the ingredients of the three scores and no
numbers for them. ours: what the fields hold is part of a state's likeness, because an empty form and a filled
one are two states. ours: another parameter of the same action is as great a contrast as another action,
because the wrong row, option or value is the plainest critical step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from rmsweb.browser.actions import ACTIONS
from rmsweb.mining.taxonomy import (
    BROKEN_ENDS,
    BY_NAME,
    CLICK,
    EXTRACTION,
    SEARCH,
    VALUES,
    Label,
    Move,
    moves_of,
    name_of,
    page_text,
    words_of,
)
from rmsweb.records import Step, Trajectory
from rmsweb.similarity import compare_urls, host_of, jaccard, text_similarity, texts_similar

RADIUS = 2  # App. K: steps on each side of a candidate that are searched for evidence

# S_state, ours. What neither branch has, filled fields or a memory, weighs nothing. Progress weighs little:
# counted in steps it punishes detours.
W_URL, W_DOM, W_VALUES, W_MEMORY, W_PROGRESS = 0.30, 0.30, 0.25, 0.10, 0.05
SAME_PATH, SAME_HOST = 0.8, 0.3  # URL scores if only the query differs, and if only the host is the same
SAME_PAGE = 0.7  # ours: overlap of two visits of one page, whose advertisements and counters differ
# S_action, ours.
W_CONTRAST, W_CHANGE, LOW_INFORMATION = 0.6, 0.4, 0.3
# S_category, ours: the prior alone stays below MIN_CATEGORY, so local evidence is necessary.
W_CLOSING, W_VIOLATION, W_PRIOR, W_SHARED = 0.40, 0.30, 0.30, 0.40


@dataclass(frozen=True, eq=False)  # equal only to itself, so that it can be a key
class AlignedStep:
    """A step as the alignment sees it; `progress` is its place in the run, from 0 (first) to 1 (last)."""

    step: Step
    progress: float

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Executed moves, failed ones too: they are what the branch chose."""
        return moves_of(self.step, failed=True)

    @cached_property
    def visible(self) -> Counter[tuple[str, str]]:
        """(tag, text) of every line that the viewport shows."""
        return Counter((node.tag, node.text) for node in self.step.observation.nodes if node.in_viewport)

    @cached_property
    def values(self) -> frozenset[tuple[str, str, str]]:
        """(tag, name, value) of every field that is filled in or switched on."""
        nodes = self.step.observation.nodes
        filled = ((node, node.value or node.attributes.get("checked", "")) for node in nodes)
        return frozenset((node.tag, name_of(node), value) for node, value in filled if value)

    @cached_property
    def words(self) -> frozenset[str]:
        """Words of the page."""
        return words_of(page_text(self.step))

    @property
    def memory(self) -> str:
        """What the agent noted in its answer."""
        return self.step.output.memory if self.step.output else ""

    @property
    def is_done(self) -> bool:
        """Whether the step finishes the run."""
        return any(move.verb == "done" for move in self.moves)

    @property
    def is_progress(self) -> bool:
        """Whether an action changes the browser or reads from it, and none failed or finished the run."""
        clean = not self.step.parse_failure and not any(result.error for result in self.step.results)
        return clean and not self.is_done and any(ACTIONS[move.verb].changes_state for move in self.moves)


@dataclass(frozen=True)
class AlignedRun:
    """One trajectory of the pool; `success` is None if no judge could tell."""

    trajectory: Trajectory
    success: bool | None
    work_checked: bool = False  # a check saw the work done, not only its outcome
    _likeness: dict[tuple[int, "AlignedStep"], float] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Sort key that does not depend on the order of the pool: the id, then what was seen and answered."""
        found = self.trajectory
        did = (text for step in found.steps for text in (step.observation.fingerprint, step.response_text))
        return found.trajectory_id, found.source.policy, str(found.source.seed), *did

    @cached_property
    def steps(self) -> tuple[AlignedStep, ...]:
        """The steps as the alignment sees them."""
        last = max(1, len(self.trajectory.steps) - 1)
        return tuple(AlignedStep(step, number / last) for number, step in enumerate(self.trajectory.steps))

    @cached_property
    def path(self) -> tuple[int, ...]:
        """Positions of the steps that lie on no detour.

        A detour leaves a page and comes back to it, and nothing of it stays: nothing was entered or pressed,
        the page does not name what was chosen on the way, and the answer does not say what was read there.
        """
        found, position = [], 0
        while position < len(self.steps):
            returns = [
                later for later in range(position + 2, len(self.steps)) if self._is_detour(position, later)
            ]
            if not returns:
                found.append(position)
            position = max(returns, default=position + 1)
        return tuple(found)

    def _is_detour(self, start: int, end: int) -> bool:
        here, back, away = self.steps[start], self.steps[end], self.steps[start + 1 : end]
        if not same_state(here, back) or all(same_state(here, step) for step in away):
            return False
        moves = [move for step in self.steps[start:end] for move in step.moves]
        chosen = frozenset().union(*(words_of(move.label) for move in moves))
        told = frozenset().union(*(step.words for step in away)) & self.answer_words
        return not (any(map(stays, moves)) or chosen & (back.words - here.words) or told - here.words)

    @cached_property
    def answer_words(self) -> frozenset[str]:
        """Words of the final answer that the task does not give."""
        return words_of(self.trajectory.final_text or "") - words_of(self.trajectory.task.text)

    @cached_property
    def settled(self) -> dict[int, tuple[Move, ...]]:
        """What lasted of the steps on the path, by position.

        A move does not last that is repeated or overwritten later on the same page, or that returns to a page
        by a link which that page shows as well.
        """
        lasting = {position: self._lasting(position) for position in self.path}
        return {position: moves for position, moves in lasting.items() if moves}

    def _lasting(self, position: int) -> tuple[Move, ...]:
        if self._returns(position):
            return ()
        step, repeated = self.steps[position], set[object]()
        for later in self.steps[position + 1 :]:
            if later.moves and same_page(step, later):
                repeated |= set(map(_purpose, later.moves))
        purposes = {_purpose(move): move for move in step.moves}  # within a step too the last one counts
        return tuple(move for purpose, move in purposes.items() if purpose not in repeated)

    def _returns(self, position: int) -> bool:
        """Return whether a step follows a link of the navigation to a page that the run has seen before."""
        step, following = self.steps[position], self.steps[position + 1 : position + 2]
        shown = {(node.tag, name_of(node)) for after in following for node in after.step.observation.nodes}
        follows = any(move.tag == "a" and (move.tag, move.label) in shown for move in step.moves)
        return follows and any(same_page(following[0], self.steps[k]) for k in range(position))

    def likeness(self, position: int, other: AlignedStep) -> float:
        """Return S_state of a step of this run and one of another run; it is computed once."""
        key = position, other
        if key not in self._likeness:
            self._likeness[key] = state_score(self.steps[position], other)
        return self._likeness[key]

    @cached_property
    def is_broken(self) -> bool:
        """Whether the run crashed, or some answer or action of it failed."""
        steps = self.trajectory.steps
        failed = any(step.parse_failure or any(result.error for result in step.results) for step in steps)
        return self.trajectory.ended in BROKEN_ENDS or failed

    def around(self, position: int) -> tuple[Step, ...]:
        """Return the steps that are searched for evidence near a position (from 0)."""
        return self.trajectory.steps[max(0, position - RADIUS) : position + RADIUS + 1]


@dataclass(frozen=True)
class Contrast:
    """A pair of runs of one task."""

    success: AlignedRun
    failure: AlignedRun
    kind: Literal["success-failure", "short-long"] = "success-failure"
    witnesses: tuple[AlignedRun, ...] = ()  # other successes of the task

    @cached_property
    def last_shared(self) -> int:
        """Last position of the success at which the failing run was in the same state; 0 without one."""
        lost = [self.failure.steps[position] for position in self.failure.path]
        shared = (
            position
            for position in self.success.path
            if any(same_state(self.success.steps[position], other) for other in lost)
        )
        return max(shared, default=0)


@dataclass(frozen=True, order=True)
class Candidate:
    """A step of each branch (positions from 0) with the scores that need no label."""

    success_step: int
    failure_step: int
    state: float
    action: float


# ----------------------------------------------------------------------------------------------------- scores


def _in_unit(score: float) -> float:
    return min(1.0, max(0.0, score))


@lru_cache(maxsize=65_536)
def url_score(a: str, b: str) -> float:
    """Return how alike two URLs are in identity and path, in [0, 1]."""
    match = compare_urls(a, b)
    if match == "other":
        return SAME_HOST if host_of(a) and host_of(a) == host_of(b) else 0.0
    return 1.0 if match == "same" else SAME_PATH


memory_score = lru_cache(maxsize=65_536)(text_similarity)


def state_score(a: AlignedStep, b: AlignedStep) -> float:
    """Return S_state in [0, 1]: likeness of URL, visible (tag, text) pairs, values, progress, memories."""
    x, y = a.step.observation, b.step.observation
    parts = [
        (W_URL, url_score(x.url, y.url)),
        (W_DOM, jaccard(a.visible, b.visible)),
        (W_PROGRESS, 1 - abs(a.progress - b.progress)),
    ]
    if a.values or b.values:
        parts.append((W_VALUES, jaccard(a.values, b.values)))
    if a.memory and b.memory:
        parts.append((W_MEMORY, memory_score(a.memory, b.memory)))
    return sum(weight * score for weight, score in parts) / sum(weight for weight, _ in parts)


def stays(move: Move) -> bool:
    """Return whether a move may have an effect that leaving the page does not undo."""
    return move.verb in (*VALUES, "send_keys", EXTRACTION) or (move.verb == CLICK and move.tag != "a")


def _purpose(move: Move) -> object:
    """Return what a move is for: to fill a field, whatever with, or the move itself."""
    return (move.tag, move.label) if move.verb in VALUES else move


def same_page(a: AlignedStep, b: AlignedStep) -> bool:
    """Return whether two states show the same page, whatever its fields hold."""
    x, y = a.step.observation, b.step.observation
    return url_score(x.url, y.url) == 1 and jaccard(a.visible, b.visible) >= SAME_PAGE


def same_state(a: AlignedStep, b: AlignedStep) -> bool:
    """Return whether two states show the same page with the same values in its fields."""
    return a.values == b.values and same_page(a, b)


def differs(a: Move, b: Move) -> bool:
    """Return whether two moves differ materially: another verb, element or value."""
    if (a.verb, a.tag, a.label) != (b.verb, b.tag, b.label):
        return True
    if a.verb == "go_to_url":
        return compare_urls(a.value, b.value) != "same"
    return not texts_similar(a.value, b.value)


def action_score(a: Sequence[Move], b: Sequence[Move]) -> float | None:
    """Return S_action in [0, 1].

    None if both compositions are the same, or trivial: only searches, or only wait, scroll and go_back.
    """
    verbs = {move.verb for move in (*a, *b)}
    if not a or not b or verbs == {SEARCH} or all(ACTIONS[verb].passive for verb in verbs):
        return None
    if len(a) == len(b) and not any(differs(x, y) for x, y in zip(a, b, strict=True)):
        return None
    difference = (Counter(a) - Counter(b)) + (Counter(b) - Counter(a))
    low = all(ACTIONS[move.verb].passive or move.verb == SEARCH for move in difference)
    changes = any(ACTIONS[verb].changes_state for verb in verbs)
    return _in_unit(W_CONTRAST + W_CHANGE * changes - LOW_INFORMATION * low)


def category_score(pair: Contrast, candidate: Candidate, label: Label) -> float:
    """Return S_category in [0, 1].

    Closing behaviour near the success and the violation near the failure count for the label, and closing
    behaviour that the failing branch shows too counts against it.
    """
    mode, task = BY_NAME[label.category], pair.success.trajectory.task.text
    lost = pair.failure.around(candidate.failure_step)
    wanted = mode.closing(pair.success.around(candidate.success_step), task)
    has_end = candidate.failure_step + RADIUS >= len(pair.failure.steps) - 1
    violated = mode.violated(lost, wanted, pair.failure.trajectory.ended if has_end else "")
    shared = len(wanted & mode.closing(lost, task)) / max(1, len(wanted))
    return _in_unit(
        W_CLOSING * bool(wanted) + W_VIOLATION * violated + W_PRIOR * label.confidence - W_SHARED * shared
    )
