"""Mining: from runs of the same task to the decisions where a success and a failure part.

Purpose: Sec. 3 and App. K. Pairs of runs are aligned; the last failure-critical divergence is kept as an RL
prompt with its verified action. Order: pool -> pairs -> divergence search, late to early -> label of the pair
-> scores and thresholds -> gates -> caps. Only the success side's state and action leave this module as a
MinedState; the other branch is in the AuditRow alone.

    S_total = 0.50 S_state + 0.25 S_action + 0.25 S_category

ours: the failing side of a candidate may be its `done` (a premature end is the plainest critical decision),
the success side may not. ours: caps are shares of the final corpus; a cap that would discard more than half
is skipped and reported as not binding. ours: a cap drops from the largest category first, lowest score first:
that is our category-aware sampling. ours: the same state and answer found through several pairs is one state.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from rmsweb.config import Config, opt
from rmsweb.jsonl import dumps
from rmsweb.mining.alignment import (
    AlignedRun,
    AlignedStep,
    Candidate,
    Contrast,
    category_score,
)
from rmsweb.mining.divergence import candidates, in_order
from rmsweb.mining.taxonomy import (
    INDEX_PARAMS,
    Features,
    Label,
    features,
    name_of,
    rule_label,
    say,
)
from rmsweb.records import Action, AuditRow, Element, MinedState, Scores, Step, StepSample, sha256_text

W_STATE, W_ACTION, W_CATEGORY = 0.50, 0.25, 0.25  # App. K
MIN_TOTAL, MIN_CATEGORY = 0.62, 0.45  # App. K
REVIEW_BELOW = 0.70  # App. K: a second pass
RULE_BELOW = 0.35  # ours: "very low"
DOMAIN_CAP, OBSTRUCTION_CAP = 0.30, 0.10  # App. K
MIN_KEPT = 0.5  # ours: a cap that would leave a smaller share of the corpus is not binding
RUNTIME_CONFIDENCE = 0.80  # ours: the stricter confidence gate of runtime failures
SUMMARY_STEPS = 5  # last steps that the judge sees of each run
OTHERS = 3  # candidates of other steps that an audit row tells
MAX_ERROR_CHARS = 200  # of an error in that summary
SCORES = [score.name for score in fields(Scores)]

Judge = Callable[[Contrast, Features, Sequence[Label]], Awaitable[Label | None]]  # it reads earlier opinions
Render = Callable[[AlignedRun, int], StepSample | None]


@dataclass(frozen=True, kw_only=True)
class MinerConfig(Config):
    """The search for critical states."""

    secondary: bool = opt(
        True,
        "pair the shortest success with longer ones too, if the shorter one passed a check of the work "
        "itself (a judgement of kind 'work': the playground's, of tasks that leave an order or a form)",
        paper="yes",
    )
    strict_non_terminal: bool = opt(False, "the failing side's done is no candidate either")
    per_pair: bool = opt(False, "one state a pair instead of one a task", paper="one a task")


@dataclass(frozen=True)
class Found:
    """A mined state and where it came from."""

    state: MinedState
    audit: AuditRow
    success: AlignedRun
    failure: AlignedRun

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key: the best state is last."""
        return self.state.scores.total, self.state.state_id


@dataclass
class Mined:
    """The result: states in the order of their ids, and the counts of the report."""

    found: list[Found]
    rejected: Counter[str]  # pairs and states, by reason
    counts: dict[str, int]  # of the pool
    caps: dict[str, str]  # "holds" or "not binding"


# ------------------------------------------------------------------------------------------- pairs and search


def pairs(runs: Iterable[AlignedRun], *, secondary: bool = True) -> Iterator[Contrast]:
    """Yield the pairs of the runs of one task.

    Every success is paired with every failure, then the shortest checked success with the longer ones.

    ours: a success that only its outcome vouches for makes no secondary pair, because a lucky shortcut is
    shorter too.
    """
    ordered = sorted(runs, key=lambda run: run.key)
    wins = [run for run in ordered if run.success]
    for success in wins:
        others = tuple(run for run in wins if run is not success)
        yield from (Contrast(success, run, witnesses=others) for run in ordered if run.success is False)
    checked = [run for run in wins if run.work_checked]
    if secondary and checked:
        short = min(checked, key=lambda run: len(run.steps))
        yield from (Contrast(short, run, "short-long") for run in wins if len(run.steps) > len(short.steps))


def evidence_of(pair: Contrast, found: Iterable[Candidate] | None = None) -> Features:
    """Return the rule features of a pair, with the decision where its runs part.

    Args: found: its candidates, where they are known.
    """
    known = candidates(pair) if found is None else found
    order = in_order(pair, {item: W_STATE * item.state + W_ACTION * item.action for item in known})
    parting = (order[0].success_step, order[0].failure_step) if order else None
    won, lost = pair.success.trajectory, pair.failure.trajectory
    return features(won.task.text, won, lost, parting)


async def label_pair(pair: Contrast, seen: Features, judge: Judge | None) -> tuple[Label, ...]:
    """Return the opinions on a pair, the rules' first; the last one is its label.

    A second pass, which reads the opinions so far, reviews a label below 0.70, one that cannot be read, and
    (ours) one that the rules contradict. The rules decide if there is no judge, or if it is below 0.35.
    """
    rule = rule_label(seen)
    opinions: tuple[Label, ...] = (rule,)
    if judge is None:
        return opinions
    first = await judge(pair, seen, ())
    opinions += (first,) if first else ()
    if first is None or first.confidence < REVIEW_BELOW or first.category != rule.category:
        second = await judge(pair, seen, opinions)
        opinions += (replace(second, source="review"),) if second else ()
    return opinions if opinions[-1].confidence >= RULE_BELOW else (*opinions, rule)


def _scores(pair: Contrast, item: Candidate, label: Label) -> Scores:
    category = category_score(pair, item, label)
    total = W_STATE * item.state + W_ACTION * item.action + W_CATEGORY * category
    values = (item.state, item.action, category, total)
    return Scores(**{name: round(value, 6) for name, value in zip(SCORES, values, strict=True)})


def _closed_gate(pair: Contrast, item: Candidate, label: Label, scores: Scores) -> str | None:
    """Return the gate that stops a candidate."""
    sides = (pair.success.steps[item.success_step], pair.failure.steps[item.failure_step])
    gates = {
        "runtime_gate": label.category == "runtime"
        and not (pair.failure.is_broken and label.confidence >= RUNTIME_CONFIDENCE),
        "low_category": scores.category < MIN_CATEGORY,
        "low_total": scores.total < MIN_TOTAL,
        "no_picture": not any(side.step.observation.screenshot for side in sides),
    }
    return next((name for name, closed in gates.items() if closed), None)


def best_candidate(
    pair: Contrast, found: Iterable[Candidate], opinions: Sequence[Label], render: Render
) -> Found | str:
    """Return the first candidate in the order of `in_order` that passes all gates.

    Otherwise return why the first one does not pass. The last opinion is the label.
    """
    scored = {item: _scores(pair, item, opinions[-1]) for item in found}
    order = in_order(pair, {item: scores.total for item, scores in scored.items()})
    problems = []
    for item in order:
        gate = _closed_gate(pair, item, opinions[-1], scored[item])
        sample = None if gate else render(pair.success, item.success_step)
        if sample is not None:
            lost = {other.success_step: other for other in reversed(order)}
            lost.pop(item.success_step)
            others = [_say(pair, other, scored[other]) for other in list(lost.values())[::-1][:OTHERS]]
            return _found(pair, item, opinions, scored[item], sample, others)
        problems.append(gate or "no_sample")
    return problems[0]


def _say(pair: Contrast, item: Candidate, scores: Scores) -> str:
    """Return a candidate in words."""
    won, lost = pair.success.steps[item.success_step], pair.failure.steps[item.failure_step]
    place = f"step {won.step.number} against {lost.step.number}"
    return f"{place}: {say(won.moves)} instead of {say(lost.moves)} (S_total {scores.total:.2f})"


def _found(
    pair: Contrast,
    item: Candidate,
    opinions: Sequence[Label],
    scores: Scores,
    sample: StepSample,
    others: Sequence[str],
) -> Found:
    won, lost = pair.success.steps[item.success_step], pair.failure.steps[item.failure_step]
    label = opinions[-1]
    common: dict[str, Any] = {
        "state_id": sha256_text(dumps(sample))[:16],
        "task_id": sample.task_id,
        "category": label.category,
        "confidence": label.confidence,
        "label_source": label.source,
        "scores": scores,
    }
    values = {entry.name: getattr(sample, entry.name) for entry in fields(StepSample)}
    sides = _side("success", pair.success, won) | _side("failure", pair.failure, lost)
    return Found(
        state=MinedState(**(values | common), pair_kind=pair.kind),  # nothing of the other branch
        audit=AuditRow(
            **common,
            **sides,
            task_text=pair.success.trajectory.task.text,
            why=f"{say(won.moves)} instead of {say(lost.moves)}",
            opinions=tuple(map(str, opinions)),
            others=tuple(others),
            rejected=transplant(lost.step, won.step),
        ),
        success=pair.success,
        failure=pair.failure,
    )


def transplant(source: Step, target: Step) -> tuple[Action, ...]:
    """Return the executed actions of a step as they would be written on another step's page.

    Elements are found by (tag, name). Empty where the page has no such element, or two of them.
    """
    moved = []
    for action, _ in source.executed:
        params = dict(action.params)
        for name in INDEX_PARAMS:
            if params.get(name) is not None:
                wanted = [_named(node) for node in source.observation.nodes if node.index == params[name]]
                fits = [node.index for node in target.observation.nodes if _named(node) in wanted]
                if len(fits) != 1 or fits[0] is None:
                    return ()
                params[name] = fits[0]
        moved.append(Action(name=action.name, params=params))
    return tuple(moved)


def _named(node: Element) -> tuple[str, str] | None:
    return (node.tag, name_of(node)) if node.index is not None else None


def _side(name: str, run: AlignedRun, aligned: AlignedStep) -> dict[str, Any]:
    """Return the fields of an AuditRow that are about one branch."""
    step = aligned.step
    return {
        f"{name}_trajectory": run.trajectory.trajectory_id,
        f"{name}_step": step.number,
        f"{name}_url": step.observation.url,
        f"{name}_actions": step.output.actions[: len(step.results)] if step.output else (),
        f"{name}_screenshot": step.observation.screenshot,
    }


def run_summary(run: AlignedRun) -> str:
    """Return what the failure judge sees of a run.

    Its last steps (URL, goal, moves by element, errors), how it ended, and its answer.
    """
    lines = []
    for aligned in run.steps[-SUMMARY_STEPS:]:
        step = aligned.step
        errors = [result.error for result in step.results if result.error]
        errors += [step.parse_failure.reason] if step.parse_failure else []
        lines += [
            f"Step {step.number}",
            f"url: {step.observation.url}",
            f"goal: {step.output.next_goal if step.output else ''}",
            f"actions: {say(aligned.moves) or '(none)'}",
            *(f"error: {error[:MAX_ERROR_CHARS]}" for error in errors),
        ]
    end = run.trajectory
    lines += [
        f"Ended: {end.ended}, declared success: {end.declared_success}",
        f"Final answer: {end.final_text or '(none)'}",
    ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------- caps and corpus


def _most_frequent(names: Iterable[str]) -> str:
    """Return the name that comes most often, the last by alphabet among equals; empty without names."""
    sizes = Counter(names)
    return max(sizes, key=lambda name: (sizes[name], name), default="")


def apply_cap(
    items: Iterable[Found], group_of: Callable[[Found], str | None], cap: float
) -> list[Found] | None:
    """Drop states until no group has more than that share of what is left; None if that is less than half.

    Of the group that is over, a state of its most frequent category goes first, the one with the lowest
    score. A state whose group is None is in no group.
    """
    kept = sorted(items, key=attrgetter("rank"))
    enough = MIN_KEPT * len(kept)
    while len(kept) >= enough:
        group = _most_frequent(name for name in map(group_of, kept) if name is not None)
        inside = [item for item in kept if group_of(item) == group]
        if len(inside) <= cap * len(kept) + 1e-9:
            return kept
        category = _most_frequent(item.state.category for item in inside)
        kept.remove(next(item for item in inside if item.state.category == category))
    return None


def _host(item: Found) -> str | None:
    return item.state.host


def _obstruction(item: Found) -> str | None:
    return item.state.category if item.state.category == "obstruction" else None


def cap_corpus(result: Mined) -> None:
    """Apply both caps, in place, until both hold or are found not binding."""
    caps = {"domain": (_host, DOMAIN_CAP), "obstruction": (_obstruction, OBSTRUCTION_CAP)}
    before = -1
    while before != len(result.found):
        before = len(result.found)
        for name, (group_of, cap) in caps.items():
            binding = result.caps.get(name) != "not binding"
            kept = apply_cap(result.found, group_of, cap) if binding else None
            result.caps[name] = "not binding" if kept is None else "holds"
            if kept is not None:
                result.rejected[f"{name}_cap"] += len(result.found) - len(kept)
                result.found = kept


def _unique(found: Iterable[Found], *, per_pair: bool) -> list[Found]:
    """Return the best state of each task; of each state and answer with `per_pair`."""
    ranked = sorted(found, key=lambda item: (item.rank, item.failure.key))
    return list({item.state.state_id if per_pair else item.state.task_id: item for item in ranked}.values())


async def mine(
    runs: Iterable[AlignedRun],
    *,
    render: Render,
    judge: Judge | None,
    config: MinerConfig,
    on_pair: Callable[[], object] = lambda: None,
) -> Mined:
    """Return the mined states of a pool with their audit rows and counts, whatever the order of the pool.

    Args: render: returns the training sample of a run's step (from 0), None if the prompt was cut below what
    the answer needs or the step is no sample. judge: labels a pair, or reviews the opinions that it is given;
    None if its words could not be read. on_pair: called after each pair.
    """
    pool = {run.key: run for run in runs}  # a run that is in two folders counts once
    tasks: dict[str, list[AlignedRun]] = {}
    for run in pool.values():
        tasks.setdefault(run.trajectory.task.task_id, []).append(run)
    contrasts = [
        pair for _, group in sorted(tasks.items()) for pair in pairs(group, secondary=config.secondary)
    ]

    async def best(pair: Contrast) -> Found | str:
        found = candidates(pair, strict_non_terminal=config.strict_non_terminal)
        outcome: Found | str = "no_divergence"
        if found:
            opinions = await label_pair(pair, evidence_of(pair, found), judge)
            outcome = best_candidate(pair, found, opinions, render)
        on_pair()
        return outcome

    outcomes = await asyncio.gather(*map(best, contrasts))
    chosen = [item for item in outcomes if isinstance(item, Found)]
    verdicts = Counter(run.success for run in pool.values())
    counts = {
        "tasks": len(tasks),
        "runs": len(pool),
        "successes": verdicts[True],
        "failures": verdicts[False],
        "undecided": verdicts[None],
        "pairs": len(contrasts),
        "short_long_pairs": sum(pair.kind == "short-long" for pair in contrasts),
    }
    rejected = Counter(item for item in outcomes if isinstance(item, str))
    result = Mined(_unique(chosen, per_pair=config.per_pair), rejected, counts, caps={})
    rejected["another_pair_of_the_task"] += len(chosen) - len(result.found)
    cap_corpus(result)
    result.found.sort(key=lambda item: item.state.state_id)
    return result


def _tally(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _histogram(values: Iterable[float]) -> list[int]:
    """Return the counts of ten bins from 0 to 1."""
    bins = Counter(min(9, int(10 * value)) for value in values)
    return [bins[number] for number in range(10)]


def corpus_report(result: Mined) -> dict[str, Any]:
    """Return summary.json: pool, rejections, categories and label sources, verbs, hosts, score histograms."""
    states = [item.state for item in result.found]
    hosts = _tally(state.host for state in states)
    return {
        **result.counts,
        "states": len(states),
        "rejected": dict(sorted((+result.rejected).items())),
        "categories": _tally(state.category for state in states),
        "label_sources": _tally(state.label_source for state in states),
        "pair_kinds": _tally(state.pair_kind for state in states),
        "verbs": _tally(action.name for item in result.found for action in item.audit.success_actions),
        "host_shares": {host: round(count / len(states), 4) for host, count in hosts.items()},
        "caps": result.caps,
        "score_histograms": {
            name: _histogram(getattr(state.scores, name) for state in states) for name in SCORES
        },
    }
