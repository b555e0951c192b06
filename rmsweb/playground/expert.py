"""The scripted expert: it reads the page in the prompt, knows the world of the task, and has bad habits.

Purpose: the policy behind the scripted teacher. It sees what any endpoint sees, the text of the prompt; only
the meaning of the task's words is looked up (`tasks.world_by_text`). Its habits are shortcuts: leave a
dropdown, a field or a date at its default, type without picking, answer from the result list, finish before
the confirmation, take the site that may block. By luck they do no harm in half of the tasks. Now and then it
also takes a wrong row. Task and seed decide which habits it has; a guide that names a decision averts the
habit more often than not.
"""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

from rmsweb.playground.drills import Goal, answer_text
from rmsweb.playground.tasks import OPTIONS, World

HABIT = 0.95  # share of tasks in which the teacher has a given habit
KEEP = 0.45  # share in which it keeps one that the guide names
WRONG_ROW = 0.06
SNIPPET = "result"  # the guide's word for answering from the list
CONFIRM = "confirm"  # for finishing before the last button is pressed
NEWS = "news"  # for taking the site that may block
HABITS = {
    SNIPPET: ("shop.find", "wiki.fact", "office.document", "search.wiki", "search.jobs", "search.shop"),
    CONFIRM: ("travel.date", "office.form"),
    NEWS: ("search.news",),
}
PICKED = ("origin", "destination", "day")  # what is chosen by a click
# the link on the home page that leads on
_WAY = {"jobs.login": "login", "office.document": "documents", "travel.stay": "hotels"}
_BUTTON = {"cart": "order", "busy": "retry", "denied": "verify"}  # pages on which one thing is pressed
_SEARCH = {"shop": ("product", "search"), "jobs": ("title", "browse"), "wiki": ("article", "lookup")}
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
        """The first line of one word."""
        return next((text for text in self.texts if " " not in text), "")

    def fact(self, label: str | None) -> str | None:
        """Return the value of a fact: the line before its label."""
        return next((value for value, text in pairwise(self.texts) if text == label), None)


def read_view(prompt: str) -> View:
    """Return what the state in a prompt shows.

    The label of a control is its name attribute, else the text below it.
    """
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
    """Return the choice of an option that the task names, if it can still be chosen."""
    if label in world.want and label not in skip and view.kind.get(label) == "select":
        return Goal("select", label, world.want[label])
    return None


def _fill(view: View, label: str, value: str) -> Goal | None:
    empty = view.kind.get(label) == "input" and view.value.get(label) != value
    return Goal("type", label, value) if empty else None


def _fill_wanted(world: World, view: View, label: str, skip: set[str]) -> Goal | None:
    return None if label in skip else _fill(view, label, world.want[label])


def _press(view: View, *buttons: str) -> Goal:
    """Return a click on the first of the buttons that the page has, else on the last."""
    return Goal("click", next((button for button in buttons if button in view.index), buttons[-1]))


def _flight(world: World, view: View, skip: set[str]) -> Goal:
    """Return the next goal on the flight form: type both places and pick them from the suggestions.

    A careless run leaves the origin alone, and types the destination without picking it.
    """
    for label in world.want:
        if label in view.index and not (label == "origin" and label in skip):
            fill = _fill(view, label, world.want[label])
            if fill or label not in skip:
                return fill or Goal("click", world.want[label])
    return Goal("click", "book")


def _item_page(world: World, view: View, skip: set[str]) -> Goal:
    """Return the next goal on the item's page: options first, then the answer or the closing button."""
    for label in ("color", "size"):
        goal = _pick(world, view, label, skip)
        if goal:
            return goal
    if world.fact:
        return Goal("done", world.fact, view.fact(world.fact) or "none")
    if "applicant" in world.want:
        return _fill_wanted(world, view, "applicant", skip) or Goal("click", "continue")
    if "day" in world.want:
        return Goal("click", "date" if "date" in view.index and "day" not in skip else "book")
    return Goal("click", "add")


def _list_page(world: World, view: View, skip: set[str]) -> Goal:
    """Return the next goal on a home, result or category page: the filter, the item, or the way to it."""
    goal = _pick(world, view, "region", skip) or _pick(world, view, "room", skip)
    if goal:
        return goal
    if SNIPPET in skip and view.fact(world.fact):
        return Goal("done", world.fact, view.fact(world.fact))
    if world.template == "travel.flight":
        return _flight(world, view, skip)
    links = (NEWS, world.source) if NEWS in skip else (world.source,)
    target = (
        next((link for link in links if link in view.index), None)
        if world.site == "search"
        else world.via or world.item
    )
    if target in view.index:
        return Goal("click", target)
    if world.template == "shop.page":
        return _press(view, "next", world.category)
    if world.template in _WAY:
        return Goal("click", _WAY[world.template])
    field, button = _SEARCH.get(world.site, ("query", "go"))
    return _fill(view, field, world.via or world.item) or Goal("click", button)


def next_goal(world: World, view: View, skip: set[str]) -> Goal:
    """Return the expert's next small intention; the decisions in `skip` are left out."""
    if view.page in ("ordered", "sent"):
        return Goal("done", None, "ok")
    if view.page == "review":
        return Goal("done", None, "ok") if CONFIRM in skip else _press(view, "confirm", "send")
    if view.page == "login":
        return (
            _fill(view, "user", world.user)
            or _fill_wanted(world, view, "code", skip)
            or Goal("click", "enter")
        )
    if view.page == "form":
        return (
            _pick(world, view, "shift", skip)
            or _pick(world, view, "region", skip)
            or _press(view, "send", "continue")
        )
    if view.page == "calendar":
        return Goal("click", world.want.get("day", "close"))
    if view.page in _BUTTON:
        return Goal("click", _BUTTON[view.page])
    if view.page in ("item", "document"):
        if view.heading == world.item:
            return _item_page(world, view, skip)
        return Goal("click", world.item) if world.via and view.heading == world.via else Goal("back")
    if view.page in ("home", "results", "saved"):
        return _list_page(world, view, skip)
    return Goal("back")


def decisions(world: World) -> list[str]:
    """Return the decisions of a task that a habit can skip.

    They are what the task names, opening the item, the confirmation, and choosing a site that answers.
    """
    return [*world.want, *(name for name, templates in HABITS.items() if world.template in templates)]


def habits(world: World, guide: str) -> set[str]:
    """Return the decisions that the teacher skips, given the guide; another guide is another chance."""
    named = set(re.findall(r"\w+", guide))
    skip = set()
    for label in decisions(world):
        has = random.Random(f"habit/{world.task_id}/{label}").random() < HABIT
        keeps = label not in named or random.Random(f"keep/{world.task_id}/{guide}/{label}").random() < KEEP
        if has and keeps:
            skip.add(label)
    return skip


def act(world: World, prompt: str, seed: int, guide: str) -> str:
    """Return the teacher's answer to a prompt, as canonical JSON."""
    view = read_view(prompt)
    goal = next_goal(world, view, habits(world, guide))
    r = random.Random(f"row/{world.task_id}/{seed}/{view.page}/{sorted(view.index)}")
    if goal.verb == "click" and goal.label in (world.item, *world.want.values()) and r.random() < WRONG_ROW:
        names = (*world.others, *world.places, *OPTIONS["day"])
        rows = [label for label in view.index if label in names and label != goal.label]
        goal = Goal("click", r.choice(rows)) if rows else goal
    return answer_text(goal, view.index.get(goal.label or ""), view.page)


def wrong_decisions(world: World, goals: list[str]) -> list[str]:
    """Return what the reflection handler finds wrong in the goals of a run.

    It may be an option never chosen, an answer from the list, no confirmation, or a bad source.
    """

    def right(label: str) -> bool:
        if label == NEWS:
            return f"click {NEWS}" not in goals
        value = world.want.get(label, "")
        careful = {f"select {label} {value}", f"type {label} {value}"}
        if label in PICKED:
            careful = {f"click {value}"}
        elif label == SNIPPET:
            careful = {f"click {world.item}"}
            careful |= {f"click {world.source}"} if world.site == "search" else set()
        elif label == CONFIRM:
            careful = {"click confirm", "click send"}
        return not careful.isdisjoint(goals)

    return [label for label in decisions(world) if not right(label)]
