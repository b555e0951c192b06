"""Data contracts: every record that is written to disk or handed from one room to another, and its JSONL
form.

Purpose: one owner for the shape of the data. A record is a frozen dataclass; a file is UTF-8 JSON Lines whose
first line is a header `{"schema_version": 1, "kind": "Trajectory"}` and whose other lines are one record
each. Nothing here imports the package.

Image paths are relative to the run folder that holds the file, so a run folder can be copied to another
machine as it is.
"""

import hashlib
import json
import os
import threading
import types
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

SCHEMA_VERSION = 1

Split = Literal["train", "dev", "held-out"]
PartTag = Literal[
    "system", "schema", "task", "history", "state", "element", "read_state", "reflection", "warning"
]
Ended = Literal["done", "max_steps", "stalled", "parse_failures", "environment"]
Verdict = Literal["success", "not_success", "unknown", "unparsed"]


class RecordError(ValueError):
    """A file that does not hold what it should: the message names file, line, what was found and what was
    expected.
    """


# -------------------------------------------------------------------------------------- messages and policies


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A piece of a message. Pieces of one message are joined without a separator."""

    tag: PartTag
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A picture on disk; `path` is relative to the run folder, `sha256` is of the file's bytes, sizes are in
    pixels.

    `boxes` are (index, x, y, width, height) in pixels, to be drawn when the picture is read; the file never
    holds them.
    """

    path: str
    sha256: str
    width: int
    height: int
    boxes: tuple[tuple[int, float, float, float, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[Text | Image, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a policy or an endpoint answered."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    model: str = ""


class Policy(Protocol):
    """Messages in, text out.

    A checkpoint behind `engine.serve` and an endpoint behind `llm` are the same thing to `agent`.
    """

    async def __call__(
        self, messages: list[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply: ...


# --------------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the agent is asked to do.

    Never the answer or the data of its check: those stay in the environment.
    """

    task_id: str
    text: str
    start_url: str | None
    split: Split
    benchmark: str
    category: str | None = None
    environment: dict[str, Any] = field(
        default_factory=dict
    )  # arguments of the environment (site, template, seed, ...)


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One line of the state: an element, or a text node (tag `#text`)."""

    index: int | None  # what the agent may name in an action; None where it may not
    node_key: str  # identity of the DOM node within its document, stable between observations
    tag: str
    role: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""  # accessible name of a control, or the text of a #text line
    value: str | None = None  # the live property, not the attribute; never of a password field
    options: tuple[str, ...] = ()  # texts of a <select>'s options
    box: tuple[float, float, float, float] | None = (
        None  # x, y, width, height in CSS px, relative to the viewport
    )
    in_viewport: bool = True
    is_new: bool = False  # not in the previous observation of the same document
    depth: int = 0  # number of displayed ancestors = tabs before the line
    marker: Literal["scroll", "iframe", "shadow-open", "shadow-closed"] | None = None
    scroll_pages: tuple[float, float] | None = None  # pages above and below, of a scrollable element or frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Tab:
    """One open tab; ids have four characters and are deterministic within a session."""

    tab_id: str
    url: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The browser state before a step."""

    url: str
    title: str
    tabs: tuple[Tab, ...]
    active_tab: str
    viewport: tuple[int, int]  # width, height in CSS px
    scroll_y: float = 0.0
    pages_above: float = 0.0
    pages_below: float = 0.0
    page_stats: dict[str, int] = field(default_factory=dict)
    nodes: tuple[Element, ...] = ()
    screenshot: Image | None = (
        None  # without index boxes; boxes are drawn when a prompt or a report asks for them
    )
    dialogs: tuple[str, ...] = ()
    downloads: tuple[str, ...] = ()
    is_pdf: bool = False
    warnings: tuple[str, ...] = ()
    fingerprint: str = (
        ""  # sha256 of url, tabs, (tag, text, value, checked) and scroll; no indices, stars or time
    )
    observe_s: float = 0.0


# ------------------------------------------------------------------------------------------- the agent's turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One browser action.

    `params` holds the parameters that were really present, under their canonical names.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOutput:
    """A parsed answer. `present_keys` are the top-level keys that stood in the text."""

    actions: tuple[Action, ...]
    thinking: str | None = None
    evaluation_previous_goal: str = ""
    memory: str = ""
    next_goal: str = ""
    present_keys: tuple[str, ...] = ()
    ignored_params: int = 0  # unknown parameters that the parser left out


@dataclass(frozen=True, kw_only=True, slots=True)
class ParseFailure:
    """Why a text is not an answer, and at which character that showed."""

    reason: str
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """What an extraction read: the query, where the page text lies, and the answer."""

    query: str
    page_text_path: str
    page_text_sha256: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionResult:
    """What one action did. A failure is data: `error` says what was wrong in words the agent can use."""

    error: str | None = None
    message: str = ""  # what stands in the history of later prompts
    content: str | None = None  # something to read (extraction, file, options)
    show_once: bool = False  # `content` is shown in the next state only
    is_done: bool = False
    success: bool | None = None
    opened_tab: str | None = None
    extraction: Extraction | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One policy call."""

    seed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One turn: what was seen, what was answered, what came of it.

    Never a reflection. `results` is as long as the executed actions.
    """

    number: int  # from 1
    observation: Observation
    response_text: str
    output: AgentOutput | None
    parse_failure: ParseFailure | None = None
    results: tuple[ActionResult, ...] = ()
    usage: Usage = field(default_factory=Usage)
    browser_restarts: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a trajectory comes from."""

    script: str  # collect or evaluate
    policy: str  # model name or checkpoint path as given
    checkpoint_sha256: str | None = None
    arm: str = ""
    round: int = 1
    run: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One attempt at a task."""

    trajectory_id: str
    task: Task
    source: Source
    steps: tuple[Step, ...]
    final_text: str | None
    declared_success: bool | None  # the success flag of an executed `done`; None where none was executed
    ended: Ended
    guide_in: str | None = None
    guide_out: str | None = None
    usage: Usage = field(default_factory=Usage)  # sums of the steps' tokens
    prompt_config: str = ""  # hash of the PromptConfig
    error: str | None = None  # what broke, where ended == "environment"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict on a trajectory; in its own file, so that judging again rewrites nothing."""

    trajectory_id: str
    judge: str  # kind: check, outcome, webjudge, ...
    model: str
    verdict: Verdict
    reason: str = ""
    prompt_sha256: str = ""
    raw: str = ""
    usage: Usage = field(default_factory=Usage)


# ------------------------------------------------------------------------------------------- training records


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One supervised example: the rendered prompt and the canonical answer."""

    sample_id: str
    kind: Literal["action", "extraction"]
    task_id: str
    trajectory_id: str
    step: int
    split: Split
    host: str
    messages: tuple[Message, ...]
    target_text: str
    action_span: tuple[int, int] | None  # characters of target_text; None for an extraction
    prompt_indices: tuple[int, ...]  # element indices that really stand in the cut prompt
    prompt_config: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The miner's scores of one candidate, each in [0, 1]."""

    state: float
    action: float
    category: float
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MinedState(StepSample):
    """One RL prompt with its verified answer. Holds nothing of the other branch."""

    state_id: str
    category: str
    confidence: float
    label_source: Literal["judge", "review", "rule"]
    scores: Scores
    pair_kind: Literal["success-failure", "short-long"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRow:
    """Why a state was mined, both branches beside each other; never read by training."""

    state_id: str
    task_id: str
    task_text: str
    category: str
    confidence: float
    label_source: str
    scores: Scores
    success_trajectory: str
    success_step: int
    success_url: str
    success_actions: tuple[Action, ...]
    failure_trajectory: str
    failure_step: int
    failure_url: str
    failure_actions: tuple[Action, ...]
    success_screenshot: Image | None = None
    failure_screenshot: Image | None = None
    why: str = ""


# --------------------------------------------------------------------------------------------- JSON and files

R = TypeVar("R")


def to_json(value: Any) -> Any:
    """Turn records, paths and containers into plain JSON values (dicts, lists, strings, numbers, None)."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def dumps(value: Any) -> str:
    """One line of JSON for a record or a plain value: compact, UTF-8 kept, keys in field order."""
    return json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _required(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Plain JSON value -> what the type hint says; raises RecordError naming the place."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        if len(options) > 1 and isinstance(
            value, dict
        ):  # a union of records: the one that has all these fields
            options = [
                a for a in options if is_dataclass(a) and value.keys() <= _hints(typing.cast(Any, a)).keys()
            ] or options
        return _decode(options[0], value, where)
    if origin is Literal:
        if value not in args:
            raise RecordError(f"{where}: found {value!r}, expected one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise RecordError(f"{where}: found {value!r}, expected a list")
        hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(hints) != len(value):
            raise RecordError(f"{where}: found {len(value)} items, expected {len(hints)}")
        return tuple(
            _decode(h, item, f"{where}[{i}]") for i, (h, item) in enumerate(zip(hints, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: found {value!r}, expected an object")
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RecordError(f"{where}: found {value!r}, expected {hint.__name__}")
    return value


def from_json(cls: type[R], data: Any, where: str = "record") -> R:
    """JSON object -> record. Unknown fields are ignored (newer writers), missing ones and wrong types raise
    RecordError.

    >>> from_json(Tab, {"tab_id": "0001", "url": "http://a/", "title": "A"})
    Tab(tab_id='0001', url='http://a/', title='A')
    """
    if not isinstance(data, dict):
        raise RecordError(f"{where}: found {type(data).__name__}, expected an object for {cls.__name__}")
    missing = _required(typing.cast(Any, cls)) - data.keys()
    if missing:
        raise RecordError(f"{where}: {cls.__name__} lacks {', '.join(sorted(missing))}")
    hints = _hints(typing.cast(Any, cls))
    return cls(
        **{name: _decode(hints[name], data[name], f"{where}.{name}") for name in hints if name in data}
    )


def _header(cls: type) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, "kind": cls.__name__}) + "\n"


def read_records(path: Path, cls: type[R]) -> Iterator[R]:
    """Records of a JSONL file in file order; raises RecordError naming file and line, FileNotFoundError where
    there is none.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                raise RecordError(
                    f"{where}: not JSON ({error}); an interrupted run is repaired by --resume"
                ) from None
            if number == 1:
                found = (
                    (data.get("schema_version"), data.get("kind")) if isinstance(data, dict) else (None, None)
                )
                if found != (SCHEMA_VERSION, cls.__name__):
                    raise RecordError(
                        f"{where}: header says {found}, expected ({SCHEMA_VERSION}, {cls.__name__!r})"
                    )
                continue
            yield from_json(cls, data, where)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces `path` at the end of the block, or not at all.

    Folders are made as needed. Nothing is left behind where the block raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_records(path: Path, cls: type[R], records: Iterable[R]) -> int:
    """Write a whole file of records at once and return their number."""
    count = 0
    with replace_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(_header(cls))
        for record in records:
            file.write(dumps(record) + "\n")
            count += 1
    return count


def append_record(path: Path, record: Any) -> None:
    """Adds one record, with the header where the file is new; one write call, flushed to disk."""
    new = not path.exists() or path.stat().st_size == 0
    with open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write((_header(type(record)) if new else "") + dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def cut_torn_line(path: Path) -> bool:
    """Removes an unfinished last line that a killed writer left; says whether there was one."""
    if not path.exists():
        return False
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return False
    with open(path, "r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)
    return True


def is_success(trajectory: Trajectory, judgement: Judgement | None) -> bool:
    """A run succeeds only if a `done` was executed and the judge agrees (App. A)."""
    return trajectory.ended == "done" and judgement is not None and judgement.verdict == "success"


def derive_seed(*parts: Any) -> int:
    """Seed in [0, 2^31) from the sha256 of the parts (never from `hash()`, which changes between processes).

    >>> derive_seed(0, "task", "arm", 1, 0) == derive_seed(0, "task", "arm", 1, 0)
    True
    """
    digest = hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def sha256_text(text: str) -> str:
    """Hex sha256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()
