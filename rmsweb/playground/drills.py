"""Drills: generic exercises that give the tiny base the reading skills that Qwen3-VL-Instruct brings along.

Purpose: random pages of random words, rendered by the real prompt code, with questions whose answer is an
exact look-up or copy: recall of pairs, index of a label, copying from the task, one instruction, and choosing
which value goes where. The words are the playground's vocabulary, but their use is random: no site, page,
task or entity of the playground appears in its role.

ours: all of it (the paper starts from a pretrained model). A drill is one page shared by several independent
turns, so a turn costs its own tokens only (the same packing as an RL group).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rmsweb.browser.actions import canonical_text
from rmsweb.prompt import PromptConfig, build_prompt
from rmsweb.records import Action, AgentOutput, Element, Image, Message, Observation, Step, Text

NUM_VALUES = 100  # facts are numbers 0..99
VERBS = ("click", "type", "select", "done", "back")
FILLER = "at in for with and of as the to is on by from page please then step".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Goal:
    """One small intention: the scratchpad before the action. `back` has no label, `click` no value."""

    verb: str
    label: str | None = None
    value: str | None = None

    @property
    def words(self) -> str:
        """The goal as an answer and an instruction write it."""
        return " ".join(part for part in (self.verb, self.label, self.value) if part is not None)


@dataclass(frozen=True, slots=True)
class Turn:
    """One exercise on a shared page."""

    tail: str  # the text after the page
    target: str
    given: int = 0  # first characters of the target that are given away


@dataclass(frozen=True, slots=True)
class Drill:
    """A page with independent turns."""

    page: tuple[Message, ...]  # messages up to the end of the browser state
    turns: tuple[Turn, ...]
    chat: bool = True  # whether the chat template goes around


class Words:
    """What drills are made of: the words, the configuration of the prompt, and the pictures."""

    def __init__(self, words: Sequence[str], config: PromptConfig, images: Sequence[Image]) -> None:
        self.labels = [word for word in words if word not in FILLER and word not in VERBS]
        # Matching is learned on these, then holds for all.
        self.first = random.Random(0).sample(self.labels, min(400, len(self.labels)))
        self.config, self.images = config, images

    def value(self, r: random.Random) -> str:
        """Draw what is typed or chosen: a word, or now and then a number."""
        return str(r.randrange(NUM_VALUES)) if r.random() < 0.2 else r.choice(self.labels)


def answer_text(goal: Goal, index: int | None, memory: str) -> str:
    """Return the canonical answer that carries out a goal."""
    if goal.verb == "click":
        action = Action(name="click_element_by_index", params={"index": index})
    elif goal.verb == "type":
        action = Action(name="input_text", params={"index": index, "text": goal.value})
    elif goal.verb == "select":
        action = Action(name="select_dropdown_option", params={"index": index, "text": goal.value})
    elif goal.verb == "back":
        action = Action(name="go_back")
    else:
        action = Action(name="done", params={"text": goal.value, "success": True})
    output = AgentOutput(
        actions=(action,), evaluation_previous_goal="ok", memory=memory, next_goal=goal.words
    )
    return canonical_text(output, thinking=False)


# ------------------------------------------------------------------------------------------------------ pages


@dataclass(frozen=True, slots=True)
class Widget:
    """One thing on a drill page: kind a, button, input, select or fact."""

    kind: str
    label: str
    value: str | None
    index: int | None
    new: bool = False  # marked with a star


def random_widgets(r: random.Random, words: Words) -> list[Widget]:
    """Draw 8 to 14 widgets with distinct labels; controls are numbered in their order, as on a real page."""
    labels = r.sample(words.labels, r.randint(8, 14))
    widgets, index = [], 0
    for label in labels:
        kind = r.choice(("a", "a", "button", "input", "select", "fact"))
        value = None
        if kind == "fact":
            value = str(r.randrange(NUM_VALUES)) if r.random() < 0.7 else r.choice(words.labels)
        elif kind == "input" and r.random() < 0.3:
            value = r.choice(words.labels)
        if kind != "fact":
            index += 1
        widgets.append(
            Widget(kind, label, value, *((None,) if kind == "fact" else (index, r.random() < 0.1)))
        )
    return widgets


def observe_widgets(
    widgets: Sequence[Widget], title: str, image: Image | None, viewport: tuple[int, int]
) -> Observation:
    """Return the observation that the browser layer would make of such a page."""
    nodes: list[Element] = []
    for number, w in enumerate(widgets):
        key = str(number)
        if w.kind == "fact":
            nodes.append(Element(index=None, node_key=key, tag="#text", text=str(w.value)))
            nodes.append(Element(index=None, node_key=key + "t", tag="#text", text=w.label))
        elif w.kind in ("input", "select"):
            nodes.append(
                Element(
                    index=w.index,
                    node_key=key,
                    tag=w.kind,
                    attributes={"name": w.label},
                    value=w.value,
                    is_new=w.new,
                )
            )
        else:
            nodes.append(Element(index=w.index, node_key=key, tag=w.kind, is_new=w.new))
            nodes.append(Element(index=None, node_key=key + "t", tag="#text", text=w.label, depth=1))
    return Observation(
        url="",
        title=title,
        tabs=(),
        active_tab="0001",
        viewport=viewport,
        nodes=tuple(nodes),
        screenshot=image,
    )


def past_step(number: int, goal: Goal, observation: Observation) -> Step:
    """Return a step of which only the goal matters."""
    output = AgentOutput(actions=(Action(name="wait"),), next_goal=goal.words)
    return Step(number=number, observation=observation, response_text="", output=output)


class Page:
    """A drill page and the split of its prompt into the shared part and a turn's tail."""

    def __init__(self, r: random.Random, words: Words, *, empty: bool = False) -> None:
        self.words, self.widgets = words, [] if empty else random_widgets(r, words)
        self.memory = r.choice(words.labels)
        image = r.choice(words.images) if words.images else None
        self.observation = observe_widgets(
            self.widgets, f"{r.choice(words.labels)} {self.memory}", image, words.config.viewport
        )

    def split(self, task: str, history: Sequence[Goal] = ()) -> tuple[tuple[Message, ...], str]:
        """Return the messages up to the end of the browser state, and the text after it."""
        steps = [past_step(i + 1, goal, self.observation) for i, goal in enumerate(history)]
        prompt = build_prompt(
            self.words.config,
            task_text=task,
            observation=self.observation,
            history=steps,
            count_tokens=lambda text: len(text.split()),
        )
        parts = prompt.messages[-1].parts
        end = max(i for i, part in enumerate(parts) if isinstance(part, Text) and part.tag == "state") + 1
        tail = "".join(part.text for part in parts[end:] if isinstance(part, Text))
        return (*prompt.messages[:-1], Message(role="user", parts=parts[:end])), tail

    def goal(self, r: random.Random, widget: Widget) -> Goal:
        """Draw a goal for a widget."""
        if widget.kind == "fact":
            return Goal("done", widget.label, widget.value)
        if widget.kind in ("a", "button"):
            return Goal("click", widget.label)
        return Goal("type" if widget.kind == "input" else "select", widget.label, self.words.value(r))

    def answer(self, goal: Goal) -> str:
        """Return the answer that carries out a goal on this page."""
        index = next((widget.index for widget in self.widgets if widget.label == goal.label), None)
        return answer_text(goal, index, self.memory)


# ----------------------------------------------------------------------------------------------------- stages


def phrase(r: random.Random, goal: Goal) -> str:
    """Return a goal as an explicit instruction."""
    if goal.verb == "click":
        return f"click {goal.label}"
    if goal.verb == "done":
        return f"tell {goal.label}"
    if r.random() < 0.5:
        return f"{goal.verb} {goal.value} {r.choice(('in', 'for', 'at'))} {goal.label}"
    return f"{goal.verb} {goal.label} {r.choice(('with', 'as', 'of'))} {goal.value}"


def recall(r: random.Random, words: Words) -> Drill:
    """Show pairs `3 word`, then ask for the number before a word."""
    keys = r.sample(words.first, r.randint(6, 12))
    numbers = r.sample(range(NUM_VALUES), len(keys))
    shown = "".join(f"{number} {key} " for number, key in zip(numbers, keys, strict=True))
    asked = [r.randrange(len(keys)) for _ in range(2 * len(keys))]
    turns = tuple(Turn(tail=f"{keys[i]} ", target=str(numbers[i])) for i in asked)
    return Drill(
        page=(Message(role="user", parts=(Text(tag="state", text=shown),)),), turns=turns, chat=False
    )


def look_up(r: random.Random, words: Words) -> Drill:
    """Show a page, then ask for the index of a control or the value of a fact by its label."""
    page = Page(r, words)
    turns = []
    facts = [w for w in page.widgets if w.kind == "fact"]
    for _ in range(8):
        widget = r.choice(facts if facts and r.random() < 0.5 else page.widgets)
        turns.append(
            Turn(
                tail=f"Task: {widget.label} ",
                target=str(widget.index if widget.index is not None else widget.value),
            )
        )
    return Drill(page=page.split("x")[0], turns=tuple(turns), chat=False)


def copying(r: random.Random, words: Words) -> Drill:
    """Show an empty page; the goal is copied from the task."""
    page, turns = Page(r, words, empty=True), []
    for _ in range(6):
        verb = r.choice(("click", "type", "select"))
        goal = Goal(verb, r.choice(words.labels), None if verb == "click" else words.value(r))
        target = answer_text(goal, 1, page.memory)
        start = target.index('"next_goal":"') + len('"next_goal":"')
        turns.append(
            Turn(tail=page.split(phrase(r, goal))[1], target=target[: start + len(goal.words)], given=start)
        )
    return Drill(page=page.split("x")[0], turns=tuple(turns))


def _instructions(r: random.Random, page: Page, most: int) -> list[Goal]:
    goals = [page.goal(r, widget) for widget in r.sample(page.widgets, r.randint(1, most))]
    last = next((i for i, goal in enumerate(goals) if goal.verb == "done"), len(goals) - 1)
    return goals[: last + 1]


def instructions(r: random.Random, words: Words, most: int = 4, count: int = 4) -> Drill:
    """Give a list of up to `most` instructions, some already in the history; the next one is to be done."""
    page, turns = Page(r, words), []
    for _ in range(count):
        goals = _instructions(r, page, most)
        now = r.randrange(len(goals))
        turns.append(
            Turn(
                tail=page.split(" and ".join(phrase(r, goal) for goal in goals), goals[:now])[1],
                target=page.answer(goals[now]),
            )
        )
    return Drill(page=page.split("x")[0], turns=tuple(turns))


def one_instruction(r: random.Random, words: Words) -> Drill:
    """Give one explicit instruction a turn."""
    return instructions(r, words, most=1, count=5)


def _noise(r: random.Random, words: Words, count: int, avoid: set[str]) -> list[str]:
    picked: list[str] = []
    while len(picked) < count:
        word = r.choice(words.labels)
        if word not in avoid:
            picked += [r.choice(FILLER), word] if r.random() < 0.5 else [word]
    return picked


def slots(r: random.Random, words: Words) -> Drill:
    """Give the verb, and the label of a field.

    To be found is the value for the field, the one label that the task names, or the fact.
    """
    page, turns = Page(r, words), []
    avoid = {w.label for w in page.widgets}
    for _ in range(4):
        verb = r.choice(("click", "type", "select"))
        history = [
            Goal(verb, r.choice(words.labels), None if verb == "click" else r.choice(words.labels))
            for _ in range(r.randint(0, 2))
        ]
        goal = page.goal(r, r.choice(page.widgets))
        if goal.verb == "click":
            task, given = (
                [
                    *_noise(r, words, r.randint(1, 3), avoid),
                    str(goal.label),
                    *_noise(r, words, r.randint(0, 4), avoid),
                ],
                "click",
            )
        elif goal.verb == "done":
            task, given = (
                [
                    *_noise(r, words, r.randint(0, 2), avoid),
                    "tell",
                    str(goal.label),
                    "of",
                    *_noise(r, words, r.randint(1, 3), avoid),
                ],
                "done",
            )
        else:
            pairs = [(str(goal.label), str(goal.value))] + [
                (r.choice(words.labels), words.value(r)) for _ in range(r.randint(0, 2))
            ]
            r.shuffle(pairs)
            task = _noise(r, words, r.randint(1, 3), avoid)
            for label, value in pairs:
                task += [r.choice(FILLER), *((value, label) if r.random() < 0.3 else (label, value))]
            given = f"{goal.verb} {goal.label}"
        target = page.answer(goal)
        start = target.index('"next_goal":"') + len('"next_goal":"') + len(given)
        turns.append(Turn(tail=page.split(" ".join(task), history)[1], target=target, given=start))
    return Drill(page=page.split("x")[0], turns=tuple(turns))


def chains(r: random.Random, words: Words) -> Drill:
    """Give a way over one or two stops to a fact, and nothing of the answer.

    The goal is the stop nearest to the end that the page shows, else to read the fact.
    """
    page, turns = Page(r, words), []
    links, shown = (
        [w.label for w in page.widgets if w.kind in ("a", "button")],
        [w for w in page.widgets if w.kind == "fact"],
    )
    if len(links) < 2 or not shown:
        return slots(r, words)
    avoid = {w.label for w in page.widgets}
    for _ in range(4):
        fact, stops = r.choice(shown), [word for word in _noise(r, words, 4, avoid) if word not in FILLER][:2]
        at = r.randrange(3)  # on the way to the first stop, to the last one, or there
        if at == 1 and r.random() < 0.3:
            stops = r.sample(links, 2)
        elif at < 2:
            stops[at] = r.choice(links)
        history = [Goal("click", stop) for stop in stops[:at]]
        if at and r.random() < 0.3:
            stops = stops[1:]
        goal = (
            Goal("done", fact.label, fact.value) if at == 2 else Goal("click", stops[-1] if at else stops[0])
        )
        asked = fact.label if at == 2 or r.random() < 0.7 else r.choice(words.labels)
        task = [
            *_noise(r, words, r.randint(0, 2), avoid),
            *(stops[:-1]),
            r.choice(FILLER),
            "tell",
            asked,
            "of",
            stops[-1],
        ]
        target = page.answer(goal)
        start = target.index('"next_goal":"') + len('"next_goal":"')
        turns.append(Turn(tail=page.split(" ".join(task), history)[1], target=target, given=start))
    return Drill(page=page.split("x")[0], turns=tuple(turns))


def mixture(r: random.Random, words: Words) -> Drill:
    """Draw a drill of the last stage: 50 % slots, 20 % chains, 15 % one instruction, 15 % lists."""
    draw = r.random()
    if draw < 0.7:
        return slots(r, words) if draw < 0.5 else chains(r, words)
    return one_instruction(r, words) if draw < 0.85 else instructions(r, words)


STAGES: tuple[Callable[[random.Random, Words], Drill], ...] = (
    recall,
    look_up,
    copying,
    one_instruction,
    mixture,
)
