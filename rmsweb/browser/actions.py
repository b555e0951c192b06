"""Actions: one table of what the agent may do, and the total parser of its answers.

Purpose: the schema that the prompt shows is the table: `ACTIONS` is read from it, and drives parsing,
validation, canonical text and execution. Names, parameters, types and defaults mirror Browser Use 0.7.10, so
that a policy trained here can be served behind it.

ours: the web search is called `search_engine` as in the paper's Table 4 (no Browser Use release has that
name); `search` and `search_google` parse to it. ours: a `done` without `success` parses, because Table 4 has
a reward level for it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rmsweb.records import Action, AgentOutput, ParseFailure

MAX_ACTIONS_PER_STEP = 10
REQUIRED = object()  # the default of a parameter without one

# One action a line, with the types and defaults of its parameters, as the prompt shows them.
SCHEMA = """\
- search_engine(query: str, engine: str = "duckduckgo"): search the web; engine is duckduckgo, google, bing or a URL with {query}
- go_to_url(url: str, new_tab: bool = false): open a URL
- go_back(): go back in the tab's history
- wait(seconds: int = 3): wait, at most 30 seconds
- click_element_by_index(index: int, while_holding_ctrl: bool|null = null): click an element; with ctrl a link opens in a new tab
- input_text(index: int, text: str, clear_existing: bool = true): type into a field; clear_existing false appends
- upload_file_to_element(index: int, path: str): choose a file for a file field
- switch_tab(tab_id: str): bring a tab to the front
- close_tab(tab_id: str): close a tab
- extract_structured_data(query: str, extract_links: bool, start_from_char: int = 0): read the whole page for an answer to the query
- scroll(down: bool, num_pages: float, frame_element_index: int|null = null): scroll the page, or the scrollable element of that index
- send_keys(keys: str): press keys, such as Enter or Control+a
- scroll_to_text(text: str): scroll to a text of the page
- get_dropdown_options(index: int): list the options of a dropdown
- select_dropdown_option(index: int, text: str): choose an option by its text
- write_file(file_name: str, content: str, append: bool = false, trailing_newline: bool = true, leading_newline: bool = false): write a file of your own
- replace_file_str(file_name: str, old_str: str, new_str: str): replace text in a file of your own
- read_file(file_name: str): read a file
- execute_js(code: str): run JavaScript in the page
- done(text: str, success: bool, files_to_display: list = []): finish: the answer, and whether the task was fully done
"""  # noqa: E501

# What the schema does not show.
_PASSIVE = {"go_back", "wait", "scroll"}
_CHANGE_NOTHING = _PASSIVE | {
    "scroll_to_text",
    "get_dropdown_options",
    "write_file",
    "replace_file_str",
    "read_file",
}
_MINIMA = {
    "click_element_by_index.index": 1,
    "input_text.index": 0,
    "get_dropdown_options.index": 1,
    "select_dropdown_option.index": 1,
    "extract_structured_data.start_from_char": 0,
}
_LENGTHS = {"tab_id": 4}
_OTHER_NAMES = {
    "engine": "search_engine",
    "while_holding_ctrl": "ctrl",
    "clear_existing": "clear",
    "num_pages": "pages",
    "frame_element_index": "index",
}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: type, default (or REQUIRED), bounds, and the other names it is known by."""

    name: str
    kind: str  # str, int, float, bool or list
    default: Any
    minimum: int | None
    length: int | None
    optional: bool  # None is a value
    aliases: tuple[str, ...]

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One action.

    `changes_state`: it changes the browser, finishes or extracts. `passive`: it only waits, scrolls or goes
    back.
    """

    name: str
    params: tuple[ParamSpec, ...]
    changes_state: bool
    passive: bool


def _read_parameter(action: str, text: str) -> ParamSpec:
    """Read `name: kind`, `name: kind = default` or `name: kind|null = null` of the schema."""
    name, kind, default = re.fullmatch(r"(\w+): ([\w|]+)(?: = (.+))?", text).groups()  # type: ignore[union-attr]
    value = json.loads(default) if default else REQUIRED
    return ParamSpec(
        name=name,
        kind=kind.removesuffix("|null"),
        default=() if value == [] else value,
        minimum=_MINIMA.get(f"{action}.{name}"),
        length=_LENGTHS.get(name),
        optional=value in (None, []),
        aliases=(_OTHER_NAMES[name],) if name in _OTHER_NAMES else (),
    )


def _read_schema() -> Iterator[ActionSpec]:
    for name, params in re.findall(r"^- (\w+)\((.*?)\): ", SCHEMA, re.MULTILINE):
        parts = params.split(", ") if params else ()
        specs = tuple(_read_parameter(name, part) for part in parts)
        yield ActionSpec(name, specs, name not in _CHANGE_NOTHING, name in _PASSIVE)


ACTIONS = {spec.name: spec for spec in _read_schema()}

# Other name -> (canonical name, parameters that the other name implies).
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "search": ("search_engine", {}),
    "search_google": ("search_engine", {"engine": "google"}),
    "navigate": ("go_to_url", {}),
    "click": ("click_element_by_index", {}),
    "input": ("input_text", {}),
    "upload_file": ("upload_file_to_element", {}),
    "switch": ("switch_tab", {}),
    "close": ("close_tab", {}),
    "extract": ("extract_structured_data", {"extract_links": False}),
    "find_text": ("scroll_to_text", {}),
    "dropdown_options": ("get_dropdown_options", {}),
    "select_dropdown": ("select_dropdown_option", {}),
    "replace_file": ("replace_file_str", {}),
    "evaluate": ("execute_js", {}),
}
MAY_BE_MISSING = {("done", "success")}
OUTPUT_KEYS = ("thinking", "evaluation_previous_goal", "memory", "next_goal")

# ---------------------------------------------------------------------------------------------------- parsing


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (lambda value: isinstance(value, int), "an integer"),
    "float": (
        lambda value: isinstance(value, (int, float)) and not abs(value) > 1e6,
        "a number up to a million",
    ),
    "bool": (lambda value: True, "true or false"),
    "list": (
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "a list of strings",
    ),
    "str": (lambda value: isinstance(value, str), "a string"),
}


def _integer(value: Any) -> Any:
    """Return "3" and 3.0 as 3, anything else as it is."""
    if isinstance(value, str) and len(value) < 10 and re.fullmatch(r"\s*[0-9]+\s*", value):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _convert(spec: ParamSpec, value: Any) -> Any:
    """Return a parameter's typed value; ValueError says why the JSON value is none. A bool is no number."""
    if value is None and spec.optional:
        return None
    if spec.kind == "int":
        value = _integer(value)
    fits, words = _CHECKS[spec.kind]
    if isinstance(value, bool) != (spec.kind == "bool") or not fits(value):
        raise ValueError(f"{spec.name} is not {words}")
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError(f"{spec.name} is below {spec.minimum}")
    if spec.length is not None and len(value) != spec.length:
        raise ValueError(f"{spec.name} has not {spec.length} characters")
    return float(value) if spec.kind == "float" else value


def _parse_action(obj: Any) -> tuple[Action, int]:
    """Return an action and the number of unknown parameters that were left out."""
    if not isinstance(obj, dict) or len(obj) != 1:
        raise ValueError("an action is an object with exactly one key")
    ((given, params),) = obj.items()
    name, implied = ALIASES.get(given, (given, {}))
    if name not in ACTIONS:
        raise ValueError(f"unknown action {given[:40]!r}")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise ValueError(f"the parameters of {given} are not an object")
    found, known = dict(implied), set()
    for spec in ACTIONS[name].params:
        names = [key for key in (spec.name, *spec.aliases) if key in params]
        if len(names) > 1:
            raise ValueError(f"{given}: {spec.name} is given twice")
        if names:
            found[spec.name] = _convert(spec, params[names[0]])
            known.add(names[0])
        elif spec.required and spec.name not in found and (name, spec.name) not in MAY_BE_MISSING:
            raise ValueError(f"{given} lacks {spec.name}")
    return Action(name=name, params=found), len(params.keys() - known)


def parse_action(obj: Any) -> Action:
    """Return the Action of a JSON action, by its name or an alias; ValueError says what is wrong.

    >>> parse_action({"click": {"index": "3", "ctrl": True}})
    Action(name='click_element_by_index', params={'index': 3, 'while_holding_ctrl': True})
    """
    return _parse_action(obj)[0]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique_keys)


_SPACE = re.compile(r"[ \t\r\n]*")


class _Member(NamedTuple):
    """A member of a JSON object, with the place of its value in the text."""

    key: str
    value: Any
    start: int
    end: int


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _members(text: str, at: int) -> tuple[list[_Member], int]:
    """Return the members of the JSON object that starts at `at`, and its end.

    ValueError (or RecursionError) if there is no such object.
    """
    members: list[_Member] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError(f"no key and colon at character {at}")
        start = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, start)
        members.append(_Member(key, value, start, at))
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        if text[at : at + 1] != ",":
            raise ValueError(f"no comma at character {at}")
        at = _skip(text, at + 1)


def _objects(text: str) -> Iterator[list[_Member]]:
    """Yield every JSON object of the text at the top level.

    At most 64 places are tried, so hostile texts stay cheap.
    """
    at, tries = text.find("{"), 0
    while at >= 0 and tries < 64:
        tries += 1
        try:
            members, end = _members(text, at)
            yield members
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def _answer(text: str) -> list[_Member] | ParseFailure:
    """Return the one object of the text that has an `action`."""
    found = [members for members in _objects(text) if any(member.key == "action" for member in members)]
    if len(found) != 1:
        return ParseFailure(
            reason=f"found {len(found)} JSON objects with an action, expected one",
            position=max(text.find("{"), 0),
        )
    keys = [member.key for member in found[0]]
    if len(set(keys)) != len(keys):
        return ParseFailure(reason="a key stands twice", position=found[0][-1].start)
    return found[0]


def parse_agent_output(text: str) -> AgentOutput | ParseFailure:
    """Return what any text says, or the reason why it does not parse.

    Fences and text around one JSON object are accepted; nothing is guessed.

    >>> parse_agent_output('ok: {"memory":"m","action":[{"go_back":{}}]}').actions
    (Action(name='go_back', params={}),)
    >>> parse_agent_output("no json").reason
    'found 0 JSON objects with an action, expected one'
    """
    members = _answer(text)
    if isinstance(members, ParseFailure):
        return members
    values = {member.key: member.value for member in members}
    start = next(member.start for member in members if member.key == "action")
    fields: dict[str, str | None] = {}
    for key in OUTPUT_KEYS:
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            return ParseFailure(reason=f"{key} is not a string", position=start)
        fields[key] = value
    if not isinstance(values["action"], list) or not values["action"]:
        return ParseFailure(reason="action is not a list with at least one action", position=start)
    try:
        parsed = [_parse_action(item) for item in values["action"]]
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate could not be written to a record
    except (ValueError, RecursionError) as error:
        return ParseFailure(reason=str(error)[:200], position=start)
    return AgentOutput(
        actions=tuple(action for action, _ in parsed),
        thinking=fields["thinking"],
        evaluation_previous_goal=fields["evaluation_previous_goal"] or "",
        memory=fields["memory"] or "",
        next_goal=fields["next_goal"] or "",
        present_keys=tuple(values),
        ignored_params=sum(count for _, count in parsed),
    )


def action_span(text: str) -> tuple[int, int] | None:
    """Return the character span [start, end) of the value of "action", brackets included.

    That is the set A of the salvage anchor (Eq. 3). None if the text does not parse.

    >>> text = '{"memory":"m","action":[{"go_back":{}}]}'
    >>> text[slice(*action_span(text))]
    '[{"go_back":{}}]'
    """
    members = _answer(text)
    if isinstance(members, ParseFailure) or isinstance(parse_agent_output(text), ParseFailure):
        return None
    return next((member.start, member.end) for member in members if member.key == "action")


# --------------------------------------------------------------------------------------------- canonical text


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _canonical(action: Action) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for spec in ACTIONS[action.name].params:
        if spec.name in action.params and (
            spec.required or _plain(action.params[spec.name]) != _plain(spec.default)
        ):
            params[spec.name] = _plain(action.params[spec.name])
    return {action.name: params}


def canonical_action(action: Action) -> str:
    """Return the canonical JSON of one action: schema order, compact, without parameters at their default.

    >>> canonical_action(parse_action({"input": {"clear": True, "text": "a", "index": 2}}))
    '{"input_text":{"index":2,"text":"a"}}'
    """
    return _compact(_canonical(action))


def canonical_text(output: AgentOutput, *, thinking: bool = True) -> str:
    """Return the training target: keys and parameters in schema order, compact separators, UTF-8 kept."""
    head: dict[str, Any] = {"thinking": output.thinking or ""} if thinking else {}
    head |= {key: getattr(output, key) for key in OUTPUT_KEYS[1:]}
    return _compact(head | {"action": [_canonical(action) for action in output.actions]})


def with_defaults(action: Action) -> dict[str, Any]:
    """Return all parameters for execution: those given, the defaults of the others.

    A `done` without `success` counts as False.
    """
    params = {spec.name: action.params.get(spec.name, spec.default) for spec in ACTIONS[action.name].params}
    return {key: False if value is REQUIRED else _plain(value) for key, value in params.items()}
