"""The reward of an answer against the verified action of a state: Table 4, and soft-F1 for several actions.

Purpose: a polarized, action-semantic reward. One predicted action against one target action has a level: 1.0
exact, 0.7 core-correct, 0.3 right type but wrong key parameter, 0.0 wrong or invalid.

Place in the paper: section "Polarized step-level reward", App. H, Table 4.

Deviations:
1. `ours:` rules for the actions that Table 4 does not list, in the same four levels (table `RULES`).
2. `ours:` None, False and a missing flag are equal, and so are frame 0 and no frame; the engine of a search
   is ignored.
3. `ours:` a URL whose query contradicts a date of the target is another destination (0.3, not 0.7;
   `similarity.compare_urls`).
4. `ours:` an index that the prompt does not show is invalid (0.0, not 0.3), where the prompt's indices are
   known.
5. `ours:` the soft-F1 aligns in order (dynamic programming); passive actions and planning files weigh 0.5,
   all others 1.0.
6. `ours:` rewards are rounded to 1e-9, because an exact 0.55 comes out just below 0.55 in plain floats.

Known consequences of 5. It narrows contrast: with two target actions of equal weight, exact against 0.7 in
one of them is 1.0 against 0.85, whose sigma among eight rollouts is at most 0.080, so such a group never
passes the std gate. It can call a partly wrong step competent: one exact and one wrong key is 0.65, one of
two actions left out 0.667. Training logs the share of multi-action targets by gate outcome.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rmsweb.browser.actions import ACTIONS, REQUIRED, parse_agent_output
from rmsweb.records import Action, AgentOutput, ParseFailure
from rmsweb.similarity import compare_urls, texts_similar

EXACT, CORE, TYPE, WRONG = 1.0, 0.7, 0.3, 0.0  # Table 4
DIGITS = 9  # rewards are rounded to 1e-9

Comparison = Literal["equal", "text", "url"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an action's parameters count.

    A key that differs gives 0.3; a key that is only near, or another secondary parameter, gives 0.7.
    """

    keys: dict[str, Comparison] = field(default_factory=dict)
    secondary: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    # In the soft-F1: 1.0 changes the browser, finishes or extracts; 0.5 is passive or a planning file.
    weight: float = 1.0


RULES: dict[str, Rule] = {
    # Table 4
    "click_element_by_index": Rule(keys={"index": "equal"}, secondary=("while_holding_ctrl",)),
    "scroll": Rule(
        keys={"down": "equal", "frame_element_index": "equal"}, secondary=("num_pages",), weight=0.5
    ),
    "input_text": Rule(keys={"index": "equal", "text": "text"}, secondary=("clear_existing",)),
    "go_to_url": Rule(keys={"url": "url"}, secondary=("new_tab",)),
    "search_engine": Rule(keys={"query": "text"}, ignored=("engine",)),
    "switch_tab": Rule(keys={"tab_id": "equal"}),
    "close_tab": Rule(keys={"tab_id": "equal"}),
    # The flag `success` of done has levels of its own: _done_level.
    "done": Rule(secondary=("text", "files_to_display")),
    # ours: the rest of the schema
    "select_dropdown_option": Rule(keys={"index": "equal", "text": "text"}),
    "get_dropdown_options": Rule(keys={"index": "equal"}),
    "upload_file_to_element": Rule(keys={"index": "equal", "path": "equal"}),
    "send_keys": Rule(keys={"keys": "equal"}),
    "scroll_to_text": Rule(keys={"text": "text"}),
    "extract_structured_data": Rule(keys={"query": "text"}, secondary=("extract_links", "start_from_char")),
    "execute_js": Rule(keys={"code": "equal"}),
    "go_back": Rule(weight=0.5),
    "wait": Rule(secondary=("seconds",), weight=0.5),
    "write_file": Rule(
        keys={"file_name": "equal"},
        secondary=("content", "append", "trailing_newline", "leading_newline"),
        weight=0.5,
    ),
    "replace_file_str": Rule(keys={"file_name": "equal"}, secondary=("old_str", "new_str"), weight=0.5),
    "read_file": Rule(keys={"file_name": "equal"}, weight=0.5),
}
INDEX_PARAMS = ("index", "frame_element_index")  # they name an element of the prompt
_DEFAULTS = {
    name: {param.name: None if param.default is REQUIRED else param.default for param in spec.params}
    for name, spec in ACTIONS.items()
}


@dataclass(frozen=True, slots=True)
class Component:
    """One line of the breakdown: an aligned pair, or an action without a partner."""

    name: str
    target: int | None  # place in the target's list; None: predicted but not wanted
    predicted: int | None  # place in the predicted list; None: wanted but missing
    level: float
    weight: float
    why: str


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward in [0, 1], rounded to 1e-9, and what it is made of."""

    value: float
    components: tuple[Component, ...] = ()
    failure: str | None = None  # why the answer is invalid as a whole

    @property
    def explanation(self) -> str:
        """The breakdown in words."""
        parts = [f"{part.name}: {part.level:g}, {part.why}" for part in self.components]
        return f"{self.value:g} ({self.failure or '; '.join(parts)})"


def _value(action: Action, name: str) -> Any:
    """Return a parameter or its default; what is not set (None, an empty list) is False, as is frame 0."""
    value = action.params.get(name, _DEFAULTS[action.name][name])
    return False if value is None or value in ([], ()) else value


def _invalid_index(action: Action, prompt_indices: Collection[int] | None) -> int | None:
    """Return an index that the action uses although the prompt does not show it, else None."""
    if prompt_indices is None:
        return None
    for name in INDEX_PARAMS:
        index = action.params.get(name)
        is_page = name == "frame_element_index" and index == 0  # frame 0 is the page itself
        if index is not None and index not in prompt_indices and not is_page:
            return int(index)
    return None


def _done_level(predicted: Action, target: Action) -> tuple[float, str] | None:
    """Return the level of the success flag; None where it matches and the other parameters decide."""
    flags = predicted.params.get("success"), target.params.get("success")
    if flags[0] == flags[1]:
        return None
    return (TYPE, "success flag missing") if None in flags else (WRONG, "success flag mismatches")


_URL_LEVELS = {
    "same": (EXACT, "exact"),
    "query differs": (CORE, "matches in host and path, the query differs"),
    "date differs": (TYPE, "has another date"),
    "other": (TYPE, "is another destination"),
}


def _compare_key(comparison: Comparison, predicted: Any, target: Any) -> tuple[float, str]:
    """Return the level of one key parameter (1.0, 0.7 or 0.3), and what to say about it."""
    if comparison == "url":
        return _URL_LEVELS[compare_urls(target, predicted)]
    if predicted == target:
        return EXACT, "exact"
    if comparison == "text" and texts_similar(predicted, target):
        return CORE, "is similar"
    return TYPE, "differs"


def action_level(
    predicted: Action, target: Action, prompt_indices: Collection[int] | None = None
) -> tuple[float, str]:
    """Return the level of one action against one action (Table 4), and the reason in words.

    Args: predicted, target: parsed actions. prompt_indices: element indices that the prompt shows; None where
    they are not known.
    Returns: (level, reason), level in {0, 0.3, 0.7, 1}.

    >>> def click(index): return Action(name="click_element_by_index", params={"index": index})
    >>> action_level(click(19), click(18)), action_level(click(19), click(18), {18})
    ((0.3, 'index differs'), (0.0, 'index 19 is not in the prompt'))
    >>> def text(value): return Action(name="input_text", params={"index": 3, "text": value})
    >>> action_level(text("1000"), text("100")), action_level(text("New  York"), text("new york"))
    ((0.3, 'text differs'), (0.7, 'text is similar'))
    >>> def url(value): return Action(name="go_to_url", params={"url": value})
    >>> action_level(url("https://a.com/h?checkin=2026-05-02"), url("https://a.com/h?checkin=2026-05-01"))
    (0.3, 'url has another date')
    """
    if predicted.name != target.name:
        return WRONG, f"wrong action, found {predicted.name}"
    invalid = _invalid_index(predicted, prompt_indices)
    if invalid is not None:
        return WRONG, f"index {invalid} is not in the prompt"
    if target.name == "done" and (flag := _done_level(predicted, target)):
        return flag
    rule = RULES[target.name]
    level, why = EXACT, "exact"
    for name, comparison in rule.keys.items():
        found, said = _compare_key(comparison, _value(predicted, name), _value(target, name))
        if found < level:
            level, why = found, f"{name} {said}"
    other = [name for name in rule.secondary if _value(predicted, name) != _value(target, name)]
    if level == EXACT and other:
        level, why = CORE, f"{', '.join(other)} differs"
    return level, why


def align(levels: Sequence[Sequence[float]], weights: Sequence[float]) -> list[tuple[int, int]]:
    """Return the order-preserving alignment that maximises the weighted sum of levels.

    It is found by dynamic programming over prefixes of both lists.

    Args: levels[t][p]: level of predicted action p against target action t, 0 where the types differ.
    weights[t]: weight of target action t.
    Returns: pairs (t, p), both increasing, each with a level above 0.

    >>> align([[0.0, 1.0], [0.3, 0.0]], [1.0, 1.0])
    [(0, 1)]
    """
    num_predicted = len(levels[0]) if levels else 0
    best = [[0.0] * (num_predicted + 1) for _ in range(len(levels) + 1)]
    for t, row in enumerate(levels, 1):
        for p, level in enumerate(row, 1):
            best[t][p] = max(best[t - 1][p], best[t][p - 1], best[t - 1][p - 1] + weights[t - 1] * level)
    pairs: list[tuple[int, int]] = []
    t, p = len(levels), num_predicted
    while t and p:
        if best[t][p] == best[t - 1][p]:
            t -= 1
        elif best[t][p] == best[t][p - 1]:
            p -= 1
        else:
            t, p = t - 1, p - 1
            pairs.append((t, p))
    return pairs[::-1]


def soft_f1(
    predicted: Sequence[Action], target: Sequence[Action], prompt_indices: Collection[int] | None = None
) -> Reward:
    """Return the weighted soft-F1 of two action lists (App. H).

        s = sum of weight * level over the aligned pairs
        precision = s / W_predicted,    recall = s / W_target,    F1 = 2 s / (W_predicted + W_target)

    Partners have the same type, hence the same weight on both sides. One action against one action gives
    exactly its level.

    Args: predicted, target: at least one action each.

    >>> click, back = Action(name="click_element_by_index", params={"index": 1}), Action(name="go_back")
    >>> soft_f1([click], [click, click]).value, soft_f1([back], [back]).value
    (0.666666667, 1.0)
    """
    if len(predicted) == len(target) == 1:  # the common case
        level, why = action_level(predicted[0], target[0], prompt_indices)
        return Reward(level, (Component(target[0].name, 0, 0, level, RULES[target[0].name].weight, why),))
    judged = [[action_level(p, t, prompt_indices) for p in predicted] for t in target]
    weights = [RULES[action.name].weight for action in target]
    pairs = align([[level for level, _ in row] for row in judged], weights)
    components = [
        Component(target[t].name, t, p, judged[t][p][0], weights[t], judged[t][p][1]) for t, p in pairs
    ]
    found, matched = {t for t, _ in pairs}, {p for _, p in pairs}
    components += [
        Component(action.name, t, None, WRONG, weights[t], "missing")
        for t, action in enumerate(target)
        if t not in found
    ]
    components += [
        Component(action.name, None, p, WRONG, RULES[action.name].weight, "not wanted")
        for p, action in enumerate(predicted)
        if p not in matched
    ]
    total = sum(weights) + sum(RULES[action.name].weight for action in predicted)
    earned = sum(part.weight * part.level for part in components)
    return Reward(round(2 * earned / total, DIGITS), tuple(components))


def score(
    response: str | AgentOutput | ParseFailure,
    target: str | AgentOutput | ParseFailure,
    prompt_indices: Collection[int] | None = None,
) -> Reward:
    """Return the reward of an answer, in [0, 1]; 0 with a reason where the answer does not parse.

    Args: response: the policy's text, whatever it is, or what the parser made of it. target: the verified
    answer, text or parsed. prompt_indices: element indices that the cut prompt really shows; None where they
    are not known.
    Raises: ValueError where the target does not parse.

    >>> score('{"action":[{"go_back":{}}]}', '{"action":[{"wait":{"seconds":5}}]}').explanation
    '0 (wait: 0, wrong action, found go_back)'
    >>> score("I would click.", '{"action":[{"go_back":{}}]}').value
    0.0
    """
    wanted = parse_agent_output(target) if isinstance(target, str) else target
    if isinstance(wanted, ParseFailure):
        raise ValueError(f"the target of a state must be a valid answer: {wanted.reason}")
    found = parse_agent_output(response) if isinstance(response, str) else response
    if isinstance(found, ParseFailure):
        return Reward(WRONG, failure=f"no valid answer: {found.reason}")
    return soft_f1(found.actions, wanted.actions, prompt_indices)
