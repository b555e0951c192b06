"""The playground for an agent of one's own: a class in the shape of a Gymnasium environment.

Purpose: try another agent on the sites in a loop of ten lines, without a browser and without this project's
agent. `reset` and `step` are ordinary functions; gymnasium itself is not needed.

An observation is a dict:
* `text`: the state as a policy of this project reads it;
* `elements`: a list of dicts with `index`, `tag`, `text`, `name`, `value`, `options` and `box` (x, y, width,
  height in px of the picture) of everything that an action may name;
* `picture`: the path of the screenshot.

An action is JSON text: one action of the schema (`{"click_element_by_index": {"index": 5}}`, aliases too), a
list of them, or a whole answer of a policy. A list of `records.Action` does as well. The reward is 1.0 for a
`done` that the site's own check confirms, else 0.0. An action that cannot be carried out costs a step and its
reason is in `info["results"]`.

>>> with Playground(max_steps=3) as world:
...     observation, info = world.reset(seed=0)
...     print(info["task"])
...     action = '{"done": {"text": "42", "success": true}}'
...     _, reward, terminated, truncated, info = world.step(action)
Buy Movas at shop with size small and color blue
>>> reward, terminated, truncated
(0.0, True, False)
"""

import asyncio
import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rmsweb.browser.actions import parse_action, parse_agent_output
from rmsweb.browser.session import Session
from rmsweb.playground.environment import ReplayEnvironment
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_world
from rmsweb.playground.teacher import extractor
from rmsweb.prompt import (
    Prompt,
    PromptConfig,
    build_prompt,
    render_text,
)
from rmsweb.records import Action, ActionResult, AgentOutput, Observation, ParseFailure, Split, Step
from rmsweb.tokens import CountTokens, approximate_tokens

CONFIG = PromptConfig(blocks=("tabs", "title", "image"), viewport=(640, 480), thinking=False)
_TASK_ID = re.compile(r"([a-z]+\.[a-z]+)-(train|dev|held-out)-(\d{1,9})")
_STATE = re.compile(r"<browser_state>\n(.*)</browser_state>\n", re.DOTALL)
_READ = re.compile(r"<read_state>\n.*</read_state>\n|^Warning: .*\n", re.DOTALL | re.MULTILINE)


def world_named(task_id: str) -> World:
    """Return the world of a task id.

    Raises ValueError for an id that no task has.
    """
    found = _TASK_ID.fullmatch(task_id)
    if found is None or found[1] not in TEMPLATES + UNSEEN or (found[1] in UNSEEN and found[2] != "held-out"):
        raise ValueError(f"found the task id {task_id!r}, expected one such as shop.buy-held-out-0")
    return make_world(found[1], int(found[3]), found[2])


def parse_actions(text: str) -> tuple[Action, ...]:
    """Return the actions of a JSON text: one action, a list of them, or a whole answer.

    Raises ValueError that says what is wrong.
    """
    answer = parse_agent_output(text)
    if isinstance(answer, AgentOutput):
        return answer.actions
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(found, dict) and "action" in found:
        raise ValueError(answer.reason)
    actions = found if isinstance(found, list) else [found]
    if not actions:
        raise ValueError("the list of actions is empty")
    return tuple(map(parse_action, actions))


async def _extract(query: str, page_text: str, extract_links: bool) -> str:
    return extractor(f"<page_text>\n{page_text}\n</page_text>\nQuery: {query}", 0)


class Playground:
    """The playground's tasks one after the other; `close` it, or use it in a with statement.

    Args:
        split: the tasks that `reset` draws from.
        max_steps: steps after which an episode is truncated.
        config: viewport and picture format; what the text shows.
        folder: where pictures and files go; a temporary folder without one.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        max_steps: int = 30,
        config: PromptConfig = CONFIG,
        folder: Path | None = None,
    ) -> None:
        self.split, self.max_steps, self.config = split, max_steps, config
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="rmsweb-")
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self._loop, self._sites = asyncio.new_event_loop(), ReplayEnvironment()
        self._session: Session | None = None
        self._random = random.Random()
        self.world: World | None = None
        self.seen: Observation | None = None  # what the next action refers to
        self.steps: list[Step] = []
        self.ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session and remove the temporary folder."""
        if self._session is not None:
            self._loop.run_until_complete(self._session.close())
        self._loop.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a task and return the first observation and what is known of the task.

        A seed names one task of the split; without one, the next is drawn at random. Of the options,
        `task_id` names a task and `trouble` is the share of pages that fail once.
        """
        options = dict(options or {})
        task_id, trouble = options.pop("task_id", None), float(options.pop("trouble", 0.0))
        if options:
            raise ValueError(f"reset: found the options {sorted(options)}, expected task_id and trouble")
        templates = TEMPLATES + (UNSEEN if self.split == "held-out" else ())
        number = self._random.randrange(10**6) if seed is None else seed
        if number < 0:
            raise ValueError(f"reset: found the seed {seed}, expected one from 0")
        template = templates[number % len(templates)]
        world = world_named(task_id) if task_id else make_world(template, number, self.split)
        self.world, self.steps, self.ended = world, [], False
        self._loop.run_until_complete(self._begin(world, trouble))
        return self._shown(), self._info(())

    async def _begin(self, world: World, trouble: float) -> None:
        if self._session is None:
            options: dict[str, Any] = {"image_format": self.config.image_format}
            self._session = self._sites.open(self.folder, self.config.viewport, **options)
        await self._session.goto(await self._sites.reset(self._session, world.task(trouble)))
        self.seen = await self._session.observe()

    def step(
        self, action: str | Sequence[Action]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Carry out a step's actions and return (observation, reward, terminated, truncated, info)."""
        if self.ended or self._session is None or self.seen is None:
            raise ValueError("step: the episode has ended or was never begun; call reset")
        results: tuple[ActionResult, ...]
        output, failure = None, None
        try:
            output = AgentOutput(actions=parse_actions(action) if isinstance(action, str) else tuple(action))
            acting = self._session.act(output.actions, self.seen, _extract)
            results = self._loop.run_until_complete(acting)
        except ValueError as problem:
            failure = ParseFailure(reason=str(problem))
            results = (ActionResult(error=str(problem)),)
        self.steps.append(
            Step(
                number=len(self.steps) + 1,
                observation=self.seen,
                response_text=action if isinstance(action, str) else "",
                output=output,
                parse_failure=failure,
                results=results if output else (),
            )
        )
        terminated = results[-1].is_done
        reward = float(terminated and self.check(results[-1].content)[0])
        truncated = not terminated and len(self.steps) >= self.max_steps
        self.ended = terminated or truncated
        self.seen = self._loop.run_until_complete(self._session.observe())
        return self._shown(), reward, terminated, truncated, self._info(results)

    @property
    def now(self) -> tuple[World, Observation]:
        """The running task's world, and what was seen last. ValueError before `reset`."""
        if self.world is None or self.seen is None:
            raise ValueError("no episode was begun; call reset")
        return self.world, self.seen

    def prompt(self, count_tokens: CountTokens = approximate_tokens) -> Prompt:
        """Return what a policy of this project gets to read in this state."""
        world, seen = self.now
        return build_prompt(
            self.config,
            task_text=world.text,
            history=self.steps,
            observation=seen,
            count_tokens=count_tokens,
        )

    def check(self, answer: str | None) -> tuple[bool, str]:
        """Return the site's verdict on an answer and on what was done, and the reason."""
        if self._session is None:
            raise ValueError("no episode was begun; call reset")
        return self._sites.site(self._session).check(answer)

    def _shown(self) -> dict[str, Any]:
        text, (_, seen) = render_text(self.prompt().messages), self.now
        state, shot = _STATE.search(text), seen.screenshot
        return {
            "text": "".join([state[1] if state else "", *_READ.findall(text)]),
            "picture": str(self.folder / shot.path) if shot else None,
            "elements": [
                {
                    "index": node.index,
                    "tag": node.tag,
                    "text": node.text,
                    "name": node.attributes.get("name", ""),
                    "value": node.value,
                    "options": list(node.options),
                    "box": node.box,
                }
                for node in seen.nodes
                if node.index is not None
            ],
        }

    def _info(self, results: Sequence[ActionResult]) -> dict[str, Any]:
        world, seen = self.now
        return {
            "task": world.text,
            "task_id": world.task_id,
            "url": seen.url,
            "results": [result.error or result.message for result in results],
        }
