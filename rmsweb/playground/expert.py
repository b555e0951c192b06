"""The scripted expert: it reads the page from the prompt's text and knows the task's world, and it has habits that fail half of the time.

Purpose: the policy behind the scripted teacher. It sees what any endpoint sees, the text of the prompt; only the meaning of the task's
words is looked up (`tasks.world_by_text`). Its habits are shortcuts (leave a dropdown or a field at its default, answer from the
result list), harmless by luck in half of the tasks, plus a wrong row now and then. Which it has is a function of task and seed; a
guide that names a decision averts the habit more often than not.
"""

import random
import re
from dataclasses import dataclass

from rmsweb.playground.drills import Goal, answer_text
from rmsweb.playground.tasks import World

HABIT = 0.95  # share of tasks in which the teacher has a given habit
KEEP = 0.45  # share in which it keeps one that the guide names
WRONG_ROW = 0.06
SNIPPET = "result"  # the guide's word for answering from the list
_ELEMENT = re.compile(r"\t*\*?\[(\d+)\]<(\w+)(.*?) />$")
_TITLE = re.compile(r"^Page: (\w+) (\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class View:
    """What the text of a prompt shows: page name, controls by label, lines of text."""

    page: str
    index: dict[str, int]  # label -> index
    kind: dict[str, str]  # label -> tag
    value: dict[str, str]  # label of a field -> its value
    texts: tuple[str, ...]

    @property
    def heading(self) -> str:
        return next((text for text in self.texts if " " not in text), "")

    def fact(self, label: str | None) -> str | None:
        """The value of a fact line."""
        return next((text.split()[1] for text in self.texts if label and text.startswith(label + " ")), None)


def read_view(prompt: str) -> View:
    """The state part of a prompt -> View. A label is the element's name attribute, or the text below it."""
    state = prompt.rsplit("<browser_state>\n", 1)[-1].split("</browser_state>")[0]
    title = _TITLE.search(state)
    index: dict[str, int] = {}
    kind: dict[str, str] = {}
    value: dict[str, str] = {}
    texts: list[str] = []
    waiting: tuple[int, str] | None = None
    for line in state.splitlines():
        found = _ELEMENT.match(line)
        if found:
            number, tag, rest = int(found[1]), found[2], found[3]
            name = re.search(r" name=(\S+)", rest)
            waiting = None if name else (number, tag)
            if name:
                index[name[1]], kind[name[1]] = number, tag
                typed = re.search(r" value=(.*?)(?= [\w-]+=|$)", rest)
                value[name[1]] = typed[1] if typed else ""
        elif waiting and line.startswith("\t"):
            index[line.strip()], kind[line.strip()] = waiting
            waiting = None
        else:
            texts.append(line.strip())
    return View(title[2] if title else "", index, kind, value, tuple(texts))


def _pick(world: World, view: View, label: str, skip: set[str]) -> Goal | None:
    """Choose an option that the task names, where it still can be chosen."""
    if label in world.want and label not in skip and view.kind.get(label) == "select":
        return Goal("select", label, world.want[label])
    return None


def _fill(view: View, label: str, value: str) -> Goal | None:
    return Goal("type", label, value) if view.kind.get(label) == "input" and view.value.get(label) != value else None


def _search(view: View, label: str, button: str, name: str) -> Goal:
    return _fill(view, label, name) or Goal("click", button)


def _item_page(world: World, view: View, skip: set[str]) -> Goal:
    """On the page of the right item: options first, then the answer or the closing button."""
    for label in ("color", "size"):
        goal = _pick(world, view, label, skip)
        if goal:
            return goal
    if world.fact:
        return Goal("done", world.fact, view.fact(world.fact) or "none")
    if world.template == "jobs.apply":
        fill = None if "applicant" in skip else _fill(view, "applicant", world.want["applicant"])
        return fill or Goal("click", "continue")
    return Goal("click", "add")


def _list_page(world: World, view: View, skip: set[str]) -> Goal:
    """On a home, result or category page: the filter, then the item, then the way to it."""
    goal = _pick(world, view, "region", skip)
    if goal:
        return goal
    if SNIPPET in skip and view.fact(world.fact):
        return Goal("done", world.fact, view.fact(world.fact))
    target = world.via or world.item
    if target in view.index:
        return Goal("click", target)
    if world.template == "jobs.login":
        return Goal("click", "login")
    if world.template == "shop.page":
        return Goal("click", "next" if "next" in view.index else world.category)
    field, button = {"shop": ("product", "search"), "jobs": ("title", "browse"), "wiki": ("article", "lookup")}[world.site]
    return _search(view, field, button, target)


def next_goal(world: World, view: View, skip: set[str]) -> Goal:
    """The expert's next small intention, with the decisions in `skip` left out."""
    if view.page in ("ordered", "sent"):
        return Goal("done", None, "ok")
    if view.page == "cart":
        return Goal("click", "order")
    if view.page == "login":
        return _fill(view, "user", world.user) or _fill(view, "code", world.code) or Goal("click", "enter")
    if view.page == "form":
        return _pick(world, view, "shift", skip) or Goal("click", "send")
    if view.page == "item":
        if view.heading == world.item:
            return _item_page(world, view, skip)
        return Goal("click", world.item) if world.via and view.heading == world.via else Goal("back")
    if view.page in ("home", "results", "saved"):
        return _list_page(world, view, skip)
    return Goal("back")


def decisions(world: World) -> list[str]:
    """The decisions that a habit can skip in this task: options, the applicant's name, opening the item."""
    return [*world.want, *([SNIPPET] if world.template in ("shop.find", "wiki.fact") else [])]


def habits(world: World, guide: str) -> set[str]:
    """The decisions that the teacher skips, given the guide; another guide is another chance."""
    named = set(re.findall(r"\w+", guide))
    skip = set()
    for label in decisions(world):
        has = random.Random(f"habit/{world.task_id}/{label}").random() < HABIT
        keeps = label not in named or random.Random(f"keep/{world.task_id}/{guide}/{label}").random() < KEEP
        if has and keeps:
            skip.add(label)
    return skip


def act(world: World, prompt: str, seed: int, guide: str) -> str:
    """The teacher's answer to a prompt: canonical JSON."""
    view = read_view(prompt)
    goal = next_goal(world, view, habits(world, guide))
    r = random.Random(f"row/{world.task_id}/{seed}/{view.page}/{sorted(view.index)}")
    if goal.verb == "click" and goal.label == world.item and r.random() < WRONG_ROW:
        rows = [label for label in view.index if label in world.others]
        goal = Goal("click", r.choice(rows)) if rows else goal
    return answer_text(goal, view.index.get(goal.label or ""), view.page)


def wrong_decisions(world: World, goals: list[str]) -> list[str]:
    """What the reflection handler finds wrong in a run's goals: options that were never chosen, an answer from the list."""
    missing = [label for label in world.want if not any(goal.split()[1:2] == [label] and goal.split()[0] in ("select", "type") for goal in goals)]
    if SNIPPET in decisions(world) and f"click {world.item}" not in goals:
        missing.append(SNIPPET)
    return missing
