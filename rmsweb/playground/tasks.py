"""Tasks of the playground: seeded templates, the world of each task, and the check of its outcome.

Purpose: a `World` is everything that is true for one task: the names on its pages, the facts, what is wanted,
and what the server assumes if nothing is chosen. The Task record that an agent gets carries the text only.
Each split has its own names, and the templates of UNSEEN occur in held-out tasks alone.

ours: an option that nobody chose silently takes a default, which is right in half of the tasks. In half of
them result lists show a stale fact, a request that is not confirmed is lost, and the news site answers 403.
So careless runs succeed by luck often enough to get into a corpus of successes.
"""

import random
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rmsweb.playground.words import entities
from rmsweb.records import Split, Task

TEMPLATES = (
    "shop.buy",
    "shop.find",
    "shop.page",
    "jobs.apply",
    "jobs.fact",
    "jobs.login",
    "wiki.fact",
    "travel.flight",
    "travel.date",
    "travel.stay",
    "office.form",
    "office.document",
    "office.section",
    "search.wiki",
    "search.jobs",
    "search.news",
)
UNSEEN = ("wiki.related", "search.shop")  # held-out only
FACTS = {
    "shop": ("price", "stock", "rating"),
    "jobs": ("salary", "hours", "team"),
    "wiki": ("area", "height", "founded"),
    "travel": ("fare", "rate", "duration"),
    "office": ("fee", "phone", "number"),
}
OPTIONS = {
    "color": ("red", "blue", "green", "black", "white", "yellow", "purple", "orange", "brown", "silver"),
    "size": ("small", "medium", "large", "narrow", "wide", "slim"),
    "region": ("north", "south", "east", "west", "coast", "valley", "island", "city"),
    "sort": ("name", "price", "rating"),
    "shift": ("morning", "evening", "night", "day", "weekly", "late", "early"),
    "room": ("family", "quiet", "single", "double", "suite", "standard"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
}
CATEGORIES = ("chairs", "lamps", "tables")
LUCK = 0.5  # share of tasks in which a shortcut does no harm
CATEGORY = {
    "shop": "E-Commerce",
    "jobs": "Corporate & Careers",
    "wiki": "Education",
    "travel": "Travel & Hospitality",
    "office": "Government",
    "search": "Other",
}
SOURCE = {"search.news": "wiki"}  # the site with the answer of a search task, unless its template names it
PHRASES: dict[str, tuple[str, ...]] = {
    "shop.buy": (
        "At shop buy {item} in color {color} and size {size}",
        "Buy {item} at shop with size {size} and color {color}",
    ),
    "shop.find": (
        "At shop tell the {fact} of {item} in color {color}",
        "Tell the {fact} of {item} with color {color} at shop",
    ),
    "shop.page": (
        "At shop tell the {fact} of {item} from category {category}",
        "Tell the {fact} of {item} in category {category} at shop",
    ),
    "jobs.apply": (
        "At jobs apply for {item} as applicant {applicant} with shift {shift}",
        "Apply for {item} at jobs with shift {shift} as applicant {applicant}",
    ),
    "jobs.fact": (
        "At jobs tell the {fact} of {item} in region {region}",
        "Tell the {fact} of {item} with region {region} at jobs",
    ),
    "jobs.login": (
        "At jobs login as user {user} with code {code} then tell the {fact} of {item}",
        "Log in at jobs with code {code} as user {user} then tell the {fact} of {item}",
    ),
    "wiki.fact": (
        "At wiki tell the {fact} of {item}",
        "Tell the {fact} of {item} at wiki",
        "At wiki what is the {fact} of {item}",
    ),
    "wiki.related": ("At wiki open {via} then tell the {fact} of {item}",),
    "travel.flight": (
        "At travel book a flight from origin {origin} to destination {destination}",
        "At travel book a flight to destination {destination} from origin {origin}",
    ),
    "travel.date": (
        "At travel book hotel {item} for day {day}",
        "On day {day} book hotel {item} at travel",
    ),
    "travel.stay": (
        "At travel tell the {fact} of hotel {item} in room {room}",
        "Tell the {fact} of hotel {item} with room {room} at travel",
    ),
    "office.form": (
        "At office send form {item} as applicant {applicant} for region {region}",
        "At office send form {item} for region {region} with applicant {applicant}",
    ),
    "office.document": (
        "At office what is the {fact} of document {item}",
        "Tell the {fact} of document {item} at office",
    ),
    "office.section": (
        "At office open {via} then tell the {fact} of {item}",
        "Open {via} at office then tell the {fact} of {item}",
    ),
    "search.wiki": (
        "At search find {item} then tell the {fact} from wiki",
        "Find {item} at search then tell the {fact} from wiki",
    ),
    "search.jobs": (
        "At search find {item} then tell the {fact} from jobs",
        "Find {item} at search then tell the {fact} from jobs",
    ),
    "search.shop": ("At search find {item} then tell the {fact} from shop",),
    "search.news": (
        "At search find {item} then tell the {fact} from any page",
        "Find {item} at search and tell the {fact} from any page",
    ),
}
WANTED = {
    "shop.buy": ("color", "size"),
    "shop.find": ("color",),
    "jobs.apply": ("applicant", "shift"),
    "jobs.fact": ("region",),
    "jobs.login": ("code",),
    "travel.flight": ("origin", "destination"),
    "travel.date": ("day",),
    "travel.stay": ("room",),
    "office.form": ("applicant", "region"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What is true for one task."""

    template: str
    seed: int
    split: Split
    item: str  # what the task is about
    others: tuple[str, ...]  # other names on the pages
    text: str
    fact: str | None = None  # what the task asks for, if it asks
    want: dict[str, str] = field(default_factory=dict)  # label -> value that the task names
    default: dict[str, str] = field(default_factory=dict)  # label -> value that the server assumes
    # whether the shortcut works: the fact in the list, the unconfirmed request, the news site
    lucky: bool = False
    via: str = ""  # wiki.related, office.section: the page that links to the item
    category: str = ""  # shop.page
    user: str = ""  # jobs.login

    @property
    def site(self) -> str:
        return self.template.split(".")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have pages."""
        return (self.item, *self.others, *((self.via,) if self.via else ()))

    @property
    def task_id(self) -> str:
        return f"{self.template}-{self.split}-{self.seed}"

    @property
    def source(self) -> str:
        """The site whose facts the task asks for."""
        return SOURCE.get(self.template, self.template.split(".")[1]) if self.site == "search" else self.site

    def facts(self, site: str, name: str, option: str = "") -> dict[str, str]:
        """Return a site's facts of a name, numbers from 20 to 99; they depend on the chosen option."""
        r = random.Random(f"{self.task_id}/{site}/{name}/{option}")
        labels = FACTS[site]
        return dict(zip(labels, map(str, r.sample(range(20, 100), len(labels))), strict=True))

    def option(self, label: str, chosen: dict[str, str]) -> str:
        """Return what the server takes for a label: the choice, else the default.

        Empty if the task is not about the label.
        """
        return chosen.get(label, self.default.get(label, "")) if label in self.want else ""

    @property
    def places(self) -> tuple[str, ...]:
        """What the flight form suggests: each wanted place and the name that follows it in the alphabet."""
        wanted = [self.want[label] for label in ("origin", "destination") if label in self.want]
        names = sorted(set(entities(self.split)) - {self.item, *self.others, *wanted})
        return tuple(sorted({*wanted, *(names[bisect(names, name) % len(names)] for name in wanted)}))

    def choices(self, label: str) -> tuple[str, ...]:
        """Return what a site accepts for a label."""
        return self.places if label in ("origin", "destination") else OPTIONS.get(label, ())

    @property
    def answer(self) -> str | None:
        """The number that the task asks for."""
        option = next((self.want[label] for label in ("color", "region", "room") if label in self.want), "")
        return None if self.fact is None else self.facts(self.source, self.item, option)[self.fact]

    @property
    def snippet(self) -> str:
        """What the result list says of the fact that the task asks for; right in the lucky tasks."""
        assert self.fact is not None
        right = self.answer
        r = random.Random(f"stale/{self.task_id}")
        return str(right) if self.lucky else r.choice([str(n) for n in range(20, 100) if str(n) != right])

    def solved(self, answer: str | None, committed: dict[str, str] | None) -> tuple[bool, str]:
        """Check the outcome by answer text and server state; return (success, reason)."""
        if self.fact is not None:
            numbers = re.findall(r"\d+", answer or "")
            return numbers == [self.answer], f"answered {answer!r}, expected {self.answer}"
        expected = self.want | ({} if self.template == "travel.flight" else {"item": self.item})
        return committed == expected, f"the server has {committed}, expected {expected}"

    def task(self, trouble: float = 0.0) -> Task:
        """Return the record that an agent gets.

        Args: trouble: share of the pages that answer late and with status 503 at first.
        """
        environment: dict[str, Any] = {"site": self.site, "template": self.template, "seed": self.seed}
        environment |= {"trouble": trouble} if trouble else {}
        return Task(
            task_id=self.task_id,
            text=self.text,
            start_url=f"http://{self.site}.localhost/",
            split=self.split,
            benchmark="playground",
            category=CATEGORY[self.site],
            environment=environment,
        )


@cache
def make_world(template: str, seed: int, split: Split) -> World:
    """Return the world of one task, a function of its three arguments."""
    r = random.Random(f"{template}/{seed}/{split}")
    item, *others = r.sample(entities(split), 18)
    site, kind = template.split(".")
    facts = FACTS[SOURCE.get(template, kind if site == "search" else site)]
    values = {
        "item": item,
        "fact": r.choice(facts),
        "category": r.choice(CATEGORIES),
        "user": others[9],
        "via": others[8],
    }
    free = {
        "origin": others[12:14],
        "destination": others[14:16],
        "applicant": others[10:12],
        "code": [str(n) for n in range(20, 100)],
    }
    want: dict[str, str] = {}
    default: dict[str, str] = {}
    for label in WANTED.get(template, ()):
        value, other = r.sample(OPTIONS.get(label) or free[label], 2)
        want[label] = value
        default[label] = value if r.random() < LUCK else other
        values[label] = value
    phrase = r.choice(PHRASES[template])
    given = {name: value if f"{{{name}}}" in phrase else "" for name, value in values.items()}
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
        via=given["via"],
        category=given["category"],
        user=given["user"],
    )


def make_worlds(split: Split, count: int) -> list[World]:
    """Return `count` worlds with different texts, balanced over the split's templates.

    A longer list begins with the shorter one.
    """
    templates = TEMPLATES + (UNSEEN if split == "held-out" else ())
    worlds: dict[str, World] = {}
    number = 0
    while len(worlds) < count:
        world = make_world(templates[number % len(templates)], number, split)
        worlds.setdefault(world.text, world)
        number += 1
    return list(worlds.values())


def world_of(task: Task) -> World:
    """Return the world of a task record; ValueError if it is not the playground's."""
    try:
        world = make_world(str(task.environment["template"]), int(task.environment["seed"]), task.split)
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"task {task.task_id}: not a playground task ({error})") from None
    if world.text != task.text:
        raise ValueError(
            f"task {task.task_id}: its text {task.text!r} is not the playground's {world.text!r}; "
            "write the task files again"
        )
    return world


@cache
def world_by_text(text: str) -> World | None:
    """Return the world of a task's text; the scripted roles know the playground's tasks by their text."""
    return _worlds_by_text().get(text)


@cache
def _worlds_by_text() -> dict[str, World]:
    splits: Sequence[Split] = ("train", "dev", "held-out")
    return {world.text: world for split in splits for world in make_worlds(split, 1500)}
