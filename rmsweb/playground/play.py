"""A person or a script in the agent's place: step through a task in the terminal.

Purpose: get a feeling for the state text and the actions in a minute, or look over a policy's shoulder. With
a checkpoint, each state shows what it would do: its most frequent answers, with their rewards (Table 4)
against the expert's action.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rmsweb.browser.actions import SCHEMA, canonical_action, parse_action, parse_agent_output
from rmsweb.playground.drills import answer_text
from rmsweb.playground.expert import next_goal, read_view
from rmsweb.playground.gym import CONFIG, Playground, parse_actions
from rmsweb.prompt import build_prompt, render_text
from rmsweb.records import Action, AgentOutput, Split, derive_seed
from rmsweb.salvage.reward import score

SAMPLES = 16  # answers that are drawn of a policy in a state
SHOWN = 3  # of them, the most frequent ones
# Short form -> the action, its parameters in the order of the words, and those that are implied.
SHORT: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "click": ("click_element_by_index", ("index",), {}),
    "type": ("input_text", ("index", "text"), {}),
    "select": ("select_dropdown_option", ("index", "text"), {}),
    "options": ("get_dropdown_options", ("index",), {}),
    "back": ("go_back", (), {}),
    "scroll": ("scroll", (), {"down": True, "num_pages": 1}),
    "up": ("scroll", (), {"down": False, "num_pages": 1}),
    "go": ("go_to_url", ("url",), {}),
    "search": ("search_engine", ("query",), {}),
    "find": ("scroll_to_text", ("text",), {}),
    "read": ("extract_structured_data", ("query",), {"extract_links": False}),
    "keys": ("send_keys", ("keys",), {}),
    "tab": ("switch_tab", ("tab_id",), {}),
    "close": ("close_tab", ("tab_id",), {}),
    "done": ("done", ("text",), {"success": True}),
}
HELP = (
    "A line is a short form, or JSON: one action, or a list of them. `quit` or the end of the input ends.\n"
    + "".join(f"  {' '.join([word, *map(str.upper, names)])}\n" for word, (_, names, _) in SHORT.items())
    + f'The actions in JSON, such as {{"click": {{"index": 5}}}}:\n{SCHEMA}'
)
Advise = Callable[[Playground], Iterator[str]]


def read_line(line: str) -> tuple[Action, ...]:
    """Return the actions of a line; ValueError says what is wrong.

    >>> read_line("type 3 New York")
    (Action(name='input_text', params={'index': 3, 'text': 'New York'}),)
    """
    if line.startswith(("{", "[")):
        return parse_actions(line)
    word, _, rest = line.partition(" ")
    if word not in SHORT:
        raise ValueError(f"{word!r} is no short form and no JSON; ? shows what is possible")
    name, names, implied = SHORT[word]
    values = rest.split(None, len(names) - 1) if len(names) > 1 else [rest] * bool(rest or word == "done")
    if len(values) > len(names):
        raise ValueError(f"{word} takes no words after it")
    return (parse_action({name: implied | dict(zip(names, values, strict=False))}),)


def expert_answer(world: Playground) -> str | None:
    """Return the careful expert's answer to the state, None where it knows no element for it."""
    task, seen = world.now
    prompt = build_prompt(CONFIG, task_text=task.text, history=[], observation=seen)
    view = read_view(render_text(prompt.messages))
    goal = next_goal(task, view, set())
    if goal.verb not in ("back", "done") and goal.label not in view.index:
        return None
    return answer_text(goal, view.index.get(goal.label or ""), view.page)


def open_policy(checkpoint: Path) -> tuple[Any, Advise]:
    """Load a checkpoint; return its prompt configuration, and what tells its answers to a state."""
    from rmsweb.engine.policy import PolicyModel
    from rmsweb.engine.sampler import sample

    policy = PolicyModel.load(checkpoint)
    config = policy.prompt_config or CONFIG

    def advise(world: Playground) -> Iterator[str]:
        encoded = policy.encode_prompt(world.prompt(policy.count_tokens).messages, world.folder)
        seeds = [derive_seed(world.now[0].task_id, len(world.steps), number) for number in range(SAMPLES)]
        (rollouts,) = sample(policy, [encoded], n=SAMPLES, max_new_tokens=config.response_budget, seeds=seeds)
        target = expert_answer(world)
        yield f"the expert: {_in_short(target)}" if target else "the expert has no action here"
        answers = Counter(_in_short(rollout.text) for rollout in rollouts)
        texts = {_in_short(rollout.text): rollout.text for rollout in reversed(rollouts)}
        for words, count in answers.most_common(SHOWN):
            reward = f"  reward {score(texts[words], target).value:g}" if target else ""
            yield f"  {count}/{SAMPLES} {words}{reward}"

    return config, advise


def _in_short(answer: str) -> str:
    """Return the actions of an answer, or its beginning where it does not parse."""
    found = parse_agent_output(answer)
    if isinstance(found, AgentOutput):
        return ", ".join(map(canonical_action, found.actions))
    return f"no valid answer: {json.dumps(answer[:60], ensure_ascii=False)}"


def play(
    lines: TextIO,
    *,
    task_id: str | None = None,
    split: Split = "held-out",
    seed: int = 0,
    policy: Path | None = None,
    max_steps: int = 50,
) -> None:
    """Step through a task: print each state, read a line, carry it out; at the end print the site's verdict.

    Raises ValueError for an unknown task, FileNotFoundError for a checkpoint that is not there.
    """
    config, advise = open_policy(policy) if policy else (CONFIG, None)
    with Playground(split=split, config=config, max_steps=max_steps) as world:
        observation, info = world.reset(seed, {"task_id": task_id} if task_id else None)
        print(f"Task {info['task_id']}: {info['task']}\n? shows the actions; a site's page follows.\n")
        ended, answer = False, None
        while not ended:
            print(observation["text"])
            for line in advise(world) if advise else ():
                print(line)
            actions = _next_actions(lines)
            if actions is None:
                print("the input ended before the task did")
                break
            observation, _, terminated, truncated, info = world.step(actions)
            print("\n".join(info["results"]), "\n")
            answer, ended = (
                world.steps[-1].results[-1].content if terminated else None,
                terminated or truncated,
            )
            if truncated:
                print(f"{max_steps} steps are over")
        success, reason = world.check(answer)
        print(f"check: {'success' if success and answer is not None else 'no success'}; {reason}")


def _next_actions(lines: TextIO) -> tuple[Action, ...] | None:
    """Read lines until one holds actions; None where the input ends."""
    while True:
        print("> ", end="", flush=True)
        line = lines.readline()
        if not line or line.strip() == "quit":
            print()
            return None
        if line.strip() in ("?", "help"):
            print(HELP)
        elif line.strip():
            try:
                return read_line(line.strip())
            except ValueError as problem:
                print(problem)
