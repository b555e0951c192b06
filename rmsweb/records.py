"""Data contracts: every record that is written to disk or handed from one room to another.

Purpose: one owner for the shape of the data. A record is a frozen dataclass; `jsonl` writes and reads it.
Nothing here imports the package.

Image paths are relative to the run folder that holds the file, so a run folder can be copied to another
machine as it is.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, dataclass_transform

R = TypeVar("R")

Split = Literal["train", "dev", "held-out"]
PartTag = Literal[
    "system", "schema", "task", "history", "state", "element", "read_state", "reflection", "warning"
]
Ended = Literal["done", "max_steps", "stalled", "parse_failures", "environment"]
Verdict = Literal["success", "not_success", "unknown", "unparsed"]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[R]) -> type[R]:
    """Make a class a record: a frozen dataclass with slots whose fields are given by name."""
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)


# -------------------------------------------------------------------------------------- messages and policies


@record
class Text:
    """A piece of a message. Pieces of one message are joined without a separator."""

    tag: PartTag
    text: str


@record
class Image:
    """A picture on disk: `path` is relative to the run folder, `sha256` is of the bytes, sizes are in pixels.

    `boxes` are (index, x, y, width, height) in pixels, drawn when the picture is read; no file holds them.
    """

    path: str
    sha256: str
    width: int
    height: int
    boxes: tuple[tuple[int, float, float, float, float], ...] = ()


@record
class Message:
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[Text | Image, ...]


@record
class Reply:
    """What a policy or an endpoint answered."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usage_unknown: int = 0  # 1 where the endpoint did not say how many tokens those were
    finish_reason: str = "stop"
    model: str = ""


class Policy(Protocol):
    """Messages in, text out: the same for a checkpoint (`engine.serve`) and an endpoint (`llm`)."""

    async def __call__(
        self, messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply: ...


# --------------------------------------------------------------------------------------------------- the page


@record
class Task:
    """What the agent is asked to do; the answer and the data of its check stay in the environment."""

    task_id: str
    text: str
    start_url: str | None
    split: Split
    benchmark: str
    category: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)  # its arguments: site, template, seed, ...


@record
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
    box: tuple[float, float, float, float] | None = None  # x, y, width, height in CSS px of the viewport
    in_viewport: bool = True
    is_new: bool = False  # not in the previous observation of the same document
    depth: int = 0  # number of displayed ancestors = tabs before the line
    marker: Literal["scroll", "iframe", "shadow-open", "shadow-closed"] | None = None
    scroll_pages: tuple[float, float] | None = None  # pages above and below, of what scrolls by itself


@record
class Tab:
    """One open tab; ids have four characters and are deterministic within a session."""

    tab_id: str
    url: str
    title: str


@record
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
    screenshot: Image | None = None  # without boxes; a prompt or a report asks for them
    dialogs: tuple[str, ...] = ()
    downloads: tuple[str, ...] = ()
    is_pdf: bool = False
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""  # sha256 of url, tabs, scroll and each (tag, text, value, checked)
    observe_s: float = 0.0


# ------------------------------------------------------------------------------------------- the agent's turn


@record
class Action:
    """One browser action; `params` are those that were really present, under their canonical names."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@record
class AgentOutput:
    """A parsed answer. `present_keys` are the top-level keys that stood in the text."""

    actions: tuple[Action, ...]
    thinking: str | None = None
    evaluation_previous_goal: str = ""
    memory: str = ""
    next_goal: str = ""
    present_keys: tuple[str, ...] = ()
    ignored_params: int = 0  # unknown parameters that the parser left out


@record
class ParseFailure:
    """Why a text is not an answer, and at which character that showed."""

    reason: str
    position: int = 0


@record
class Extraction:
    """What an extraction read: the query, where the page text lies, and the answer."""

    query: str
    page_text_path: str
    page_text_sha256: str
    answer: str


@record
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


@record
class Usage:
    """What policy calls used, in tokens."""

    seed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usage_unknown: int = 0  # calls whose tokens the endpoint did not report; they are in no sum
    finish_reason: str = ""
    model: str = ""

    @classmethod
    def of(cls, *replies: Reply, seed: int = 0) -> "Usage":
        """Add up the tokens of a turn's replies; the first one is the answer and names the rest."""
        return cls(
            seed=seed,
            prompt_tokens=sum(reply.prompt_tokens for reply in replies),
            completion_tokens=sum(reply.completion_tokens for reply in replies),
            usage_unknown=sum(reply.usage_unknown for reply in replies),
            finish_reason=replies[0].finish_reason,
            model=replies[0].model,
        )


@record
class Step:
    """One turn: what was seen, answered and done; never a reflection."""

    number: int  # from 1
    observation: Observation
    response_text: str
    output: AgentOutput | None
    parse_failure: ParseFailure | None = None
    results: tuple[ActionResult, ...] = ()  # as many as actions were executed
    usage: Usage = field(default_factory=Usage)
    browser_restarts: int = 0
    duration_s: float = 0.0

    @property
    def executed(self) -> tuple[tuple[Action, ActionResult], ...]:
        """The executed actions with their results; a stop rule may have cut off later actions."""
        return tuple(zip(self.output.actions, self.results, strict=False)) if self.output else ()


@record
class Source:
    """Where a trajectory comes from."""

    script: str  # collect or evaluate
    policy: str  # model name or checkpoint path as given
    checkpoint_sha256: str | None = None
    arm: str = ""
    round: int = 1
    run: int = 0
    seed: int = 0


@record
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


WORK_CHECK = "work"  # kind of a judgement that saw the work done, not its answer alone


@record
class Judgement:
    """A verdict on a trajectory; in its own file, so that judging again rewrites nothing."""

    trajectory_id: str
    judge: str  # kind: check, work, outcome, rule, ...
    model: str
    verdict: Verdict
    reason: str = ""
    prompt_sha256: str = ""
    raw: str = ""
    usage: Usage = field(default_factory=Usage)


# ------------------------------------------------------------------------------------------- training records


@record
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

    @property
    def name(self) -> str:
        """The record's own id."""
        return self.sample_id


@record
class Scores:
    """The miner's scores of one candidate, each in [0, 1]."""

    state: float
    action: float
    category: float
    total: float


@record
class MinedState(StepSample):
    """One RL prompt with its verified answer. Holds nothing of the other branch."""

    state_id: str
    category: str
    confidence: float
    label_source: Literal["judge", "review", "rule"]
    scores: Scores
    pair_kind: Literal["success-failure", "short-long"]

    @property
    def name(self) -> str:
        """The record's own id."""
        return self.state_id


@record
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
    opinions: tuple[str, ...] = ()  # the rules', the judge's and the review's label, with their reasons
    others: tuple[str, ...] = ()  # decisions of other steps that were candidates too
    rejected: tuple[Action, ...] = ()  # failing actions on the success's page; empty where they do not fit


# ----------------------------------------------------------------------------------------- what records say


def is_success(trajectory: Trajectory, judgement: Judgement | None) -> bool:
    """Say whether a run succeeded: a `done` was executed and the judge agrees (App. A)."""
    return trajectory.ended == "done" and judgement is not None and judgement.verdict == "success"


def derive_seed(*parts: Any) -> int:
    """Return a seed in [0, 2^31) from the sha256 of the parts.

    Never from `hash()`, which changes between processes.

    >>> derive_seed(0, "task", "arm", 1, 0) == derive_seed(0, "task", "arm", 1, 0)
    True
    """
    digest = hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def sha256_text(text: str) -> str:
    """Return the hex sha256 of a text's UTF-8 bytes."""
    return sha256_bytes(text.encode())


def sha256_bytes(data: bytes) -> str:
    """Return the hex sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()
