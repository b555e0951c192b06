"""Laws of the miner: alignment scores, the divergence search, labels, gates, caps, what may enter RL."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mining_world import VERBS, on_page, page, render, run, step, trajectory

from rmsweb.jsonl import dumps
from rmsweb.mining.alignment import (
    W_PRIOR,
    AlignedRun,
    AlignedStep,
    Contrast,
    action_score,
    category_score,
    state_score,
)
from rmsweb.mining.divergence import MIN_STATE, candidates
from rmsweb.mining.search import (
    DOMAIN_CAP,
    MIN_CATEGORY,
    MIN_TOTAL,
    OBSTRUCTION_CAP,
    W_ACTION,
    W_CATEGORY,
    W_STATE,
    Found,
    Judge,
    Mined,
    MinerConfig,
    apply_cap,
    best_candidate,
    cap_corpus,
    corpus_report,
    evidence_of,
    label_pair,
    mine,
    pairs,
    run_summary,
)
from rmsweb.mining.taxonomy import Features, Label, rule_label
from rmsweb.records import Scores, Trajectory

SURE = Label("constraint", 0.9)
verbs = st.sampled_from(sorted(set(VERBS) - {"done"}))
walks = st.lists(verbs, min_size=1, max_size=5).map(lambda names: " ".join([*names, "done"]))


def labels(*answers: tuple[str, float] | None) -> Judge:
    """A judge that gives these answers in turn, then the last one forever."""
    queue = [answer and Label(*answer) for answer in answers]

    async def judge(pair: Contrast, seen: Features, opinions: Sequence[Label]) -> Label | None:
        return queue.pop(0) if len(queue) > 1 else queue[0]

    return judge


def mined(runs: list[AlignedRun], judge: Judge | None = None, **settings: bool) -> Mined:
    return asyncio.run(mine(runs, render=render, judge=judge, config=MinerConfig(**settings)))


def aligned(
    name: str, *, progress: float = 0.0, path: str = "/", memory: str = "", shift: int = 0
) -> AlignedStep:
    return AlignedStep(step(1, name, path=path, memory=memory, shift=shift), progress)


# ----------------------------------------------------------------------------------------------------- scores


def test_weights_and_thresholds_are_the_papers() -> None:
    """App. K: 0.50, 0.25, 0.25 and 0.60, 0.62, 0.45; caps of 30 and 10 %."""
    assert (W_STATE, W_ACTION, W_CATEGORY) == (0.50, 0.25, 0.25)
    assert (MIN_STATE, MIN_TOTAL, MIN_CATEGORY, DOMAIN_CAP, OBSTRUCTION_CAP) == (0.60, 0.62, 0.45, 0.30, 0.10)


def test_a_state_is_like_itself_whatever_its_indices() -> None:
    """S_state is 1 for the same page under other indices, less for another path, element or progress."""
    here = aligned("add")
    assert state_score(here, aligned("add", shift=9)) == pytest.approx(1)
    assert state_score(here, aligned("add", path="/other")) < 1
    assert state_score(here, aligned("add", progress=1.0)) < 1
    assert (
        state_score(here, AlignedStep(replace(here.step, observation=page("/", text="something else")), 0.0))
        < 1
    )


def test_memories_count_only_if_both_are_written() -> None:
    """Without a memory its weight falls away; with two unlike memories the score falls."""
    assert state_score(aligned("add", memory="found a lamp"), aligned("add")) == pytest.approx(1)
    assert state_score(aligned("add", memory="found a lamp"), aligned("add", memory="chairs sold out")) < 1


@given(verbs, verbs)
def test_action_score_is_bounded_symmetric_and_none_for_equals(a: str, b: str) -> None:
    """S_action is in [0, 1], does not depend on the sides, and is None for equal or trivial moves."""
    x, y = aligned(a).moves, aligned(b, shift=3).moves
    score = action_score(x, y)
    assert score == action_score(y, x)
    if a == b or {a, b} <= {"scroll", "back"} or {a, b} <= {"search", "research"}:
        assert score is None
    else:
        assert score is not None
        assert 0 <= score <= 1


def test_passive_differences_count_less() -> None:
    """Another value contrasts as much as another verb, and both more than a search against a scroll."""

    def score(a: str, b: str) -> float:
        return action_score(aligned(a).moves, aligned(b).moves) or 0.0

    assert score("select", "add") == score("select", "blue") > score("search", "scroll")


def test_the_prior_alone_never_passes() -> None:
    """Without local evidence the surest label stays below the threshold of S_category."""
    pair = Contrast(run("scroll back done", True), run("scroll scroll back scroll", False))
    for candidate in candidates(pair):
        assert category_score(pair, candidate, Label("constraint", 1.0)) < MIN_CATEGORY
    assert W_PRIOR < MIN_CATEGORY


def test_shared_evidence_counts_against() -> None:
    """S_category falls if the failing branch shows the success's closing behaviour too."""
    success = run("open select add done", True)
    without, shared = run("open add add done", False, name="b"), run("open select blue done", False, name="c")
    item = candidates(Contrast(success, without))[0]
    assert category_score(Contrast(success, without), item, SURE) > category_score(
        Contrast(success, shared), item, SURE
    )


# ------------------------------------------------------------------------------------------- pairs and search


def test_pairs_need_a_success_and_a_failure() -> None:
    """Undecided runs are in no pair; secondary pairs need a check of the work and can be turned off."""
    good, bad, unknown = (
        run("open select add done", True),
        run("open add done", False, name="b"),
        run("open done", None, name="c"),
    )
    long = run("open open select add done", True, name="d")
    assert [(pair.success.key[0], pair.failure.key[0]) for pair in pairs([unknown, bad, good])] == [
        ("t0.a", "t0.b")
    ]
    checked = replace(good, work_checked=True)
    assert [pair.kind for pair in pairs([good, long])] == []
    assert [(pair.kind, pair.success, pair.failure) for pair in pairs([checked, long])] == [
        ("short-long", checked, long)
    ]
    assert not list(pairs([checked, long], secondary=False))


def test_the_skipped_decision_is_found() -> None:
    """A run that skips the option parts from the success at its choice, whatever the indices."""
    result = mined(
        [
            run("open@/ select@/item add@/item done@/cart", True),
            run("open@/ add@/item done@/cart", False, name="b", shift=4),
        ]
    )
    assert [item.audit.success_step for item in result.found] == [2]
    assert json.loads(result.found[0].state.target_text)["action"] == [
        {"select_dropdown_option": {"index": 1, "text": "red"}}
    ]
    assert result.found[0].audit.failure_actions[0].params == {"index": 6}


def test_a_premature_end_is_a_candidate_unless_strict() -> None:
    """ours: the failing side may be its done unless --strict-non-terminal; the success side never is."""
    runs = [run("open add checkout done", True), run("open add done", False, name="b")]
    loose = candidates(Contrast(*runs))
    strict = candidates(Contrast(*runs), strict_non_terminal=True)
    assert any(item.failure_step == 2 for item in loose)
    assert not any(item.failure_step == 2 for item in strict)
    assert not any(item.success_step == 3 for item in loose)


def test_a_step_with_an_error_is_no_target() -> None:
    """An action that failed is verified by nothing, even in a run that succeeded."""
    success = run("open select add done", True)
    steps = list(success.trajectory.steps)
    steps[1] = step(2, "select", error="gone")
    broken = AlignedRun(replace(success.trajectory, steps=tuple(steps)), True)
    assert not any(
        item.success_step == 1 for item in candidates(Contrast(broken, run("open add done", False, name="b")))
    )


def test_the_later_step_wins_a_tie() -> None:
    """Of candidates with the same score the later one is kept."""
    pair = Contrast(run("open select select add done", True), run("add", False, name="b"))
    found = [replace(item, state=1.0, action=1.0) for item in candidates(pair) if item.success_step in (1, 2)]
    best = best_candidate(pair, found, [Label("runtime", 1.0, "rule")], render)
    assert best == "runtime_gate"
    kept = best_candidate(pair, found, [SURE], render)
    assert isinstance(kept, Found)
    assert kept.audit.success_step == 3


def test_targets_cover_every_verb_that_differs() -> None:
    """Whichever verb two runs part at, the target is that verb."""
    wanted = {"select", "add", "type", "goto", "read", "checkout", "search"}
    runs = []
    for name in sorted(wanted):
        runs += [
            run(f"open {name} done", True, task_id=name),
            run("open scroll done", False, task_id=name, name="b"),
        ]
    result = mined(runs)
    assert {item.state.task_id: item.audit.success_actions[0].name for item in result.found} == {
        name: VERBS[name][0] for name in wanted
    }
    clicks = [item.state.target_text for item in result.found if item.state.task_id in ("add", "checkout")]
    assert len(set(clicks)) == 2  # two buttons are not the same move


@pytest.mark.parametrize("kept", ["picture", "sample"])
def test_gates_need_a_picture_and_a_sample(kept: str) -> None:
    """Without a picture on either branch, or without a sample, no state is mined; the reason is counted."""
    runs = [run("open select add done", True), run("open add done", False, name="b")]
    if kept == "sample":
        runs = [AlignedRun(_without_pictures(item), item.success) for item in runs]
        result = mined(runs)
        assert +result.rejected == Counter(no_picture=1)
    else:
        result = asyncio.run(mine(runs, render=lambda item, position: None, judge=None, config=MinerConfig()))
        assert +result.rejected == Counter(no_sample=1)
    assert not result.found


def _without_pictures(item: AlignedRun) -> Trajectory:
    found = item.trajectory
    for number, old in enumerate(found.steps):
        found = on_page(found, number, replace(old.observation, screenshot=None))
    return found


# ----------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((("constraint", 0.9),), Label("constraint", 0.9, "judge")),
        ((("date", 0.9), ("constraint", 0.8)), Label("constraint", 0.8, "review")),  # the rules contradict
        ((("constraint", 0.5), ("boundary", 0.8)), Label("boundary", 0.8, "review")),
        ((("constraint", 0.5), ("boundary", 0.4)), Label("boundary", 0.4, "review")),
        ((("constraint", 0.5), None), Label("constraint", 0.5, "judge")),
        ((None, ("boundary", 0.9)), Label("boundary", 0.9, "review")),
    ],
)
def test_doubtful_labels_are_reviewed(answers: tuple[tuple[str, float] | None, ...], expected: Label) -> None:
    """App. K: a second pass reviews labels below 0.70; ours: and those that the rules contradict."""
    pair = Contrast(run("open select add done", True), run("open blue add done", False, name="b"))
    opinions = asyncio.run(label_pair(pair, evidence_of(pair), labels(*answers)))
    assert opinions[-1] == expected
    assert opinions[0] == rule_label(evidence_of(pair))
    assert opinions[0].category == "constraint"


@pytest.mark.parametrize("answers", [(("date", 0.5), ("boundary", 0.2)), (None, None), (("date", 0.1), None)])
def test_the_rules_decide_if_the_judge_is_unsure(answers: tuple[tuple[str, float] | None, ...]) -> None:
    """The rules label a pair whose reviewed confidence is below 0.35 or whose answer cannot be read."""
    pair = Contrast(run("open select add done", True), run("open blue add done", False, name="b"))
    opinions = asyncio.run(label_pair(pair, evidence_of(pair), labels(*answers)))
    assert opinions[-1] == rule_label(evidence_of(pair))


def test_the_review_reads_the_opinions_so_far() -> None:
    """The second pass sees the rules' label and the first one; all of them stand in the audit row."""
    heard: list[Sequence[Label]] = []

    async def judge(pair: Contrast, seen: Features, opinions: Sequence[Label]) -> Label | None:
        heard.append(opinions)
        return Label("controls", 0.4 if not opinions else 0.9, reason="the filter")

    result = mined([run("open select add done", True), run("open blue add done", False, name="b")], judge)
    assert [[opinion.source for opinion in opinions] for opinions in heard] == [[], ["rule", "judge"]]
    assert [words.split(":")[0] for words in result.found[0].audit.opinions] == ["rule", "judge", "review"]
    assert "the filter" in result.found[0].audit.opinions[2]


def test_the_judge_sees_the_last_steps_by_element() -> None:
    """The summary names elements by their text and says how the run ended."""
    seen = run_summary(run("open select add done", True))
    assert "'color' red" in seen
    assert "Ended: done" in seen


# ---------------------------------------------------------------------------------------------- whole corpora


@given(
    st.lists(st.tuples(walks, st.booleans(), st.sampled_from(["t0", "t1"])), min_size=2, max_size=7),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_pool_does_not_matter(rows: list[tuple[str, bool, str]], random: object) -> None:
    """A permuted pool, even with a run twice, gives the same states, audit rows and counts."""
    runs = [
        run(names, success, task_id=task, name=f"n{number}")
        for number, (names, success, task) in enumerate(rows)
    ]
    shuffled = [*runs, runs[0]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, two = mined(runs), mined(shuffled)
    assert [(dumps(item.state), dumps(item.audit)) for item in one.found] == [
        (dumps(item.state), dumps(item.audit)) for item in two.found
    ]
    assert corpus_report(one) == corpus_report(two)


@given(walks, walks)
def test_every_state_passes_all_thresholds(good: str, bad: str) -> None:
    """Whatever is mined has scores in [0, 1] above the thresholds, and the total is their weighted sum."""
    for item in mined([run(good, True), run(bad, False, name="b")]).found:
        scores = item.state.scores
        assert min(scores.state - MIN_STATE, scores.total - MIN_TOTAL, scores.category - MIN_CATEGORY) >= 0
        assert scores.total == pytest.approx(
            0.5 * scores.state + 0.25 * scores.action + 0.25 * scores.category, abs=1e-5
        )
        assert max(scores.state, scores.action, scores.category) <= 1


def test_only_the_success_side_enters_rl() -> None:
    """No word of the failing branch is in the mined state, whichever of its fields it came from."""
    evil = "ZZQ-evil-7"
    success, failure = run("open select add done", True), trajectory("open add done", name=evil)
    steps = tuple(
        replace(
            old,
            observation=replace(
                old.observation,
                url=f"{old.observation.url}?{evil}",
                title=evil,
                dialogs=(evil,),
                screenshot=replace(old.observation.screenshot, path=f"screenshots/{evil}.jpg")
                if old.observation.screenshot
                else None,
            ),
            response_text=evil,
            output=replace(old.output, memory=evil, next_goal=evil, thinking=evil) if old.output else None,
            results=tuple(replace(result, message=evil, content=evil) for result in old.results),
        )
        for old in failure.steps
    )
    hostile = replace(failure, steps=steps, final_text=evil, guide_in=evil, guide_out=evil, error=evil)
    result = mined([success, AlignedRun(hostile, False)], labels(("constraint", 0.9)))
    assert len(result.found) == 1
    assert evil not in dumps(result.found[0].state)
    assert evil in dumps(result.found[0].audit)  # the audit file is where it belongs
    assert result.found[0].state.messages == render(success, result.found[0].state.step - 1).messages  # type: ignore[union-attr]


def test_one_state_a_task_or_one_a_pair() -> None:
    """The best state of a task is kept; with per_pair each pair may give one, but no state comes twice."""
    runs = [
        run("open select add done", True),
        run("open add done", False, name="b"),
        run("open select checkout done", False, name="c"),
    ]
    assert len(mined(runs).found) == 1
    assert len(mined(runs, per_pair=True).found) == 2
    twin = run("open add done", False, name="d")
    assert len(mined([*runs, twin], per_pair=True).found) == 2


def test_runtime_failures_need_a_sign_and_a_sure_label() -> None:
    """The stricter gate of runtime failures: a high confidence and a broken run."""
    good, broken, clean = (
        run("open select add done", True),
        run("open junk add scroll", False, name="b"),
        run("open add done", False, name="c"),
    )
    assert not mined([good, clean], labels(("runtime", 0.95))).found
    assert not mined([good, broken], labels(("runtime", 0.75))).found
    assert mined([good, broken], labels(("runtime", 0.95))).found


def corpus(rows: list[tuple[str, str, float]]) -> list[Found]:
    """States with these hosts, categories and scores."""
    base = mined([run("open select add done", True), run("open add done", False, name="b")]).found[0]
    return [
        replace(
            base,
            state=replace(
                base.state,
                state_id=f"{n:04}",
                host=host,
                category=category,
                scores=Scores(state=1, action=1, category=1, total=total),
            ),
        )
        for n, (host, category, total) in enumerate(rows)
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.sampled_from(["date", "controls", "obstruction"]),
            st.floats(0.62, 1),
        ),
        max_size=40,
    )
)
def test_caps_hold_or_are_reported(rows: list[tuple[str, str, float]]) -> None:
    """No host has more than 30 % and obstructions at most 10 % of the states, unless a cap is not binding."""
    result = Mined(corpus(rows), Counter(), counts={}, caps={})
    cap_corpus(result)
    sizes = Counter(item.state.host for item in result.found)
    if result.caps["domain"] == "holds":
        assert max(sizes.values(), default=0) <= 0.30 * len(result.found) + 1e-9
    if result.caps["obstruction"] == "holds":
        assert (
            sum(item.state.category == "obstruction" for item in result.found)
            <= 0.10 * len(result.found) + 1e-9
        )
    assert len(result.found) + sum(result.rejected.values()) == len(rows)
    assert len(result.found) >= 0.25 * len(rows)


def test_a_cap_drops_the_lowest_of_the_largest_category() -> None:
    """The host's most frequent category loses its lowest score first; three hosts are too few for a cap."""
    rows = [("a", "date", 0.7), ("a", "date", 0.9), ("a", "controls", 0.63), ("a", "date", 0.8)] + [
        (host, "date", 0.9) for host in "bcdbcd"
    ]
    kept = apply_cap(corpus(rows), lambda item: item.state.host, 0.30)
    assert kept is not None
    assert [item.state.scores.total for item in kept if item.state.host == "a"] == [0.63, 0.9] or len(
        kept
    ) < 9
    assert not any(item.state.host == "a" and item.state.scores.total == 0.7 for item in kept)
    assert (
        apply_cap(corpus([(host, "date", 0.9) for host in "abcabc"]), lambda item: item.state.host, 0.30)
        is None
    )


def test_the_report_counts_everything_once() -> None:
    """Every pair is either a state or a counted rejection; histograms count the states."""
    runs = [
        run("open select add done", True),
        run("open add done", False, name="b"),
        run("open select add done", False, name="c"),
    ]
    counts = corpus_report(mined(runs))
    assert counts["pairs"] == counts["states"] + sum(counts["rejected"].values())
    assert all(sum(bins) == counts["states"] for bins in counts["score_histograms"].values())
    assert counts["verbs"] == {"select_dropdown_option": 1}
