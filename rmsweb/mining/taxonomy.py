"""The eleven failure modes: what rules see of a failed run, and what a few steps show for or against a mode.

Purpose: App. K. `rule_label` is the prior from rule features (task constraints, action types, numeric and
time cues, terminal behaviour, blocker signatures). `FailureMode` holds the local evidence that the miner
looks for within two steps of a candidate, on either branch. The modes and their shares are Table 5's; the
shares are printed beside ours and decide nothing.

A mode is a row of MODES and its votes in `rule_label`. The row names a trait of its closing moves and the
signs of its violation; `traits_of` and `signs_of` say when they hold.

ours: evidence is a set of moves, each written as verb, element and value, with elements named by (tag, text),
so that two branches can be compared. ours: every rule is heuristic on purpose; the paper names the kinds of
cue and no rule.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rmsweb.browser.actions import ACTIONS
from rmsweb.records import Action, Element, Step, Trajectory

INDEX_PARAMS = ("index", "frame_element_index")
NAMING_ATTRIBUTES = ("aria-label", "name", "placeholder")
BROKEN_ENDS = ("environment", "parse_failures")
STUCK_ENDS = ("stalled", "max_steps")

BLOCKED = re.compile(
    r"captcha|are you (?:a )?(?:robot|human)|verify (?:that )?you are (?:a )?human|proof of being human|"
    r"access (?:denied|forbidden)|(?:error|http|status|code):? 403\b|\b403:? (?:error|forbidden|access)|"
    r"unusual traffic|temporarily blocked|checking your browser|^just a moment"
)
TIME = re.compile(
    r"\b(?:january|february|march|april|may|june|july|august|september|october|november|december|"
    r"monday|tuesday|wednesday|thursday|friday|saturday|sunday|today|tomorrow|tonight|week|month|year|date|"
    r"day|hour|\d{1,2}:\d{2}|20\d\d|available|availability|in stock|latest|newest|recent|deadline)\b"
)
CONSTRAINT = re.compile(
    r"\b(?:under|over|below|above|at least|at most|less than|more than|between|within|only|must|with|without|"
    r"exactly|cheapest|lowest|highest)\b"
)
CONTROL = re.compile(r"\b(?:filter|sort|order by|category|apply|refine|narrow|price range)\b")
QUERY = re.compile(r"\b(?:search|find|look ?up|query|keywords?|go)\b")
ENDPOINT = re.compile(
    r"\b(?:add|cart|basket|buy|book|reserve|check ?out|order|place|pay|submit|apply|send|confirm|continue|"
    r"next|finish|save|sign in|log in|sign up|register)\b|enter"
)
LOGIN = re.compile(
    r"\b(?:log ?in|sign ?in|password|passcode|code|account|user ?name|user|credentials|payment|card number)\b"
)
ASKS = re.compile(
    r"\b(?:how many|how much|compare|total|sum|difference|average|list|each|both|all|report|what|which|who|"
    r"when|where|tell|find|give|name|look up|check|read|say)\b"
)
SEVERAL = re.compile(r"\b(?:compare|total|sum|difference|average|each|both|all|and)\b")

CLICK, SELECT, TYPE = "click_element_by_index", "select_dropdown_option", "input_text"
EXTRACTION, SEARCH = "extract_structured_data", "search_engine"
VALUES = (SELECT, TYPE, "upload_file_to_element")
OPENS = ("go_to_url", SEARCH, "switch_tab")
PROGRESS = frozenset(spec.name for spec in ACTIONS.values() if spec.changes_state)


# ------------------------------------------------------------------------------------------------------ moves


@dataclass(frozen=True, slots=True)
class Move:
    """One executed action as both branches can name it: no index, the element as (tag, text)."""

    verb: str
    tag: str = ""
    label: str = ""  # accessible name of the element, else its name or placeholder
    value: str = ""  # what was typed, chosen, opened, searched or answered


def name_of(node: Element) -> str:
    """Return the name of an element: its text, else its label, name or placeholder."""
    names = (node.text, *(node.attributes.get(name, "") for name in NAMING_ATTRIBUTES))
    return next(filter(None, names), "")


def move_of(step: Step, action: Action) -> Move:
    """Return an action of a step as a move.

    The element is the one that the action names by index. A control without a text is named by its
    aria-label, name or placeholder; else by the text line below it, which a link has. Every other parameter
    goes into the value, defaults left out.
    """
    nodes, params = step.observation.nodes, action.params
    wanted = [params[name] for name in INDEX_PARAMS if params.get(name) is not None]
    place = next((at for index in wanted for at, node in enumerate(nodes) if node.index == index), None)
    tag, names = "", [""]
    if place is not None:
        node, below = nodes[place], nodes[place + 1 : place + 2]
        tag, names = node.tag, [name_of(node)]
        names += [line.text for line in below if line.tag == "#text" and line.depth > node.depth]
    values = [
        str(params[spec.name])
        for spec in ACTIONS[action.name].params
        if spec.name not in INDEX_PARAMS
        and spec.name in params
        and (spec.required or params[spec.name] != spec.default)
    ]
    label = next(filter(None, names), "")
    return Move(action.name, tag, " ".join(label.split()), " ".join(" ".join(values).split()))


def moves_of(step: Step, *, failed: bool = False) -> tuple[Move, ...]:
    """Return the executed moves of a step, in order; those that failed only if `failed`."""
    if step.output is None:
        return ()
    executed = zip(step.output.actions, step.results, strict=False)
    return tuple(move_of(step, action) for action, result in executed if failed or not result.error)


def page_text(step: Step) -> str:
    """Return title and visible texts of the step's state, lower case."""
    return " ".join([step.observation.title, *(node.text for node in step.observation.nodes)]).lower()


def is_blocked(step: Step) -> bool:
    """Return whether the state looks like a CAPTCHA, a 403 page or another block."""
    return bool(BLOCKED.search(page_text(step)))


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text that may carry meaning: those of three letters and more, and numbers."""
    words = re.findall(r"\w+", text.lower())
    return frozenset(word for word in words if len(word) > 2 or word.isdigit())


# --------------------------------------------------------------------------------------------- local evidence


def traits_of(move: Move, step: Step, task_words: frozenset[str]) -> dict[str, bool]:
    """Return what a move is good for; a mode asks for one of these of its closing moves.

    Args: step: in which the move was made. task_words: `words_of` the task.
    """
    text = f"{move.label} {move.value}".lower()
    chosen = words_of(move.value if move.verb in VALUES else move.label)
    told = words_of(move.value) - task_words - {"true", "false"} if move.verb == "done" else set()
    return {
        "any": True,
        "answer is on the page": not told or not told.isdisjoint(words_of(page_text(step))),
        "brings to the end": bool(ENDPOINT.search(text)),
        "chooses what the task names": bool(chosen) and chosen <= task_words,
        "sets a control": move.verb in VALUES or bool(CONTROL.search(move.label.lower())),
        "looks for something": move.verb in OPENS or bool(QUERY.search(move.label.lower())),
        "concerns time": bool(TIME.search(text)),
        "concerns an account": bool(LOGIN.search(text)),
    }


def signs_of(steps: Sequence[Step], wanted: frozenset[Move], ended: str) -> dict[str, bool]:
    """Return what a few steps of the failed run show; each mode names the signs that violate it.

    Args: wanted: closing moves of the success. ended: how the run ended, empty if the steps do not reach its
    last one.
    """
    moves = [move for step in steps for move in moves_of(step)]
    verbs = [move.verb for move in moves]
    return {
        "blocked page": any(map(is_blocked, steps)),
        "trouble": any(
            step.parse_failure or step.browser_restarts or any(result.error for result in step.results)
            for step in steps
        ),
        "unchanged page": any(
            a.observation.fingerprint == b.observation.fingerprint for a, b in pairwise(steps)
        ),
        "end": ended != "",
        "broken end": ended in BROKEN_ENDS,
        "stuck end": ended in STUCK_ENDS,
        "repeated searches": verbs.count(SEARCH) > 1,
        "only passive moves": all(ACTIONS[verb].passive for verb in verbs),
        "goes on without": not (PROGRESS.isdisjoint(verbs) or wanted.issubset(moves)),
    }


@dataclass(frozen=True)
class FailureMode:
    """A row of Table 5 and the local evidence for it."""

    name: str
    title: str
    share: float  # of the paper's final corpus, in %
    meaning: str  # in our words
    verbs: Collection[str]  # of the moves that close the task where this mode would break it
    trait: str = "any"  # of these moves
    signs: tuple[str, ...] = ("goes on without",)  # each shows the mode on the failing branch

    def closing(self, steps: Iterable[Step], task_text: str) -> frozenset[Move]:
        """Return the moves of a few steps that are the mode's closing behaviour."""
        words = words_of(task_text)
        executed = ((move, step) for step in steps for move in moves_of(step) if move.verb in self.verbs)
        return frozenset(move for move, step in executed if traits_of(move, step, words)[self.trait])

    def violated(self, steps: Sequence[Step], wanted: frozenset[Move], ended: str) -> bool:
        """Return whether a few steps of the failed run show the mode; for the arguments see `signs_of`."""
        shown = signs_of(steps, wanted, ended)
        return any(shown[sign] for sign in self.signs)


# ------------------------------------------------------------------------------------------------- the modes

MODES = (
    FailureMode(
        "evidence",
        "Unverifiable evidence, source, or compliance failure",
        39.80,
        "concludes without evidence on a page, or from a wrong source",
        verbs=(CLICK, EXTRACTION, "go_to_url", "scroll_to_text", "done"),
        trait="answer is on the page",
        signs=("end", "goes on without"),
    ),
    FailureMode(
        "endpoint",
        "Critical action or task endpoint incomplete",
        18.73,
        "finds the object, never adds, books, signs in or confirms",
        verbs=(CLICK, "send_keys", TYPE),
        trait="brings to the end",
        signs=("end", "goes on without"),
    ),
    FailureMode(
        "obstruction",
        "Access, anti-bot, or technical obstruction",
        9.98,
        "is stuck behind a CAPTCHA, a 403 page or a dead control",
        verbs=(*OPENS, CLICK, "go_back", "close_tab"),
        signs=("blocked page",),
    ),
    FailureMode(
        "interaction",
        "UI interaction or navigation failure",
        8.53,
        "does not reach or operate a page, tab, date picker or dropdown",
        verbs=(*VALUES, *OPENS, CLICK, "send_keys", "scroll_to_text"),
        signs=("trouble", "unchanged page", "stuck end", "goes on without"),
    ),
    FailureMode(
        "runtime",
        "Runtime or evaluation failure",
        7.38,
        "times out, crashes, or leaves no readable trace of actions",
        verbs=PROGRESS,
        signs=("trouble", "broken end"),
    ),
    FailureMode(
        "constraint",
        "Hard constraint, target object, or numeric threshold mismatch",
        6.02,
        "chooses what breaks a required attribute or number",
        verbs=(*VALUES, CLICK),
        trait="chooses what the task names",
    ),
    FailureMode(
        "controls",
        "Filter/sort/search context not applied",
        4.53,
        "claims a filter, sort order or search that the page does not show",
        verbs=(*VALUES, CLICK),
        trait="sets a control",
    ),
    FailureMode(
        "date",
        "Date/time/availability closure",
        2.26,
        "never checks the requested date, time, stock or recency",
        verbs=(*VALUES, CLICK, EXTRACTION),
        trait="concerns time",
    ),
    FailureMode(
        "discovery",
        "Target discovery or search-strategy failure",
        1.82,
        "searches and navigates repeatedly without reaching the page",
        verbs=(*OPENS, CLICK, TYPE, "send_keys"),
        signs=("repeated searches", "only passive moves", "goes on without"),
    ),
    FailureMode(
        "omission",
        "Information extraction, final calculation, or multi-field omission",
        0.64,
        "leaves out a field, unit or computed value",
        verbs=(EXTRACTION, "scroll", "scroll_to_text", CLICK),
        signs=("end", "goes on without"),
    ),
    FailureMode(
        "boundary",
        "Login, payment, or privacy-boundary error",
        0.31,
        "stops at the wrong boundary, or enters data it was not given",
        verbs=(TYPE, CLICK),
        trait="concerns an account",
    ),
)
BY_NAME = {mode.name: mode for mode in MODES}
CATEGORIES = tuple(BY_NAME)
TITLES = {mode.name: mode.title for mode in MODES}


# ------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True)
class Label:
    """A failure mode, how sure the labeller is of it, in [0, 1], and who it was."""

    category: str
    confidence: float
    source: Literal["judge", "review", "rule"] = "judge"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.category} {self.confidence:.2f} {self.reason}".strip()


@dataclass(frozen=True, slots=True)
class Features:
    """What rules see of a success and a failed run of the same task, and of the decision where they part."""

    constraints: int  # words of the task that set a condition
    numbers: int  # numbers of the task
    asks: bool  # the task wants to know something
    several: bool  # and more than one thing
    ended: str  # how the failed run ended
    declared_success: bool | None
    blocked: bool  # a blocker signature where the runs part or in the last states of the failed run
    errors: int  # failed actions of the failed run
    unreadable: int  # unusable answers and browser restarts of the failed run
    repeated_searches: int  # searches of the failed run beyond the first
    decision: tuple[Move, ...]  # what the success did where the runs part
    instead: tuple[Move, ...]  # what the failed run did there
    leads_to_link: bool  # the success then chose a link: what it set before narrowed a list down
    read_before: bool  # the failed run had read or opened something in the same way
    traits: frozenset[str]  # `traits_of` some move of the decision


def features(
    task_text: str, success: Trajectory, failure: Trajectory, parting: tuple[int, int] | None
) -> Features:
    """Return the rule features of a pair.

    Args: parting: positions (from 0) of the steps at which the two runs part, None if they do not.
    """
    text, words = task_text.lower(), words_of(task_text)
    searches = sum(move.verb == SEARCH for step in failure.steps for move in moves_of(step))
    seen, decision, instead = list(failure.steps[-2:]), list[Move](), list[Move]()
    traits, verbs_before, onward = set[str](), set[str](), None
    if parting is not None:
        won, lost = parting
        here, there = success.steps[won], failure.steps[lost]
        seen.append(there)
        instead = list(moves_of(there, failed=True))
        moves = moves_of(here, failed=True)
        decision = [move for move in moves if move not in instead] or list(moves)
        traits = {name for move in decision for name, holds in traits_of(move, here, words).items() if holds}
        verbs_before = {move.verb for step in failure.steps[:lost] for move in moves_of(step)}
        after = (move for step in success.steps[won + 1 :] for move in moves_of(step))
        onward = next((move for move in after if move.verb not in VALUES), None)
    return Features(
        constraints=len(CONSTRAINT.findall(text)),
        numbers=len(re.findall(r"\d+", text)),
        asks=bool(ASKS.search(text)),
        several=bool(SEVERAL.search(text)),
        ended=failure.ended,
        declared_success=failure.declared_success,
        blocked=any(map(is_blocked, seen)),
        errors=sum(bool(result.error) for step in failure.steps for result in step.results),
        unreadable=sum(bool(step.parse_failure) + step.browser_restarts for step in failure.steps),
        repeated_searches=max(0, searches - 1),
        decision=tuple(decision),
        instead=tuple(instead),
        leads_to_link=onward is not None and onward.tag == "a",
        read_before=not verbs_before.isdisjoint(move.verb for move in decision),
        traits=frozenset(traits),
    )


def say(moves: Iterable[Move]) -> str:
    """Return moves in words."""
    return ", then ".join(
        " ".join(filter(None, (move.verb, repr(move.label) if move.label else move.tag, move.value)))
        for move in moves
    )


def features_text(found: Features) -> str:
    """Return the features as lines for the judge."""
    return (
        f"conditions in the task: {found.constraints}; numbers: {found.numbers}; asks: {found.asks}\n"
        f"failed run: ended {found.ended}, declared success {found.declared_success}, "
        f"blocked page {found.blocked}, failed actions {found.errors}, unusable answers {found.unreadable}, "
        f"repeated searches {found.repeated_searches}\n"
        f"where the runs part, the successful run: {say(found.decision) or 'nothing'}\n"
        f"and the failed run: {say(found.instead) or 'nothing'}\n"
    )


def rule_label(found: Features) -> Label:
    """Return the rules' label: each cue votes, the mode with most votes wins, the first of them among equals.

    The cues are about the decision where the runs part and about how the failed run ended. The confidence is
    the mode's share of the votes.
    """
    verbs, traits = {move.verb for move in found.decision}, found.traits
    chose = any(
        a.verb == b.verb and a.tag == b.tag and a.verb in (CLICK, *VALUES)
        for a in found.decision
        for b in found.instead
    )
    sets_value = not verbs.isdisjoint(VALUES)
    narrows = found.leads_to_link and verbs == {SELECT}
    looks = "looks for something" in traits and not narrows
    finishes = any(move.verb == "done" for move in found.instead)
    presses = any(move.verb in (CLICK, "send_keys") and move.tag != "a" for move in found.decision)
    ends = presses and "brings to the end" in traits
    reads = found.asks and not sets_value and not ends
    votes = {
        "obstruction": 4 * found.blocked,
        "runtime": 4 * (found.ended in BROKEN_ENDS) + 2 * (found.unreadable > 1),
        "boundary": 3 * ("concerns an account" in traits),
        "date": 3 * ("concerns time" in traits),
        "discovery": 3 * looks + 2 * (found.repeated_searches > 1),
        "controls": 3 * (sets_value and found.leads_to_link and not looks),
        "omission": 4 * (reads and finishes and found.several and found.read_before),
        "evidence": 3 * (reads and finishes) + (reads and found.ended == "done"),
        "endpoint": 3 * ends,
        "constraint": 3 * (chose and not ends) + 2 * (sets_value and "chooses what the task names" in traits),
        "interaction": 2 * (found.ended in STUCK_ENDS) + (found.errors > 0) + 1,
    }
    best = max(votes, key=votes.__getitem__)
    return Label(best, round(votes[best] / sum(votes.values()), 3), "rule")
