"""The divergence search: the decisions of a success that the failing run never takes, and where the two part.

Purpose: Sec. 3 and App. K enumerate pairs of steps with comparable states and different actions, from late to
early. Most such pairs are no divergence: the failing run acts a step earlier or later, or in another order,
or the success took a detour that it left again. So both runs are first reduced to what they settled on
(`AlignedRun.settled`), and a step of the success is a candidate only if the failing run never settles on its
moves. Of the candidates, those that no success of the task does without come first, and of these the one
where the two runs part (`in_order`).

ours: all of this; the paper ranks by its score alone. Its scores and thresholds stay as gates.
"""

from collections.abc import Mapping

from rmsweb.mining.alignment import (
    AlignedRun,
    Candidate,
    Contrast,
    action_score,
    differs,
)

MIN_STATE = 0.60  # App. K
DIGITS = 9  # what is compared with a threshold of the paper is rounded to 1e-9 first
COMPARABLE = 0.5  # ours: S_state above which a move of the failing run is the success's move
NEAR_BEST = 0.05  # ours: scores within this of the best are equal; they differ by advertisements


def candidates(pair: Contrast, *, strict_non_terminal: bool = False) -> list[Candidate]:
    """Return comparable states with different actions, late to early.

    The success's side is a decision that the failing run never takes.
    """
    found = []
    for i in reversed(pair.success.settled):
        won = pair.success.steps[i]
        if not won.is_progress or takes(pair.failure, pair.success, i):
            continue
        for j, lost in reversed(list(enumerate(pair.failure.steps))):
            contrast = action_score(won.moves, lost.moves)
            if contrast is None or (strict_non_terminal and lost.is_done):
                continue
            likeness = pair.failure.likeness(j, won)
            if round(likeness, DIGITS) >= MIN_STATE:
                found.append(Candidate(i, j, likeness, contrast))
    return found


def takes(run: AlignedRun, other: AlignedRun, position: int) -> bool:
    """Return whether a run settles on what lasted of another run's step.

    Its moves count on comparable pages, sooner or later, in any order, in one step or in several.
    """
    step = other.steps[position]
    made = [
        move for at, moves in run.settled.items() if run.likeness(at, step) >= COMPARABLE for move in moves
    ]
    return all(any(not differs(move, another) for another in made) for move in other.settled[position])


def in_order(pair: Contrast, scores: Mapping[Candidate, float]) -> list[Candidate]:
    """Return the candidates, the most critical first.

    A decision that another success of the task does without is less critical. The runs part at the first
    decision that the failing run lacks behind the last state that both share. Where they meet again after all
    (an order is placed, with the wrong size), it is the last one that it lacks before, among those whose
    score is as good as the best.

    Args: scores: S_total, or the part of it that is known.
    """
    shared = pair.last_shared
    needed = {
        step: all(takes(run, pair.success, step) for run in pair.witnesses)
        for step in {item.success_step for item in scores}
    }
    best = max((scores[item] for item in scores if item.success_step < shared), default=0.0)

    def rank(item: Candidate) -> tuple[bool, bool, bool, int, float, Candidate]:
        behind = item.success_step >= shared
        good = behind or scores[item] >= best - NEAR_BEST
        place = -item.success_step if behind else item.success_step * good
        return needed[item.success_step], behind, good, place, scores[item], item

    return sorted(scores, key=rank, reverse=True)
