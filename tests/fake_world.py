"""A small stand-in for a browser session, for tests of the rooms above it: a page with a counter that buttons
change.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from rmsweb.browser.actions import canonical_action
from rmsweb.prompt import PromptConfig
from rmsweb.records import (
    Action,
    ActionResult,
    Element,
    Extraction,
    Message,
    Observation,
    Reply,
    Source,
    Step,
    Task,
    Text,
    Trajectory,
    sha256_text,
)

CONFIG = PromptConfig(
    blocks=("title",),
    history_steps=2,
    history_fields=("next_goal",),
    thinking=True,
    prompt_budget=300,
    response_budget=60,
)
TASK = Task(
    task_id="t1", text="count to three", start_url="http://count.localhost/", split="train", benchmark="fake"
)
PAGE_TEXT = "the page says forty two"


class CountingSession:
    """Buttons: 1 adds one, 2 does nothing, 3 is broken.

    `done` is honoured as the first action only; a wait passes.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.value, self.restarts, self.visited, self.root = 0, 0, [], root
        self.closed = False

    async def goto(self, url: str) -> None:
        self.visited.append(url)

    async def reset(self) -> None:
        self.value = 0

    async def close(self) -> None:
        self.closed = True

    async def observe(self) -> Observation:
        nodes = [
            Element(index=i, node_key=f"b{i}", tag="button", box=(0.0, 20.0 * i, 50.0, 10.0))
            for i in (1, 2, 3)
        ]
        nodes.append(Element(index=None, node_key="t", tag="#text", text=f"value {self.value}", depth=1))
        mark = hashlib.sha256(str(self.value).encode()).hexdigest()
        url = self.visited[-1] if self.visited else "about:blank"
        return Observation(
            url=url,
            title="count",
            tabs=(),
            active_tab="0001",
            viewport=(640, 480),
            nodes=tuple(nodes),
            fingerprint=mark,
        )

    async def act(
        self,
        actions: Sequence[Action],
        observation: Observation,
        extractor: Callable[[str, str, bool], Awaitable[str]],
    ) -> tuple[ActionResult, ...]:
        results: list[ActionResult] = []
        for number, action in enumerate(actions):
            if action.name == "done" and number:
                break
            results.append(await self._one(action, extractor))
            if results[-1].error or results[-1].is_done:
                break
        return tuple(results)

    async def _one(
        self, action: Action, extractor: Callable[[str, str, bool], Awaitable[str]]
    ) -> ActionResult:
        if action.name == "done":
            return ActionResult(is_done=True, success=action.params.get("success", False), message="done")
        if action.name == "click_element_by_index":
            if action.params["index"] > 2:
                return ActionResult(error="this button is broken")
            self.value += action.params["index"] == 1
            return ActionResult(message=f"clicked {action.params['index']}")
        if action.name == "extract_structured_data":
            answer = await extractor(action.params["query"], PAGE_TEXT, action.params["extract_links"])
            if self.root is not None:
                (self.root / "page.md").write_text(PAGE_TEXT, encoding="utf-8")
            record = Extraction(
                query=action.params["query"],
                page_text_path="page.md",
                page_text_sha256=sha256_text(PAGE_TEXT),
                answer=answer,
            )
            return ActionResult(message="extracted", content=answer, show_once=True, extraction=record)
        return ActionResult(message=canonical_action(action))


def answer(*actions: dict[str, Any], goal: str = "go on", thinking: str = "well", memory: str = "m") -> str:
    """An agent's answer as JSON."""
    return json.dumps(
        {
            "thinking": thinking,
            "evaluation_previous_goal": "ok",
            "memory": memory,
            "next_goal": goal,
            "action": list(actions),
        }
    )


def click(index: int) -> dict[str, Any]:
    return {"click_element_by_index": {"index": index}}


def done(success: bool | None = True, text: str = "three") -> dict[str, Any]:
    return {"done": {"text": text} | ({} if success is None else {"success": success})}


class ScriptedPolicy:
    """Says its answers one after the other, the last one for ever, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts, self.calls = list(answers), [], []

    async def __call__(self, messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        self.prompts.append(
            "".join(part.text for message in messages for part in message.parts if isinstance(part, Text))
        )
        self.calls.append((seed, purpose, max_tokens))
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Reply(text=text, prompt_tokens=100, completion_tokens=10, model="scripted")


def trajectory(steps: Sequence[Step] = (), number: int = 1, **fields: Any) -> Trajectory:
    """A finished attempt with those steps."""
    values: dict[str, Any] = {
        "trajectory_id": f"t1.reflection.r{number}.n0",
        "task": TASK,
        "source": Source(script="collect", policy="p", arm="reflection", round=number),
        "steps": tuple(steps),
        "final_text": "three",
        "declared_success": True,
        "ended": "done",
        "prompt_config": CONFIG.hash,
    }
    return Trajectory(**(values | fields))
