"""Mining: from runs of the same task to the decisions where a success and a failure part.

Purpose: Sec. 3 and App. K. Pairs of runs are aligned; the last failure-critical divergence is kept as an RL
prompt with its verified action. Order: pool -> pairs -> divergence search, late to early -> label of the pair
-> scores and thresholds -> gates -> caps. Only the success side's state and action leave this module as a
MinedState; the other branch stands in the AuditRow alone.

    S_total = 0.50 S_state + 0.25 S_action + 0.25 S_category

ours: the failing side of a candidate may be its `done` (a premature end is the plainest critical decision),
the success side may not.
ours: caps are shares of the final corpus; one that would leave less than half of it is reported as not
binding. ours: a cap drops from the largest category first, lowest score first: that is our category-aware
sampling. ours: the same state and answer found through several pairs is one state.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rmsweb.jsonl import dumps
from rmsweb.mining.alignment import Candidate, Contrast, Run, action_score, category_score, state_score
from rmsweb.mining.taxonomy import Move, rule_label
from rmsweb.records import AuditRow, MinedState, Scores, StepSample, sha256_text

W_STATE, W_ACTION, W_CATEGORY = 0.50, 0.25, 0.25  # App. K
MIN_STATE, MIN_TOTAL, MIN_CATEGORY = 0.60, 0.62, 0.45  # App. K
REVIEW_BELOW = 0.70  # App. K: a second pass
RULE_BELOW = 0.35  # ours: "very low"
DOMAIN_CAP, OBSTRUCTION_CAP = 0.30, 0.10  # App. K
MIN_KEPT = 0.5  # ours: a cap that would leave a smaller share of the corpus is not binding
RUNTIME_CONFIDENCE = 0.80  # ours: the stricter confidence gate of runtime failures
SUMMARY_STEPS = 5  # last steps that the judge sees of each run

Label = tuple[str, float, Literal["judge", "review", "rule"]]  # category, confidence, where it comes from
Judge = Callable[[Contrast, "tuple[str, float] | None"], Awaitable["tuple[str, float] | None"]]
Render = Callable[[Run, int], StepSample | None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may be chosen; defaults are the paper's."""

    secondary: bool = True  # pairs of the shortest success with longer ones
    strict_non_terminal: bool = False  # the failing side of a candidate may not be its `done` either
    per_pair: bool = False  # one state a pair instead of one a task


@dataclass(frozen=True)
class Found:
    """A mined state and where it came from."""

    state: MinedState
    audit: AuditRow
    success: Run
    failure: Run


@dataclass
class Mined:
    """The result: states in the order of their ids, and the counts of the report."""

    found: list[Found] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    caps: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- pairs and search


def pairs(runs: Iterable[Run], *, secondary: bool = True) -> Iterator[Contrast]:
    """The pairs of the runs of one task: every success with every failure, then the shortest checked success
    with the longer ones.

    ours: a success that only its outcome vouches for makes no secondary pair, because a lucky shortcut is
    shorter too.
    """
    ordered = sorted(runs, key=lambda run: run.key)
    wins = [run for run in ordered if run.success]
    for success in wins:
        yield from (Contrast(success, run) for run in ordered if run.success is False)
    checked = [run for run in wins if run.work_checked]
    if secondary and checked:
        short = min(checked, key=lambda run: (len(run.steps), run.key))
        yield from (Contrast(short, run, "short-long") for run in wins if len(run.steps) > len(short.steps))


def candidates(pair: Contrast, *, strict_non_terminal: bool = False) -> list[Candidate]:
    """Comparable states with different actions, late to early."""
    found = []
    for i in reversed(range(len(pair.success.steps))):
        a = pair.success.steps[i]
        if not a.is_progress:
            continue
        for j in reversed(range(len(pair.failure.steps))):
            b = pair.failure.steps[j]
            if strict_non_terminal and b.is_done:
                continue
            contrast = action_score(a.moves, b.moves)
            if contrast is not None and (state := state_score(a, b)) >= MIN_STATE:
                found.append(Candidate(i, j, state, contrast))
    return found


async def label_pair(pair: Contrast, judge: Judge | None) -> Label:
    """Category and confidence: the judge's, after a review below 0.70; the rules' where the reviewed
    confidence is below 0.35 or there is no judge.
    """
    category, prior = rule_label(pair.features)
    if judge is None:
        return category, prior, "rule"
    first = await judge(pair, None)
    if first is not None and first[1] >= REVIEW_BELOW:
        return *first, "judge"
    second = await judge(pair, first) or first
    return (
        (*second, "review") if second is not None and second[1] >= RULE_BELOW else (category, prior, "rule")
    )


def _has_picture(pair: Contrast, candidate: Candidate) -> bool:
    sides = (pair.success.steps[candidate.success_step], pair.failure.steps[candidate.failure_step])
    return any(side.step.observation.screenshot is not None for side in sides)


def best_candidate(pair: Contrast, found: Sequence[Candidate], label: Label, render: Render) -> Found | str:
    """The highest-scoring candidate that passes all gates (the later step wins a tie), or why the
    highest-scoring one did not.
    """
    category, confidence, _ = label
    if category == "runtime":
        signal = pair.features.errors > 0 or pair.failure.trajectory.ended in (
            "environment",
            "parse_failures",
        )
        if confidence < RUNTIME_CONFIDENCE or not signal:
            return "runtime_gate"
    scored = []
    for item in found:
        evidence = category_score(pair, item, category, confidence)
        total = W_STATE * item.state + W_ACTION * item.action + W_CATEGORY * evidence
        scores = Scores(
            **{
                name: round(value, 6)
                for name, value in zip(_SCORES, (item.state, item.action, evidence, total), strict=True)
            }
        )
        scored.append((scores.total, item, scores))
    reason = ""
    for _, item, scores in sorted(scored, key=lambda entry: entry[:2], reverse=True):
        sample: StepSample | None = None
        if scores.category < MIN_CATEGORY:
            problem = "low_category"
        elif scores.total < MIN_TOTAL:
            problem = "low_total"
        elif not _has_picture(pair, item):
            problem = "no_picture"
        elif (sample := render(pair.success, item.success_step)) is None:
            problem = "no_sample"
        else:
            return _found(pair, item, label, scores, sample)
        reason = reason or problem
    return reason


_SCORES = [item.name for item in fields(Scores)]


def _found(pair: Contrast, item: Candidate, label: Label, scores: Scores, sample: StepSample) -> Found:
    category, confidence, source = label
    won, lost = pair.success.steps[item.success_step].step, pair.failure.steps[item.failure_step].step
    values = {entry.name: getattr(sample, entry.name) for entry in fields(StepSample)}
    state_id = sha256_text(dumps(sample))[:16]
    state = MinedState(
        **values,
        state_id=state_id,
        category=category,
        confidence=confidence,
        label_source=source,
        scores=scores,
        pair_kind=pair.kind,
    )  # nothing of the other branch
    audit = AuditRow(
        state_id=state_id,
        task_id=sample.task_id,
        task_text=pair.success.trajectory.task.text,
        category=category,
        confidence=confidence,
        label_source=source,
        scores=scores,
        success_trajectory=pair.success.trajectory.trajectory_id,
        success_step=won.number,
        success_url=won.observation.url,
        success_actions=won.output.actions[: len(won.results)] if won.output else (),
        success_screenshot=won.observation.screenshot,
        failure_trajectory=pair.failure.trajectory.trajectory_id,
        failure_step=lost.number,
        failure_url=lost.observation.url,
        failure_actions=lost.output.actions[: len(lost.results)] if lost.output else (),
        failure_screenshot=lost.observation.screenshot,
        why=f"{_say(pair.success.steps[item.success_step].moves)} instead of {_say(pair.failure.steps[item.failure_step].moves)}",
    )
    return Found(state, audit, pair.success, pair.failure)


def _say(moves: Iterable[Move]) -> str:
    return ", then ".join(
        " ".join(filter(None, (move.verb, repr(move.label) if move.label else move.tag, move.value)))
        for move in moves
    )


def summary(run: Run) -> str:
    """What the failure judge sees of a run: its last steps (URL, goal, moves by element, errors), how it
    ended, its answer.
    """
    lines = []
    for aligned in run.steps[-SUMMARY_STEPS:]:
        step = aligned.step
        errors = [result.error for result in step.results if result.error] + (
            [step.parse_failure.reason] if step.parse_failure else []
        )
        lines += [
            f"Step {step.number}",
            f"url: {step.observation.url}",
            f"goal: {step.output.next_goal if step.output else ''}",
        ]
        lines += [
            f"actions: {_say(aligned.moves) or '(none)'}",
            *(f"error: {error[:200]}" for error in errors),
        ]
    end = run.trajectory
    return (
        "\n".join(
            [
                *lines,
                f"Ended: {end.ended}, declared success: {end.declared_success}",
                f"Final answer: {end.final_text or '(none)'}",
            ]
        )
        + "\n"
    )


# -------------------------------------------------------------------------------------------- caps and corpus


def _rank(item: Found) -> tuple[float, str]:
    return item.state.scores.total, item.state.state_id


def _over(items: Sequence[Found], group: Callable[[Found], str | None], cap: float) -> str | None:
    """The group with the largest share above the cap, None where all are within it."""
    sizes = Counter(name for item in items if (name := group(item)) is not None)
    name, size = max(sizes.items(), key=lambda entry: (entry[1], entry[0]), default=("", 0))
    return name if size > cap * len(items) + 1e-9 else None


def apply_cap(items: Sequence[Found], group: Callable[[Found], str | None], cap: float) -> list[Found] | None:
    """Drops states until no group has more than that share of what is left; None where less than half would
    be left.

    Of the group that is over, a state of its most frequent category goes first, the one with the lowest
    score.
    """
    kept = sorted(items, key=_rank)
    while (name := _over(kept, group, cap)) is not None:
        inside = [item for item in kept if group(item) == name]
        sizes = Counter(item.state.category for item in inside)
        most = max(sizes, key=lambda category: (sizes[category], category))
        kept.remove(next(item for item in inside if item.state.category == most))
        if len(kept) < MIN_KEPT * len(items):
            return None
    return kept


def _host(item: Found) -> str | None:
    return item.state.host


def _obstruction(item: Found) -> str | None:
    return "obstruction" if item.state.category == "obstruction" else None


def cap_corpus(result: Mined) -> None:
    """Both caps, in place, until both hold or are found not binding."""
    caps = {"domain": (_host, DOMAIN_CAP), "obstruction": (_obstruction, OBSTRUCTION_CAP)}
    before = -1
    while before != len(result.found):
        before = len(result.found)
        for name, (group, cap) in caps.items():
            if result.caps.get(name) == "not binding":
                continue
            kept = apply_cap(result.found, group, cap)
            result.caps[name] = "not binding" if kept is None else "holds"
            if kept is not None:
                result.rejected[f"{name}_cap"] += len(result.found) - len(kept)
                result.found = kept


def _unique(found: Iterable[Found], *, per_pair: bool) -> list[Found]:
    """The best state of each task (of each state and answer with `per_pair`), in the order of the ids."""
    best: dict[str, Found] = {}
    for item in found:
        key = item.state.state_id if per_pair else item.state.task_id
        if key not in best or (_rank(item), item.failure.key) > (_rank(best[key]), best[key].failure.key):
            best[key] = item
    return sorted(best.values(), key=lambda item: item.state.state_id)


async def mine(
    runs: Iterable[Run],
    *,
    render: Render,
    judge: Judge | None,
    settings: Settings | None = None,
    on_pair: Callable[[], object] = lambda: None,
) -> Mined:
    """A pool of runs -> the mined states with their audit rows and counts. The order of the pool does not
    matter.

    `render(run, position)` gives the success side's training sample, None where the prompt was cut below what
    the answer needs or the step is no sample; `judge(pair, first)` labels a pair (with `first`, the label to
    review), None where its words could not be read.
    """
    settings = settings or Settings()
    pool = {run.key: run for run in runs}  # a run that stands in two folders counts once
    tasks: dict[str, list[Run]] = {}
    for run in pool.values():
        tasks.setdefault(run.trajectory.task.task_id, []).append(run)
    contrasts = [
        pair for _, group in sorted(tasks.items()) for pair in pairs(group, secondary=settings.secondary)
    ]

    async def best(pair: Contrast) -> Found | str:
        found = candidates(pair, strict_non_terminal=settings.strict_non_terminal)
        outcome = (
            best_candidate(pair, found, await label_pair(pair, judge), render) if found else "no_divergence"
        )
        on_pair()
        return outcome

    outcomes = await asyncio.gather(*map(best, contrasts))
    chosen = [item for item in outcomes if isinstance(item, Found)]
    result = Mined(found=_unique(chosen, per_pair=settings.per_pair))
    result.rejected.update(item for item in outcomes if isinstance(item, str))
    result.rejected["another_pair_of_the_task"] += len(chosen) - len(result.found)
    verdicts = Counter(run.success for run in pool.values())
    result.counts = {
        "tasks": len(tasks),
        "runs": len(pool),
        "successes": verdicts[True],
        "failures": verdicts[False],
        "undecided": verdicts[None],
    }
    result.counts |= {
        "pairs": len(contrasts),
        "short_long_pairs": sum(pair.kind == "short-long" for pair in contrasts),
    }
    cap_corpus(result)
    result.found.sort(key=lambda item: item.state.state_id)
    return result


def report(result: Mined) -> dict[str, Any]:
    """Counts for report.json: pool, rejections, categories beside label sources, verbs, hosts, histograms of
    the scores (ten bins from 0 to 1).
    """
    states = [item.state for item in result.found]
    histograms = {name: [0] * 10 for name in _SCORES}
    for state in states:
        for name in _SCORES:
            histograms[name][min(9, int(10 * getattr(state.scores, name)))] += 1
    hosts = Counter(state.host for state in states)
    verbs = Counter(action.name for item in result.found for action in item.audit.success_actions)
    return {
        **result.counts,
        "states": len(states),
        "rejected": dict(sorted((+result.rejected).items())),
        "categories": dict(Counter(state.category for state in states).most_common()),
        "label_sources": dict(Counter(state.label_source for state in states).most_common()),
        "pair_kinds": dict(Counter(state.pair_kind for state in states).most_common()),
        "verbs": dict(verbs.most_common()),
        "host_shares": {host: round(count / len(states), 4) for host, count in hosts.most_common()},
        "caps": result.caps,
        "score_histograms": histograms,
    }
