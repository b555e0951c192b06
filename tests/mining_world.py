"""Small pools of runs for the tests of the miner and the report: a shop page and an answer a step."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import PIL.Image

from rmsweb.browser.actions import canonical_text, parse_action
from rmsweb.collection.filters import action_sample
from rmsweb.jsonl import write_json, write_records
from rmsweb.mining.alignment import AlignedRun
from rmsweb.prompt import PromptConfig
from rmsweb.records import (
    WORK_CHECK,
    Action,
    ActionResult,
    AgentOutput,
    Element,
    Ended,
    Image,
    Judgement,
    Observation,
    ParseFailure,
    Source,
    Split,
    Step,
    StepSample,
    Task,
    Trajectory,
    Verdict,
    sha256_bytes,
)

CONFIG = PromptConfig(thinking=False)
EVIL = '<script>alert("x")</script><img src=x onerror=y>'
GOOD, BAD = "open@/ select@/item add@/item done@/cart", "open@/ add@/item done@/cart"
TASK = "Buy a lamp with color red at shop"
BUTTONS = ("color", "add to cart", "checkout", "lamp", "help")
VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    "select": ("select_dropdown_option", {"index": 1, "text": "red"}),
    "blue": ("select_dropdown_option", {"index": 1, "text": "blue"}),
    "add": ("click_element_by_index", {"index": 2}),
    "checkout": ("click_element_by_index", {"index": 3}),
    "open": ("click_element_by_index", {"index": 4}),
    "type": ("input_text", {"index": 5, "text": "lamp"}),
    "scroll": ("scroll", {"down": True, "num_pages": 1.0}),
    "back": ("go_back", {}),
    "search": ("search_engine", {"query": "red lamp"}),
    "research": ("search_engine", {"query": "blue chairs"}),
    "goto": ("go_to_url", {"url": "http://shop.localhost/item"}),
    "read": ("extract_structured_data", {"query": "price", "extract_links": False}),
    "done": ("done", {"text": "bought", "success": True}),
}


@cache
def picture_bytes() -> bytes:
    """The screenshot of every page: white."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (640, 480), "white").save(file, format="PNG")
    return file.getvalue()


def picture() -> Image:
    """Return the record of the screenshot."""
    digest = sha256_bytes(picture_bytes())
    return Image(path=f"screenshots/{digest[:16]}.png", sha256=digest, width=640, height=480)


def page(
    path: str, *, shift: int = 0, image: Image | None = None, text: str = "Red lamps on offer"
) -> Observation:
    """Return the shop's page; `shift` moves all indices."""
    tags = ("select", "button", "button", "a", "input")
    nodes = [Element(index=None, node_key="t", tag="#text", text=text, box=(0, 0, 100, 20))]
    nodes += [
        Element(
            index=number + shift, node_key=str(number), tag=tag, text=label, box=(10, 40 * number, 90, 30)
        )
        for number, (tag, label) in enumerate(zip(tags, BUTTONS, strict=True), 1)
    ]
    return Observation(
        url=f"http://shop.localhost{path}",
        title="Shop",
        tabs=(),
        active_tab="0001",
        viewport=(640, 480),
        nodes=tuple(nodes),
        screenshot=image,
        fingerprint=f"{path} {text}",
    )


def action(name: str, shift: int = 0) -> Action:
    """Return an action of VERBS on a page whose indices are moved."""
    verb, params = VERBS[name]
    return parse_action({verb: params | ({"index": params["index"] + shift} if "index" in params else {})})


def step(
    number: int,
    name: str,
    *,
    path: str = "/",
    shift: int = 0,
    error: str | None = None,
    image: Image | None = None,
    memory: str = "",
) -> Step:
    """Return one turn; `name` is a key of VERBS, or "junk" for an answer that does not parse."""
    observation = page(path, shift=shift, image=image or picture())
    if name == "junk":
        return Step(
            number=number,
            observation=observation,
            response_text="?",
            output=None,
            parse_failure=ParseFailure(reason="no JSON"),
        )
    output = AgentOutput(actions=(action(name, shift),), memory=memory, next_goal=f"goal {name}")
    result = ActionResult(
        error=error,
        message="" if error else f"did {name}",
        is_done=name == "done",
        success=True if name == "done" else None,
    )
    return Step(
        number=number,
        observation=observation,
        response_text=canonical_text(output, thinking=False),
        output=output,
        results=(result,),
    )


def trajectory(
    names: str,
    *,
    task_id: str = "t0",
    name: str = "a",
    split: Split = "train",
    script: str = "evaluate",
    shift: int = 0,
) -> Trajectory:
    """Return a run: words of `names` are keys of VERBS, `verb@/path` on another page."""
    steps = []
    for number, word in enumerate(names.split(), 1):
        verb, _, path = word.partition("@")
        steps.append(step(number, verb, path=path or "/", shift=shift))
    ended: Ended = "done" if names.split()[-1].startswith("done") else "max_steps"
    task = Task(
        task_id=task_id,
        text=TASK,
        start_url="http://shop.localhost/",
        split=split,
        benchmark="playground",
        category="E-Commerce",
    )
    return Trajectory(
        trajectory_id=f"{task_id}.{name}",
        task=task,
        source=Source(script=script, policy="p"),
        steps=tuple(steps),
        final_text="bought" if ended == "done" else None,
        declared_success=True if ended == "done" else None,
        ended=ended,
        prompt_config=CONFIG.hash,
    )


def run(names: str, success: bool | None, **options: Any) -> AlignedRun:
    """Return a run with its verdict."""
    checked = options.pop("work_checked", False)
    return AlignedRun(trajectory(names, **options), success, work_checked=checked)


def judgement(found: Trajectory, verdict: Verdict = "success", judge: str = "check") -> Judgement:
    return Judgement(
        trajectory_id=found.trajectory_id, judge=judge, model="", verdict=verdict, reason="because"
    )


def render(item: AlignedRun, position: int) -> StepSample | None:
    """Render a step as mine.py does."""
    sample = action_sample(item.trajectory, position, CONFIG, lambda text: len(text) // 4)
    return sample if isinstance(sample, StepSample) else None


def on_page(found: Trajectory, number: int, observation: Observation) -> Trajectory:
    """Return the trajectory with another page at a step (from 0)."""
    steps = list(found.steps)
    steps[number] = replace(steps[number], observation=observation)
    return replace(found, steps=tuple(steps))


def write_folder(path: Path, runs: Sequence[AlignedRun], *, config: dict[str, Any] | None = None) -> Path:
    """Write a run folder as collect.py and evaluate.py leave it, with the pictures of its steps."""
    path.mkdir(parents=True)
    (path / "screenshots").mkdir()
    (path / picture().path).write_bytes(picture_bytes())
    write_json(path / "prompt_config.json", CONFIG)
    (path / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    write_records(path / "trajectories.rank0.jsonl", Trajectory, [item.trajectory for item in runs])
    verdicts: dict[bool | None, Verdict] = {True: "success", False: "not_success", None: "unparsed"}
    write_records(
        path / "judgements.rank0.jsonl",
        Judgement,
        [
            judgement(item.trajectory, verdicts[item.success], WORK_CHECK if item.work_checked else "check")
            for item in runs
        ],
    )
    return path


def held_out(path: Path, wins: str, *, hostile: bool = False) -> Path:
    """Write an evaluation of tasks with three runs each, one sign a run; `hostile` puts markup into texts.

    `+-?` is a task with a success, a failure and a run that does not parse.
    """
    runs = []
    for number, sign in enumerate(wins):
        names = {"+": GOOD, "-": BAD, "?": "junk junk"}[sign]
        item = run(names, sign == "+", task_id=f"t{number // 3}", name=f"n{number % 3}", split="held-out")
        item = replace(
            item, trajectory=replace(item.trajectory, source=replace(item.trajectory.source, run=number % 3))
        )
        if hostile:
            steps = tuple(
                replace(old, observation=replace(old.observation, url=EVIL, title=EVIL), response_text=EVIL)
                for old in item.trajectory.steps
            )
            steps = (*steps, replace(step(9, "junk"), response_text=EVIL))
            task = replace(item.trajectory.task, text=EVIL)
            item = replace(
                item,
                trajectory=replace(item.trajectory, steps=steps, task=task, final_text=EVIL, guide_in=EVIL),
            )
        runs.append(item)
    return write_folder(path, runs)
