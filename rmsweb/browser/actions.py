"""Actions: one table of what the agent may do, and the total parser of its answers.

Purpose: the table `ACTIONS` drives parsing, validation, canonical text, the schema text of the prompt, and
execution. Names, parameters, types and defaults mirror Browser Use 0.7.10, so that a policy trained here can
be served behind it.

ours: the web search is called `search_engine` as in the paper's Table 4 (no Browser Use release has that
name); `search` and
`search_google` parse to it. ours: a `done` without `success` parses, because Table 4 has a reward level for
it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rmsweb.records import Action, AgentOutput, ParseFailure

MAX_ACTIONS_PER_STEP = 10
Kind = Literal["str", "int", "float", "bool", "list"]
REQUIRED = object()  # stands where a parameter has no default


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: type, default (or REQUIRED), bounds, and the other names it is known by."""

    name: str
    kind: Kind
    default: Any = REQUIRED
    minimum: int | None = None
    length: int | None = None
    optional: bool = False  # None is a value
    aliases: tuple[str, ...] = ()

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
    summary: str
    changes_state: bool = True
    passive: bool = False


P = ParamSpec
_INDEX = P("index", "int", minimum=1)
_SPECS = (
    ActionSpec(
        "search_engine",
        (P("query", "str"), P("engine", "str", "duckduckgo", aliases=("search_engine",))),
        "search the web; engine is duckduckgo, google, bing or a URL with {query}",
    ),
    ActionSpec("go_to_url", (P("url", "str"), P("new_tab", "bool", False)), "open a URL"),
    ActionSpec("go_back", (), "go back in the tab's history", passive=True, changes_state=False),
    ActionSpec(
        "wait", (P("seconds", "int", 3),), "wait, at most 30 seconds", passive=True, changes_state=False
    ),
    ActionSpec(
        "click_element_by_index",
        (_INDEX, P("while_holding_ctrl", "bool", None, optional=True, aliases=("ctrl",))),
        "click an element; with ctrl a link opens in a new tab",
    ),
    ActionSpec(
        "input_text",
        (
            P("index", "int", minimum=0),
            P("text", "str"),
            P("clear_existing", "bool", True, aliases=("clear",)),
        ),
        "type into a field; clear_existing false appends",
    ),
    ActionSpec(
        "upload_file_to_element", (P("index", "int"), P("path", "str")), "choose a file for a file field"
    ),
    ActionSpec("switch_tab", (P("tab_id", "str", length=4),), "bring a tab to the front"),
    ActionSpec("close_tab", (P("tab_id", "str", length=4),), "close a tab"),
    ActionSpec(
        "extract_structured_data",
        (P("query", "str"), P("extract_links", "bool"), P("start_from_char", "int", 0, minimum=0)),
        "read the whole page for an answer to the query",
    ),
    ActionSpec(
        "scroll",
        (
            P("down", "bool"),
            P("num_pages", "float", aliases=("pages",)),
            P("frame_element_index", "int", None, optional=True, aliases=("index",)),
        ),
        "scroll the page, or the scrollable element of that index",
        passive=True,
        changes_state=False,
    ),
    ActionSpec("send_keys", (P("keys", "str"),), "press keys, such as Enter or Control+a"),
    ActionSpec("scroll_to_text", (P("text", "str"),), "scroll to a text of the page", changes_state=False),
    ActionSpec("get_dropdown_options", (_INDEX,), "list the options of a dropdown", changes_state=False),
    ActionSpec("select_dropdown_option", (_INDEX, P("text", "str")), "choose an option by its text"),
    ActionSpec(
        "write_file",
        (
            P("file_name", "str"),
            P("content", "str"),
            P("append", "bool", False),
            P("trailing_newline", "bool", True),
            P("leading_newline", "bool", False),
        ),
        "write a file of your own",
        changes_state=False,
    ),
    ActionSpec(
        "replace_file_str",
        (P("file_name", "str"), P("old_str", "str"), P("new_str", "str")),
        "replace text in a file of your own",
        changes_state=False,
    ),
    ActionSpec("read_file", (P("file_name", "str"),), "read a file", changes_state=False),
    ActionSpec("execute_js", (P("code", "str"),), "run JavaScript in the page"),
    ActionSpec(
        "done",
        (P("text", "str"), P("success", "bool"), P("files_to_display", "list", (), optional=True)),
        "finish: the answer, and whether the task was fully done",
    ),
)
ACTIONS: dict[str, ActionSpec] = {spec.name: spec for spec in _SPECS}

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


def _convert(spec: ParamSpec, value: Any) -> Any:
    """JSON value -> typed parameter, or ValueError with the reason.

    A bool is not an integer; "3" is an index.
    """
    if value is None and spec.optional:
        return None
    if spec.kind == "int":
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 10:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{spec.name} is not an integer")
        if spec.minimum is not None and value < spec.minimum:
            raise ValueError(f"{spec.name} is below {spec.minimum}")
    elif spec.kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e6:
            raise ValueError(f"{spec.name} is not a number up to a million")
        value = float(value)
    elif spec.kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{spec.name} is not true or false")
    elif spec.kind == "list":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{spec.name} is not a list of strings")
        value = list(value)
    elif not isinstance(value, str):
        raise ValueError(f"{spec.name} is not a string")
    if spec.length is not None and len(value) != spec.length:
        raise ValueError(f"{spec.name} has not {spec.length} characters")
    return value


def _parse_action(obj: Any) -> tuple[Action, int]:
    """One JSON action -> (Action, number of unknown parameters left out)."""
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
    """A JSON action, by its name or an alias -> Action; ValueError says what is wrong with it.

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
_SPACE = " \t\r\n"
_Member = tuple[str, Any, int, int]  # key, value, start and end of the value in the text


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _members(text: str, at: int) -> tuple[list[_Member], int]:
    """Members of the JSON object that starts at `at`, and its end; ValueError (or RecursionError) where there
    is none.
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
        members.append((key, value, start, at))
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return members, at + 1
        if text[at : at + 1] != ",":
            raise ValueError(f"no comma at character {at}")
        at = _skip(text, at + 1)


def _objects(text: str) -> Iterator[list[_Member]]:
    """Every JSON object that stands in the text at the top level.

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
    """The one object of the text that has an `action`."""
    found = [members for members in _objects(text) if any(member[0] == "action" for member in members)]
    if len(found) != 1:
        return ParseFailure(
            reason=f"found {len(found)} JSON objects with an action, expected one",
            position=max(text.find("{"), 0),
        )
    keys = [member[0] for member in found[0]]
    if len(set(keys)) != len(keys):
        return ParseFailure(reason="a key stands twice", position=found[0][-1][2])
    return found[0]


def parse_agent_output(text: str) -> AgentOutput | ParseFailure:
    """Any text -> AgentOutput, or ParseFailure with the reason. Accepts fences and text around one JSON
    object; guesses nothing.

    >>> parse_agent_output('ok: {"memory":"m","action":[{"go_back":{}}]}').actions
    (Action(name='go_back', params={}),)
    >>> parse_agent_output("no json").reason
    'found 0 JSON objects with an action, expected one'
    """
    members = _answer(text)
    if isinstance(members, ParseFailure):
        return members
    values = {key: value for key, value, _, _ in members}
    start = next(member[2] for member in members if member[0] == "action")
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
    """Character span [start, end) of the value of "action", brackets included: the set A of the salvage
    anchor (Eq. 3). None where the text does not parse.

    >>> text = '{"memory":"m","action":[{"go_back":{}}]}'
    >>> text[slice(*action_span(text))]
    '[{"go_back":{}}]'
    """
    members = _answer(text)
    if isinstance(members, ParseFailure) or isinstance(parse_agent_output(text), ParseFailure):
        return None
    return next((start, end) for key, _, start, end in members if key == "action")


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
    """Canonical JSON of one action: schema order, compact, parameters equal to their default left out.

    >>> canonical_action(parse_action({"input": {"clear": True, "text": "a", "index": 2}}))
    '{"input_text":{"index":2,"text":"a"}}'
    """
    return _compact(_canonical(action))


def canonical_text(output: AgentOutput, *, thinking: bool = True) -> str:
    """The training target: keys and parameters in schema order, compact separators, UTF-8 kept."""
    head: dict[str, Any] = {"thinking": output.thinking or ""} if thinking else {}
    head |= {key: getattr(output, key) for key in OUTPUT_KEYS[1:]}
    return _compact(head | {"action": [_canonical(action) for action in output.actions]})


def with_defaults(action: Action) -> dict[str, Any]:
    """All parameters for execution: those given, the defaults of the others.

    A `done` without `success` counts as False.
    """
    params = {spec.name: action.params.get(spec.name, spec.default) for spec in ACTIONS[action.name].params}
    return {key: False if value is REQUIRED else _plain(value) for key, value in params.items()}


def _signature(spec: ParamSpec) -> str:
    kind = spec.kind + ("|null" if spec.optional and spec.default is None else "")
    return f"{spec.name}: {kind}" + ("" if spec.required else f" = {_compact(_plain(spec.default))}")


def schema_text() -> str:
    """The list of actions for the prompt, one a line."""
    lines = (
        f"- {spec.name}({', '.join(_signature(param) for param in spec.params)}): {spec.summary}"
        for spec in _SPECS
    )
    return "\n".join(lines) + "\n"
