"""The eleven failure modes: what rules see of a failed run, and what a few steps show for or against a mode.

Purpose: App. K. `rule_label` is the prior from rule features (task constraints, action types, numeric and
time cues, terminal behaviour, blocker signatures); `closing` and `violations` are the local evidence that the
miner looks for within two steps of a candidate, on either branch. The modes and their shares are Table 5's;
the shares are printed beside ours and decide nothing.

ours: evidence is a set of moves, each written as verb, element and value, with elements named by (tag, text),
so the evidence of two branches can be compared. ours: every rule is heuristic on purpose; the paper names the
kinds of cue and no rule.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rmsweb.browser.actions import ACTIONS
from rmsweb.records import Action, Step, Trajectory


@dataclass(frozen=True, slots=True)
class FailureMode:
    """A row of Table 5: short name, title, share of the paper's final corpus in %, what it means in our
    words.
    """

    name: str
    title: str
    share: float
    meaning: str


MODES = (
    FailureMode(
        "evidence",
        "Unverifiable evidence, source, or compliance failure",
        39.80,
        "concludes without evidence on a page, or from a wrong source",
    ),
    FailureMode(
        "endpoint",
        "Critical action or task endpoint incomplete",
        18.73,
        "finds the object, never adds, books, signs in or confirms",
    ),
    FailureMode(
        "obstruction",
        "Access, anti-bot, or technical obstruction",
        9.98,
        "is stuck behind a CAPTCHA, a 403 page or a dead control",
    ),
    FailureMode(
        "interaction",
        "UI interaction or navigation failure",
        8.53,
        "does not reach or operate a page, tab, date picker or dropdown",
    ),
    FailureMode(
        "runtime",
        "Runtime or evaluation failure",
        7.38,
        "times out, crashes, or leaves no readable trace of actions",
    ),
    FailureMode(
        "constraint",
        "Hard constraint, target object, or numeric threshold mismatch",
        6.02,
        "chooses what breaks a required attribute or number",
    ),
    FailureMode(
        "controls",
        "Filter/sort/search context not applied",
        4.53,
        "claims a filter, sort order or search that the page does not show",
    ),
    FailureMode(
        "date",
        "Date/time/availability closure",
        2.26,
        "never checks the requested date, time, stock or recency",
    ),
    FailureMode(
        "discovery",
        "Target discovery or search-strategy failure",
        1.82,
        "searches and navigates repeatedly without reaching the page",
    ),
    FailureMode(
        "omission",
        "Information extraction, final calculation, or multi-field omission",
        0.64,
        "leaves out a field, unit or computed value",
    ),
    FailureMode(
        "boundary",
        "Login, payment, or privacy-boundary error",
        0.31,
        "stops at the wrong boundary, or enters data it was not given",
    ),
)
CATEGORIES = tuple(mode.name for mode in MODES)
TITLES = {mode.name: mode.title for mode in MODES}

_BLOCKED = re.compile(
    r"captcha|are you (?:a )?(?:robot|human)|verify (?:that )?you are human|access denied|\b403\b|forbidden|unusual traffic|temporarily blocked"
)
_TIME = re.compile(
    r"\b(?:january|february|march|april|may|june|july|august|september|october|november|december|monday|tuesday|wednesday|thursday|friday|saturday|sunday"
    r"|today|tomorrow|tonight|week|month|year|date|day|hour|\d{1,2}:\d{2}|20\d\d|available|availability|in stock|latest|newest|recent|deadline)\b"
)
_CONSTRAINT = re.compile(
    r"\b(?:under|over|below|above|at least|at most|less than|more than|between|within|only|must|with|without|exactly|cheapest|lowest|highest)\b"
)
_CONTROL = re.compile(r"\b(?:filter|sort|order by|category|apply|refine|narrow|price range|search)\b")
_ENDPOINT = re.compile(
    r"\b(?:add|cart|basket|buy|book|reserve|check ?out|order|place|pay|submit|apply|send|confirm|continue|next|finish|save|sign in|log in|sign up|register)\b"
)
_LOGIN = re.compile(r"\b(?:log ?in|sign ?in|password|account|user ?name|credentials|payment|card number)\b")
_EXTRACT = re.compile(
    r"\b(?:how many|how much|compare|total|sum|difference|average|list|each|both|all|report|what|which|who|when|where)\b"
)
_WORD = re.compile(r"\w+")


# ------------------------------------------------------------------------------------------------------ moves


@dataclass(frozen=True, slots=True)
class Move:
    """One executed action as both branches can name it: no index, the element as (tag, text)."""

    verb: str
    tag: str = ""
    label: str = ""  # accessible name of the element, else its name or placeholder
    value: str = ""  # what was typed, chosen, opened, searched or answered


def element_of(step: Step, index: object) -> tuple[str, str]:
    """(tag, text) of the element of that index in the step's state; ("", "") where there is none.

    A control without a text is named by its aria-label, name or placeholder; one that has text lines below
    it, as a link has, by the first.
    """
    nodes = step.observation.nodes
    for position, node in enumerate(nodes):
        if node.index is not None and node.index == index:
            label = next(
                (
                    text
                    for text in (
                        node.text,
                        *(node.attributes.get(key, "") for key in ("aria-label", "name", "placeholder")),
                    )
                    if text
                ),
                "",
            )
            below = nodes[position + 1 : position + 2]
            if not label and below and below[0].tag == "#text" and below[0].depth > node.depth:
                label = below[0].text
            return node.tag, " ".join(label.split())
    return "", ""


def move_of(step: Step, action: Action) -> Move:
    """An action of a step as a Move: every parameter but the index goes into the value, defaults left out."""
    tag, label = (
        element_of(step, action.params["index"]) if action.params.get("index") is not None else ("", "")
    )
    if not tag and action.params.get("frame_element_index") is not None:
        tag, label = element_of(step, action.params["frame_element_index"])
    specs = (
        spec
        for spec in ACTIONS[action.name].params
        if spec.name not in ("index", "frame_element_index") and spec.name in action.params
    )
    values = [
        str(action.params[spec.name])
        for spec in specs
        if spec.required or action.params[spec.name] != spec.default
    ]
    return Move(action.name, tag, label, " ".join(" ".join(values).split()))


def moves_of(step: Step, *, failed: bool = False) -> tuple[Move, ...]:
    """The executed moves of a step, in order; those that failed are left out unless `failed`."""
    if step.output is None:
        return ()
    executed = zip(step.output.actions, step.results, strict=False)
    return tuple(move_of(step, action) for action, result in executed if failed or not result.error)


def page_text(step: Step) -> str:
    """Title and visible texts of the step's state, lower case."""
    return " ".join([step.observation.title, *(node.text for node in step.observation.nodes)]).lower()


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.lower()) if len(word) > 2 or word.isdigit()}


def is_blocked(step: Step) -> bool:
    """Whether the state looks like a CAPTCHA, a 403 page or another block."""
    return bool(_BLOCKED.search(page_text(step)))


# ---------------------------------------------------------------------------------------------- rule features


@dataclass(frozen=True, slots=True)
class Features:
    """What rules see of a success and a failed run of the same task."""

    constraints: int  # words of the task that set a condition
    numbers: int  # numbers of the task
    time_cue: bool
    login_cue: bool
    extract_cue: bool
    ended: str  # how the failed run ended
    declared_success: bool | None
    blocked: bool  # a blocker signature in the last states of the failed run
    errors: int  # failed actions and unusable answers of the failed run
    repeated_searches: int  # searches of the failed run beyond the first
    missing: tuple[str, ...]  # verbs that the success used more often
    failure_verbs: tuple[tuple[str, int], ...]


def features(task_text: str, success: Trajectory, failure: Trajectory) -> Features:
    """Rule features of a pair."""
    text = task_text.lower()
    won, lost = (
        Counter(move.verb for step in run.steps for move in moves_of(step)) for run in (success, failure)
    )
    failed_actions = sum(bool(result.error) for step in failure.steps for result in step.results)
    return Features(
        constraints=len(_CONSTRAINT.findall(text)),
        numbers=len(re.findall(r"\d+", text)),
        time_cue=bool(_TIME.search(text)),
        login_cue=bool(_LOGIN.search(text)),
        extract_cue=bool(_EXTRACT.search(text)),
        ended=failure.ended,
        declared_success=failure.declared_success,
        blocked=any(is_blocked(step) for step in failure.steps[-2:]),
        errors=failed_actions + sum(step.parse_failure is not None for step in failure.steps),
        repeated_searches=max(0, lost["search_engine"] - 1),
        missing=tuple(sorted((won - lost).keys())),
        failure_verbs=tuple(sorted(lost.items())),
    )


def features_text(found: Features) -> str:
    """The features as lines for the judge."""
    verbs = ", ".join(f"{verb} {count}" for verb, count in found.failure_verbs) or "none"
    return (
        f"conditions in the task: {found.constraints}; numbers: {found.numbers}; time cue: {found.time_cue}; login cue: {found.login_cue}\n"
        f"failed run: ended {found.ended}, declared success {found.declared_success}, blocked page {found.blocked}, "
        f"errors {found.errors}, repeated searches {found.repeated_searches}\n"
        f"its actions: {verbs}\nused more often by the successful run: {', '.join(found.missing) or 'nothing'}\n"
    )


def rule_label(found: Features) -> tuple[str, float]:
    """The rule category and its confidence in [0, 1]: each cue votes, the mode with most votes wins, ties by
    the order of Table 5.
    """
    done, missing = found.ended == "done", set(found.missing)
    votes: Counter[str] = Counter()
    votes["obstruction"] += 3 * found.blocked
    votes["runtime"] += 3 * (found.ended in ("environment", "parse_failures"))
    votes["controls"] += 2 * (done and "select_dropdown_option" in missing)
    votes["constraint"] += (done and found.constraints + found.numbers > 0) + (
        done and bool(missing & {"select_dropdown_option", "input_text"})
    )
    votes["evidence"] += (
        2
        * (
            done
            and found.extract_cue
            and bool(missing & {"click_element_by_index", "extract_structured_data", "go_to_url"})
        )
        + done
    )
    votes["endpoint"] += 2 * (done and not found.extract_cue and "click_element_by_index" in missing) + (
        not done
    )
    votes["interaction"] += 2 * (found.ended in ("stalled", "max_steps")) + (found.errors > 0)
    votes["date"] += 3 * (done and found.time_cue and bool(missing))
    votes["discovery"] += 2 * (found.repeated_searches > 1)
    votes["omission"] += 2 * (done and found.extract_cue and not missing)
    votes["boundary"] += 3 * (not done and found.login_cue)
    best = max(CATEGORIES, key=lambda name: (votes[name], -CATEGORIES.index(name)))
    return best, round(votes[best] / votes.total(), 3) if votes.total() else 0.0


# --------------------------------------------------------------------------------------------- local evidence

_PROGRESS = frozenset(spec.name for spec in ACTIONS.values() if spec.changes_state)
_OPENS = frozenset({"go_to_url", "search_engine", "switch_tab"})
_VALUES = frozenset({"select_dropdown_option", "input_text", "upload_file_to_element"})
Window = Sequence[Step]


def _any(move: Move, task: frozenset[str], step: Step) -> bool:
    return True


def _names_task_words(move: Move, task: frozenset[str], step: Step) -> bool:
    words = _words(move.value if move.verb in _VALUES else move.label)
    return bool(words) and words <= task


def _label_fits(pattern: re.Pattern[str]) -> Callable[[Move, frozenset[str], Step], bool]:
    return lambda move, task, step: bool(pattern.search(f"{move.label} {move.value}".lower()))


def _answer_on_page(move: Move, task: frozenset[str], step: Step) -> bool:
    new = _words(move.value) - task - {"true", "false"}
    return move.verb != "done" or not new or bool(new & _words(page_text(step)))


# Category -> (verbs, test) of the moves that close the task where this mode would break it.
_CLOSING: dict[str, tuple[frozenset[str], Callable[[Move, frozenset[str], Step], bool]]] = {
    "evidence": (
        frozenset(
            {"click_element_by_index", "extract_structured_data", "go_to_url", "scroll_to_text", "done"}
        ),
        _answer_on_page,
    ),
    "endpoint": (
        frozenset({"click_element_by_index", "send_keys", "input_text"}),
        _label_fits(re.compile(f"{_ENDPOINT.pattern}|enter")),
    ),
    "obstruction": (_OPENS | {"go_back", "close_tab"}, _any),
    "interaction": (_VALUES | {"click_element_by_index", "switch_tab", "send_keys", "scroll_to_text"}, _any),
    "runtime": (_PROGRESS, _any),
    "constraint": (_VALUES | {"click_element_by_index"}, _names_task_words),
    "controls": (
        _VALUES | {"click_element_by_index"},
        lambda move, task, step: move.verb in _VALUES or bool(_CONTROL.search(move.label.lower())),
    ),
    "date": (_VALUES | {"click_element_by_index", "extract_structured_data"}, _label_fits(_TIME)),
    "discovery": (frozenset({"go_to_url", "click_element_by_index"}), _any),
    "omission": (
        frozenset({"extract_structured_data", "scroll", "scroll_to_text", "click_element_by_index"}),
        _any,
    ),
    "boundary": (frozenset({"input_text", "click_element_by_index"}), _label_fits(_LOGIN)),
}


def closing(category: str, window: Window, task_text: str) -> frozenset[Move]:
    """The moves of a window of steps that are the mode's closing behaviour."""
    verbs, fits = _CLOSING[category]
    task = frozenset(_words(task_text))
    return frozenset(
        move for step in window for move in moves_of(step) if move.verb in verbs and fits(move, task, step)
    )


def violations(category: str, window: Window, wanted: frozenset[Move], *, ended: str, has_end: bool) -> bool:
    """Whether a window of the failed run shows the mode's violation.

    Args: wanted: the success window's closing moves; ended: how the failed run ended; has_end: the window
    reaches its last step.
    """
    moves = [move for step in window for move in moves_of(step)]
    troubled = any(
        step.parse_failure or step.browser_restarts or any(result.error for result in step.results)
        for step in window
    )
    unchanged = any(a.observation.fingerprint == b.observation.fingerprint for a, b in pairwise(window))
    if category == "obstruction":
        return any(is_blocked(step) for step in window)
    if category == "runtime":
        return troubled or (has_end and ended in ("environment", "parse_failures"))
    if category == "interaction":
        return (
            troubled
            or unchanged
            or (has_end and ended in ("stalled", "max_steps"))
            or not wanted & set(moves)
        )
    if category == "discovery":
        return sum(move.verb == "search_engine" for move in moves) > 1 or all(
            ACTIONS[move.verb].passive for move in moves
        )
    if category in ("evidence", "endpoint", "omission") and has_end:
        return True  # it stopped here, finished or not
    goes_on = any(move.verb in _PROGRESS for move in moves)
    return goes_on and not wanted <= set(moves)  # it went on without what the success did
