"""Tasks of the playground: seeded templates, what each task's little world holds, and the check of its outcome.

Purpose: a `World` is everything that is true for one task: the names on its pages, the facts, what is wanted, and what the server
assumes where nothing is chosen. The Task record that an agent gets carries the text only. Splits have names of their own, and the
template `wiki.related` occurs in held-out tasks alone.

ours: an unchosen option silently takes a default that is right in half of the tasks, and result lists show a fact that is stale in
half of them, so that careless runs succeed by luck often enough to get into a corpus of successes.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rmsweb.playground.words import entities
from rmsweb.records import Split, Task

TEMPLATES = ("shop.buy", "shop.find", "shop.page", "jobs.apply", "jobs.fact", "jobs.login", "wiki.fact")
UNSEEN = ("wiki.related",)  # held-out only
FACTS = {"shop": ("price", "stock", "rating"), "jobs": ("salary", "hours", "team"), "wiki": ("area", "height", "founded")}
OPTIONS = {
    "color": ("red", "blue", "green", "black", "white", "yellow", "purple", "orange", "brown", "silver"),
    "size": ("small", "medium", "large", "narrow", "wide", "slim"),
    "region": ("north", "south", "east", "west", "coast", "valley", "island", "city"),
    "sort": ("name", "price", "rating"),
    "shift": ("morning", "evening", "night", "day", "weekly", "late", "early"),
}
CATEGORIES = ("chairs", "lamps", "tables")
LUCK = 0.5  # share of tasks in which a shortcut does no harm
CATEGORY = {
    "shop.buy": "E-Commerce",
    "shop.find": "E-Commerce",
    "shop.page": "E-Commerce",
    "jobs.apply": "Corporate & Careers",
    "jobs.fact": "Corporate & Careers",
    "jobs.login": "Corporate & Careers",
    "wiki.fact": "Education",
    "wiki.related": "Education",
}
PHRASES: dict[str, tuple[str, ...]] = {
    "shop.buy": ("At shop buy {item} in color {color} and size {size}", "Buy {item} at shop with size {size} and color {color}"),
    "shop.find": ("At shop tell the {fact} of {item} in color {color}", "Tell the {fact} of {item} with color {color} at shop"),
    "shop.page": ("At shop tell the {fact} of {item} from category {category}", "Tell the {fact} of {item} in category {category} at shop"),
    "jobs.apply": (
        "At jobs apply for {item} as applicant {applicant} with shift {shift}",
        "Apply for {item} at jobs with shift {shift} as applicant {applicant}",
    ),
    "jobs.fact": ("At jobs tell the {fact} of {item} in region {region}", "Tell the {fact} of {item} with region {region} at jobs"),
    "jobs.login": (
        "At jobs login as user {user} with code {code} then tell the {fact} of {item}",
        "Log in at jobs with code {code} as user {user} then tell the {fact} of {item}",
    ),
    "wiki.fact": ("At wiki tell the {fact} of {item}", "Tell the {fact} of {item} at wiki"),
    "wiki.related": ("At wiki open {via} then tell the {fact} of {item}",),
}  # fmt: skip
WANTED = {"shop.buy": ("color", "size"), "shop.find": ("color",), "jobs.apply": ("applicant", "shift"), "jobs.fact": ("region",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What is true for one task."""

    template: str
    seed: int
    split: Split
    item: str  # what the task is about
    others: tuple[str, ...]  # names that stand beside it
    text: str
    fact: str | None = None  # asked for, where the task asks
    want: dict[str, str] = field(default_factory=dict)  # label -> value that the task names
    default: dict[str, str] = field(default_factory=dict)  # label -> value that the server assumes
    lucky: bool = False  # the list's fact is right
    via: str = ""  # wiki.related: the article that links to the item
    category: str = ""  # shop.page
    user: str = ""  # jobs.login
    code: str = ""

    @property
    def site(self) -> str:
        return self.template.split(".")[0]

    @property
    def task_id(self) -> str:
        return f"{self.template}-{self.split}-{self.seed}"

    def facts(self, name: str, option: str = "") -> dict[str, str]:
        """The facts of a name, numbers 20..99; they depend on the chosen option where there is one."""
        r = random.Random(f"{self.task_id}/{name}/{option}")
        labels = FACTS[self.site]
        return dict(zip(labels, map(str, r.sample(range(20, 100), len(labels))), strict=True))

    def option(self, label: str, chosen: dict[str, str]) -> str:
        """What holds for a label: the choice, else the default; empty where the task is not about it."""
        return chosen.get(label, self.default.get(label, "")) if label in self.want else ""

    @property
    def answer(self) -> str | None:
        """The number that the task asks for."""
        key = next((label for label in ("color", "region") if label in self.want), "")
        return None if self.fact is None else self.facts(self.item, self.want.get(key, ""))[self.fact]

    @property
    def snippet(self) -> str:
        """What the result list says of the asked fact: right in the lucky tasks."""
        assert self.fact is not None
        right = self.answer
        r = random.Random(f"stale/{self.task_id}")
        return str(right) if self.lucky else r.choice([str(n) for n in range(20, 100) if str(n) != right])

    def solved(self, answer: str | None, committed: dict[str, str] | None) -> tuple[bool, str]:
        """The check of the outcome by answer text and server state -> (success, reason)."""
        if self.fact is not None:
            numbers = re.findall(r"\d+", answer or "")
            return numbers == [self.answer], f"answered {answer!r}, expected {self.answer}"
        expected = {**self.want, "item": self.item}
        return committed == expected, f"the server has {committed}, expected {expected}"

    def task(self) -> Task:
        """The record that an agent gets."""
        environment: dict[str, Any] = {"site": self.site, "template": self.template, "seed": self.seed}
        return Task(
            task_id=self.task_id,
            text=self.text,
            start_url=f"http://{self.site}.localhost/",
            split=self.split,
            benchmark="playground",
            category=CATEGORY[self.template],
            environment=environment,
        )


@cache
def make_world(template: str, seed: int, split: Split) -> World:
    """The world of one task: a function of its three arguments."""
    r = random.Random(f"{template}/{seed}/{split}")
    item, *others = r.sample(entities(split), 14)
    site = template.split(".")[0]
    values = {
        "item": item,
        "fact": r.choice(FACTS[site]),
        "category": r.choice(CATEGORIES),
        "user": others[9],
        "code": str(r.randrange(20, 100)),
        "via": others[8],
    }
    want: dict[str, str] = {}
    default: dict[str, str] = {}
    for label in WANTED.get(template, ()):
        choices = OPTIONS.get(label) or others[10:]
        value, other = r.sample(choices, 2)
        want[label] = value
        default[label] = value if r.random() < LUCK else other
        values[label] = value
    phrase = r.choice(PHRASES[template])
    return World(
        template=template,
        seed=seed,
        split=split,
        item=item,
        others=tuple(others[:8]),
        text=phrase.format(**values),
        fact=values["fact"] if "{fact}" in phrase else None,
        want=want,
        default=default,
        lucky=r.random() < LUCK,
        via=values["via"] if template == "wiki.related" else "",
        category=values["category"] if template == "shop.page" else "",
        user=values["user"] if template == "jobs.login" else "",
        code=values["code"] if template == "jobs.login" else "",
    )


def make_worlds(split: Split, count: int) -> list[World]:
    """`count` worlds with different texts, balanced over the split's templates; a longer list begins with the shorter one."""
    templates = TEMPLATES + (UNSEEN if split == "held-out" else ())
    worlds: dict[str, World] = {}
    number = 0
    while len(worlds) < count:
        world = make_world(templates[number % len(templates)], number, split)
        worlds.setdefault(world.text, world)
        number += 1
    return list(worlds.values())


def world_of(task: Task) -> World:
    """The world of a task record; ValueError where it is not the playground's."""
    try:
        world = make_world(str(task.environment["template"]), int(task.environment["seed"]), task.split)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"task {task.task_id}: not a playground task ({error})") from None
    if world.text != task.text:
        raise ValueError(f"task {task.task_id}: its text {task.text!r} is not the playground's {world.text!r}; write the task files again")
    return world


@cache
def world_by_text(text: str) -> World | None:
    """The world that a task text belongs to, for the scripted roles: they know the playground's tasks by their text."""
    return _worlds_by_text().get(text)


@cache
def _worlds_by_text() -> dict[str, World]:
    splits: Sequence[Split] = ("train", "dev", "held-out")
    return {world.text: world for split in splits for world in make_worlds(split, 1500)}
