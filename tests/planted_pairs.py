"""Pairs of runs with one planted error, on made-up sites: the oracle of the divergence search.

A plan is a list of intents on a small state machine (a shop, an office, a reference site). The success
carries it out; the failing run carries it out with one error at one decision. Both then get noise of their
own: detours that are taken back, another order of independent choices, scrolling and waiting, several actions
in one step, pages seen before, advertisements. The critical step is the last one in which the success took
the decision that the failing run got wrong.

Frozen: the search was tuned on seeds from 10,000 on, and the figures of docs are of seeds below 1,000.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rmsweb.browser.actions import canonical_text
from rmsweb.mining.alignment import AlignedRun
from rmsweb.prompt import PromptConfig
from rmsweb.records import (
    Action,
    ActionResult,
    AgentOutput,
    Element,
    Ended,
    Image,
    Observation,
    Source,
    Step,
    Task,
    Trajectory,
)

CONFIG = PromptConfig(thinking=False)
COLORS = ("red", "blue", "green", "white")
SIZES = ("small", "medium", "large")
REGIONS = ("north", "south", "east", "west")
THINGS = ("lamp", "chair", "kettle", "tent", "guitar", "bicycle", "jacket", "camera")
KINDS = ("oak", "steel", "paper", "glass", "city", "river", "cotton", "pocket")
FORMS = ("parking permit", "library card", "dog licence", "street party", "tree survey", "garden waste")
OFFICES = ("harbour", "market", "station", "castle")
PEOPLE = ("Ann Bell", "Tom Reed", "Ida Moss", "Jon Hale")
DATES = ("2026-03-04", "2026-05-11", "2026-07-23", "2026-09-30")
FACTS = ("weight", "maker", "height", "price")
NEWS = (
    "Summer sale ends soon",
    "Read our story",
    "Rated 4 by 200 people",
    "New: gift cards",
    "Cookies are used",
)


@dataclass(frozen=True)
class Intent:
    """One action by the label of its element; `decision` names the choice that it carries out."""

    verb: str  # click, type, select, back, scroll, wait, done
    label: str = ""
    value: str = ""
    decision: str = ""


@dataclass(frozen=True)
class Place:
    """The state of a site."""

    page: str = "home"
    query: str = ""
    region: str = ""
    number: int = 1
    item: str = ""
    chosen: tuple[tuple[str, str], ...] = ()

    def choose(self, label: str, value: str) -> "Place":
        return replace(self, chosen=tuple(sorted({**dict(self.chosen), label: value}.items())))


@dataclass(frozen=True)
class Site:
    """A site and a task on it."""

    kind: str  # shop, office, reference
    host: str
    item: str
    others: tuple[str, ...]
    wanted: dict[str, str]  # control -> value
    text: str
    plan: tuple[Intent, ...]
    fact: str = ""
    one_url: bool = False  # an app whose address never changes
    swatches: bool = False  # options are buttons, and the page says what was chosen
    counter: bool = False  # the navigation counts what was looked at

    @property
    def rows(self) -> list[str]:
        return sorted([self.item, *self.others])


@dataclass(frozen=True)
class Planted:
    """A pair, the error planted in it, its true label, and the steps (from 1) that are right to find."""

    success: AlignedRun
    failure: AlignedRun
    error: str
    label: str
    decision: str
    critical: int


# ------------------------------------------------------------------------------------------------- the sites


def make_site(r: random.Random, number: int) -> Site:
    """Return a site with a task, by the generator's draw."""
    kind = r.choice(("shop", "office", "reference"))
    host = f"{kind}{number}.example"
    if kind == "office":
        item, *others = r.sample(FORMS, 4)
        wanted = {"Name": r.choice(PEOPLE), "Date": r.choice(DATES), "Office": r.choice(OFFICES)}
        plan = [
            Intent("click", "Forms", decision="section"),
            Intent("click", item, decision="row"),
            Intent("type", "Name", wanted["Name"], "Name"),
            Intent("type", "Date", wanted["Date"], "Date"),
            Intent("select", "Office", wanted["Office"], "Office"),
            Intent("click", "Continue", decision="continue"),
            Intent("click", "Send", decision="confirm"),
            Intent("done", value="sent", decision="done"),
        ]
        text = f"Apply for a {item} for {wanted['Name']} on {wanted['Date']} at the {wanted['Office']} office"
        return Site(kind, host, item, tuple(others), wanted, text, tuple(plan))
    thing = r.choice(THINGS)
    item, *others = (f"{word} {thing}" for word in r.sample(KINDS, 5))
    region = r.choice(REGIONS)
    find = [
        Intent("type", "Search", thing, "query"),
        Intent("click", "Go", decision="go"),
        Intent("select", "Region", region, "Region"),
        Intent("click", item, decision="row"),
    ]
    if kind == "reference":
        fact = r.choice(FACTS)
        plan = [
            *find,
            Intent("click", "Details", decision="detail"),
            Intent("done", value=f"{fact} {len(item)}", decision="done"),
        ]
        text = f"Tell me the {fact} of the {item} that is made in the {region}"
        return Site(kind, host, item, tuple(others), {"Region": region}, text, tuple(plan), fact)
    wanted = {"Region": region, "Color": r.choice(COLORS), "Size": r.choice(SIZES)}
    plan = [
        *find,
        Intent("select", "Color", wanted["Color"], "Color"),
        Intent("select", "Size", wanted["Size"], "Size"),
        Intent("click", "Add to cart", decision="add"),
        Intent("click", "Checkout", decision="checkout"),
        Intent("click", "Place order", decision="confirm"),
        Intent("done", value="ordered", decision="done"),
    ]
    text = f"Order the {item} from the {region} in color {wanted['Color']} and size {wanted['Size']}"
    return Site(kind, host, item, tuple(others), wanted, text, tuple(plan))


CHOICES = {"Color": COLORS, "Size": SIZES, "Region": REGIONS, "Office": OFFICES}


def controls(site: Site, at: Place) -> list[tuple[str, str]]:
    """Return (tag, label) of the page's own controls, `#text` for a line."""
    rows = [("a", row) for row in site.rows]
    found: dict[str, list[tuple[str, str]]] = {
        "home": [("#text", "Welcome"), ("input", "Search"), ("button", "Go"), ("a", "Forms"), ("a", "Deals")],
        "results": [("#text", f"Results for {at.query}"), ("select", "Region"), *rows, ("a", "Next page")],
        "list": [("#text", "All forms"), *rows, ("a", "Archive")],
        "deals": [("#text", "Deals of the week"), *[("a", f"deal {row}") for row in site.rows]],
        "help": [("#text", "How can we help?"), ("a", "Contact"), ("a", "Returns")],
        "cart": [("#text", f"Cart: {at.item}"), ("button", "Checkout"), ("a", "Keep looking")],
        "wishlist": [("#text", f"Saved: {at.item}"), ("a", "Keep looking")],
        "review": [("#text", f"Check your order: {at.item}"), ("button", "Place order"), ("button", "Send")],
        "end": [("#text", "Thank you"), ("a", "Home page")],
        "details": [("#text", f"{site.fact} {len(at.item)}"), ("a", "Overview")],
        "draft": [("#text", "Draft saved"), ("a", "Keep looking")],
    }
    item: dict[str, list[tuple[str, str]]] = {
        "shop": [
            ("select", "Color"),
            ("select", "Size"),
            ("button", "Add to cart"),
            ("button", "Add to wishlist"),
        ],
        "office": [("input", "Name"), ("input", "Date"), ("select", "Office"), ("button", "Continue")],
        "reference": [("a", "Details"), ("a", "Reviews")],
    }
    if at.page == "item":
        return [("#text", at.item), *item[site.kind], ("button", "Show more"), ("button", "Save draft")]
    return found[at.page]


def shown_controls(site: Site, at: Place, looks: int) -> list[tuple[str, str]]:
    """Return (tag, label) of all that a page shows, in the site's style."""
    bar = [("a", "Home"), ("a", "Help")]
    bar += [("#text", f"seen {looks}")] if site.counter else []
    own = controls(site, at)
    if not site.swatches:
        return [*bar, *own]
    spread = []
    for tag, label in own:
        if tag == "select":
            chosen = {**dict(at.chosen), "Region": at.region}.get(label, "")
            spread += [("#text", f"{label}: {chosen or 'none'}")]
            spread += [("button", value) for value in CHOICES[label]]
        else:
            spread.append((tag, label))
    return [*bar, *spread]


def move(site: Site, at: Place, intent: Intent) -> Place:
    """Return the site's state after an intent; `back` is the runner's business."""
    label = intent.label
    if intent.verb in ("type", "select"):
        if label == "Region":
            return replace(at, region=intent.value)
        return at.choose(label, intent.value)
    if intent.verb != "click":
        return at
    ways = {
        "Go": Place("results", query=dict(at.chosen).get("Search", "")),
        "Forms": Place("list"),
        "Deals": Place("deals"),
        "Help": Place("help"),
        "Home": Place("home"),
        "Next page": replace(at, number=at.number + 1),
        "Details": replace(at, page="details"),
        "Add to cart": replace(at, page="cart"),
        "Add to wishlist": replace(at, page="wishlist"),
        "Checkout": replace(at, page="review"),
        "Continue": replace(at, page="review"),
        "Place order": replace(at, page="end"),
        "Send": replace(at, page="end"),
        "Save draft": replace(at, page="draft"),
    }
    if label in ways:
        return ways[label]
    name = label.removeprefix("deal ")
    return Place("item", item=name) if name in site.rows else at


def url(site: Site, at: Place) -> str:
    base = f"http://{site.host}"
    if site.one_url:
        return f"{base}/app"
    if at.page == "results":
        region = f"&region={at.region}" if at.region else ""
        return f"{base}/results?q={at.query}&page={at.number}{region}"
    if at.page in ("item", "details"):
        return f"{base}/{site.kind}/{at.item.replace(' ', '-')}" + (
            "/details" if at.page == "details" else ""
        )
    return f"{base}/{'' if at.page == 'home' else at.page}"


# -------------------------------------------------------------------------------------------------- the runs


@dataclass
class Runner:
    """Carries out a plan and writes down the steps."""

    site: Site
    r: random.Random
    name: str
    memory: bool
    at: Place = field(default_factory=Place)
    history: list[Place] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    decisions: list[set[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def observe(self) -> Observation:
        shown = shown_controls(self.site, self.at, len(self.history))
        shown += [("#text", line) for line in self.r.sample(NEWS, self.r.randrange(3))]
        start, nodes, chosen = self.r.choice((1, 1, 4)), list[Element](), dict(self.at.chosen)
        chosen["Region"] = self.at.region
        for place, (tag, label) in enumerate(shown):
            index = (
                None if tag == "#text" else start + len([node for node in nodes if node.index is not None])
            )
            field_like = tag in ("input", "select")
            nodes.append(
                Element(
                    index=index,
                    node_key=str(place),
                    tag=tag,
                    text="" if field_like else label,
                    attributes={"name": label} if field_like else {},
                    value=chosen.get(label, "") if field_like else None,
                    options=("choose", *CHOICES[label]) if tag == "select" else (),
                    box=(10.0, 30.0 * place, 100.0, 25.0),
                )
            )
            if tag in ("a", "button"):
                nodes.append(Element(index=None, node_key=f"{place}t", tag="#text", text=label, depth=1))
        address = url(self.site, self.at)
        return Observation(
            url=address,
            title=f"{self.site.host} {self.at.page}",
            tabs=(),
            active_tab="0001",
            viewport=(640, 480),
            nodes=tuple(nodes),
            screenshot=Image(path="screenshots/p.png", sha256="p", width=640, height=480),
            fingerprint=f"{address} {sorted(chosen.items())}",
        )

    def _action(self, intent: Intent, seen: Observation) -> Action:
        plain: dict[str, tuple[str, dict[str, Any]]] = {
            "back": ("go_back", {}),
            "scroll": ("scroll", {"down": True, "num_pages": 1.0}),
            "wait": ("wait", {"seconds": 1}),
            "done": ("done", {"text": intent.value, "success": True}),
        }
        if intent.verb in plain:
            name, params = plain[intent.verb]
            return Action(name=name, params=params)
        swatch = intent.verb == "select" and self.site.swatches
        label = intent.value if swatch else intent.label
        index = next(
            node.index
            for node in seen.nodes
            if node.index is not None and label in (node.text, node.attributes.get("name"))
        )
        if intent.verb == "click" or swatch:
            return Action(name="click_element_by_index", params={"index": index})
        verb = "input_text" if intent.verb == "type" else "select_dropdown_option"
        return Action(name=verb, params={"index": index, "text": intent.value})

    def turn(self, intents: list[Intent]) -> None:
        """Carry out intents in one step; all elements must be on the page of the first."""
        seen = self.observe()
        actions = tuple(self._action(intent, seen) for intent in intents)
        for intent in intents:
            before = self.at
            if intent.verb == "back":
                self.at = self.history.pop()
            else:
                self.at = move(self.site, self.at, intent)
                went = intent.verb == "click" and self.at != before
                if went or self.at.region != before.region:
                    self.history.append(before)
            self.notes += [f"{intent.verb} {intent.label} {intent.value}".strip()] * bool(intent.decision)
        output = AgentOutput(
            actions=actions,
            memory="; ".join(self.notes[-3:]) if self.memory else "",
            next_goal=f"{intents[0].verb} {intents[0].label}",
        )
        ends = actions[0].name == "done"
        self.steps.append(
            Step(
                number=len(self.steps) + 1,
                observation=seen,
                response_text=canonical_text(output, thinking=False),
                output=output,
                results=tuple(
                    ActionResult(message="did", is_done=ends, success=True if ends else None) for _ in actions
                ),
            )
        )
        self.decisions.append({intent.decision for intent in intents if intent.decision})

    def run(self, plan: list[Intent], success: bool) -> AlignedRun:
        """Carry out a plan, now and then with two intents of one page in a step."""
        rest = list(plan)
        while rest:
            first = rest.pop(0)
            together = [first]
            if rest and first.verb in ("type", "select") and rest[0].verb in ("type", "select", "click"):
                labels = {label for _, label in controls(self.site, self.at)}
                if rest[0].label in labels and first.label != "Region" and self.r.random() < 0.15:
                    together.append(rest.pop(0))
            self.turn(together)
        last = plan[-1]
        ended: Ended = "done" if last.verb == "done" else "max_steps"
        return AlignedRun(
            Trajectory(
                trajectory_id=self.name,
                task=Task(
                    task_id=self.site.host,
                    text=self.site.text,
                    start_url=f"http://{self.site.host}/",
                    split="train",
                    benchmark="planted",
                ),
                source=Source(script="evaluate", policy="planted"),
                steps=tuple(self.steps),
                final_text=last.value if ended == "done" else None,
                declared_success=True if ended == "done" else None,
                ended=ended,
                prompt_config=CONFIG.hash,
            ),
            success,
        )


# ------------------------------------------------------------------------------------------------- the noise


def reordered(plan: list[Intent], r: random.Random) -> list[Intent]:
    """Swap neighbouring choices on one page that do not depend on each other."""
    plan = list(plan)
    for place in range(len(plan) - 1):
        a, b = plan[place], plan[place + 1]
        free = {a.label, b.label} <= {"Color", "Size", "Name", "Date", "Office"}
        if free and a.label != b.label and r.random() < 0.5:
            plan[place], plan[place + 1] = b, a
    return plan


def with_noise(plan: list[Intent], site: Site, r: random.Random) -> list[Intent]:
    """Insert detours that are taken back, idle steps, and pages that are seen again."""
    noisy: list[Intent] = []
    page = "home"
    for intent in reordered(plan, r):
        if r.random() < 0.12:
            noisy += r.choice(
                (
                    [Intent("click", "Help"), Intent("back")],
                    [Intent("scroll")],
                    [Intent("wait")],
                    [Intent("scroll"), Intent("scroll")],
                )
            )
        if page in ("results", "list") and r.random() < 0.15:
            noisy += [Intent("click", r.choice(site.others)), Intent("back")]
        if page == "results" and r.random() < 0.1:
            noisy += [Intent("click", "Next page"), Intent("back")]
        if page == "home" and intent.decision in ("query", "section") and r.random() < 0.12:
            noisy += [Intent("click", "Deals"), Intent("click", "Home")]
        if page == "home" and intent.decision == "go" and r.random() < 0.12:
            query = next(item for item in reversed(noisy) if item.label == "Search")
            noisy += [intent, Intent("click", "Home"), query]
        if intent.verb == "type" and r.random() < 0.1:
            noisy.append(Intent("type", intent.label, f"{intent.value} x"))
        if intent.verb == "select" and intent.label != "Region" and r.random() < 0.1:
            other = r.choice([name for name in CHOICES[intent.label] if name != intent.value])
            noisy.append(Intent("select", intent.label, other))
        noisy.append(intent)
        page = {"Go": "results", "Forms": "list", "Deals": "deals"}.get(intent.label, page)
        if intent.label in site.rows:
            page = "item"
        if intent.label in ("Add to cart", "Add to wishlist", "Continue", "Details", "Save draft"):
            page = "later"
    return noisy


# ------------------------------------------------------------------------------------------------ the errors

Change = Callable[[list[Intent], int, Site, random.Random], list[Intent]]


def _other(site: Site, label: str, value: str, r: random.Random) -> str:
    pools = {**CHOICES, "Name": PEOPLE, "Date": DATES, "Search": THINGS}
    return r.choice([name for name in pools[label] if name != value])


def wrong_row(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    return [*plan[:at], replace(plan[at], label=r.choice(site.others)), *plan[at + 1 :]]


def wrong_value(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    other = _other(site, plan[at].label, plan[at].value, r)
    return [*plan[:at], replace(plan[at], value=other), *plan[at + 1 :]]


def omitted(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    return [*plan[:at], *plan[at + 1 :]]


def premature_end(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    return [*plan[:at], Intent("done", value="all is done", decision="done")]


def wrong_button(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    button = "Add to wishlist" if site.kind == "shop" else "Save draft"
    return [*plan[:at], Intent("click", button), Intent("done", value="all is done", decision="done")]


def stuck(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    labels = {"item": "Show more", "review": "Help"}
    page = "review" if plan[at].decision in ("confirm", "checkout") else "item"
    again = [Intent("click", labels[page])] if page == "item" else [Intent("click", "Help"), Intent("back")]
    return [*plan[:at], *again * 4]


def wrong_start(plan: list[Intent], at: int, site: Site, r: random.Random) -> list[Intent]:
    deal = Intent("click", f"deal {r.choice(site.others)}")
    return [Intent("click", "Deals"), deal, Intent("done", value="none found", decision="done")]


# error -> (change, true label, decisions at which it can be planted)
ERRORS: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "wrong row": (wrong_row, "constraint", ("row",)),
    "wrong option": (wrong_value, "constraint", ("Color", "Size", "Office")),
    "omitted option": (omitted, "interaction", ("Color", "Size", "Office")),
    "wrong query": (wrong_value, "discovery", ("query",)),
    "wrong button": (wrong_button, "endpoint", ("add", "continue")),
    "premature end": (premature_end, "endpoint", ("add", "checkout", "confirm", "continue", "detail")),
    "skipped filter": (omitted, "controls", ("Region",)),
    "wrong value": (wrong_value, "constraint", ("Name", "Date")),
    "stuck": (stuck, "interaction", ("add", "continue", "confirm", "Color", "Office")),
    "wrong start": (wrong_start, "discovery", ("query", "section")),
}


def planted_pair(seed: int) -> Planted:
    """Return the pair of a seed; the errors take turns where the drawn site allows them."""
    r = random.Random(f"planted/{seed}")
    error = list(ERRORS)[seed % len(ERRORS)]
    change, label, decisions = ERRORS[error]
    while True:
        style = {name: r.random() < 0.2 for name in ("one_url", "swatches", "counter")}
        site = replace(make_site(r, seed), **style)
        places = [place for place, intent in enumerate(site.plan) if intent.decision in decisions]
        if places:
            break
    at = r.choice(places)
    decision = site.plan[at].decision
    broken = change(list(site.plan), at, site, r)
    if label == "endpoint" and decision == "detail":
        label = "evidence"
    memory = r.random() < 0.5
    won = Runner(site, r, f"{site.host}.success", memory)
    success = won.run(with_noise(list(site.plan), site, r), True)
    failure = Runner(site, r, f"{site.host}.failure", memory).run(with_noise(broken, site, r), False)
    last = {name: place for place, names in enumerate(won.decisions, 1) for name in names}  # of each decision
    # a run that ends early lacks all that follows; the first of it, in the success's own order, is critical
    lost = [decision] if change not in (premature_end, stuck) else [item.decision for item in site.plan[at:]]
    critical = min(last[name] for name in lost)
    return Planted(success, failure, error, label, decision, critical)


def planted_pairs(count: int, first: int = 0) -> Iterator[Planted]:
    """Yield the pairs of `count` seeds."""
    yield from (planted_pair(seed) for seed in range(first, first + count))
