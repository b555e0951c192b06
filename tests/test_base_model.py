"""Laws of the tiny base: its tokenizer loses nothing, its drills are answerable, it never met the playground.

The committed base has the skills that it claims.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from without_browser import replay_session

from rmsweb.browser.actions import canonical_text, parse_agent_output
from rmsweb.engine.policy import PolicyModel
from rmsweb.playground import base_model, drills
from rmsweb.playground.document import Document
from rmsweb.playground.sites import SITES
from rmsweb.playground.sites.page import Choice, Form, Link, choose_url
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_worlds
from rmsweb.playground.words import entities, vocabulary
from rmsweb.prompt import build_prompt, load_prompt_config, render_text
from rmsweb.records import AgentOutput, Observation, Split, Text

CONFIG = load_prompt_config(Path(__file__).parent.parent / "scripts" / "demo_prompt.json")
WORDS = vocabulary()
TOKENIZER = base_model.build_tokenizer(WORDS)
STAGES = {stage.__name__: stage for stage in drills.STAGES}
phrases = st.lists(st.sampled_from(WORDS) | st.integers(0, 99).map(str), min_size=1, max_size=5).map(" ".join)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@given(memory=phrases, label=phrases, index=st.integers(1, 40), verb=st.sampled_from(drills.VERBS))
def test_answers_survive_the_tokenizer(memory: str, label: str, index: int, verb: str) -> None:
    """decode(encode(x)) == x for every canonical answer over the vocabulary, and every word is one token."""
    goal = drills.Goal(
        verb, None if verb == "back" else label, label if verb in ("type", "select", "done") else None
    )
    text = drills.answer_text(goal, index, memory)
    ids = encode(text)
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids) == text
    assert isinstance(parse_agent_output(text), AgentOutput)
    word = encode(label.split()[0])
    assert len(word) == 1
    assert verb == "back" or word[0] in ids


@given(st.text())
def test_any_text_has_tokens(text: str) -> None:
    """Text that the policy typed may come back in a prompt: nothing raises, unknown words become <unk>."""
    assert len(encode(text)) <= 2 * len(text) + 1


@pytest.mark.parametrize("name", STAGES)
def test_drills_are_answerable(name: str) -> None:
    """The page and the tail hold the answer: an index is that of the label, a value is in task or page."""
    words = drills.Words(WORDS, CONFIG, ())
    for seed in range(60):
        drill = STAGES[name](random.Random(seed), words)
        page = "".join(
            part.text for message in drill.page for part in message.parts if isinstance(part, Text)
        )
        for turn in drill.turns:
            if not turn.target.endswith("}"):
                continue
            output = parse_agent_output(turn.target)
            assert isinstance(output, AgentOutput)
            assert canonical_text(output, thinking=False) == turn.target
            (action,) = output.actions
            goal = output.next_goal.split()
            if "index" in action.params:
                line = page[page.index(f"[{action.params['index']}]<") :].split("\n[")[0]
                assert goal[1] in line
            if "text" in action.params:
                assert goal[-1] == action.params["text"]
                assert goal[-1] in (page if action.name == "done" else turn.tail)


async def crawl(world: World) -> list[Observation]:
    """The pages that links, first choices and forms lead to, up to 30 of each of the seven sites."""
    (environment, session), found = replay_session(), []
    await environment.reset(session, world.task())
    for site in SITES:
        seen, queue = set[str](), [f"http://{site}.localhost/"]
        while queue and len(seen) < 30:
            url = queue.pop(0)
            if url in seen:
                continue
            seen.add(url)
            await session.goto(url)
            found.append(await session.observe())
            document: Document = session.window.page.document  # type: ignore[attr-defined]
            assert document.page is not None
            for widget in (*document.page.nav, *document.page.widgets):
                if isinstance(widget, Link):
                    queue.append(document.absolute(widget.href))
                elif isinstance(widget, Choice):
                    chosen = choose_url(document.page.path, widget.name, widget.options[0])
                    queue.append(document.absolute(chosen))
                elif isinstance(widget, Form):
                    typed = urlencode(dict.fromkeys(widget.fields, world.item))
                    joined = "&" if "?" in widget.action else "?"
                    queue.append(document.absolute(f"{widget.action}{joined}{typed}"))
    return found


def titles_and_lines(prompt: str) -> set[str]:
    """What a prompt says in more than one word: titles, addresses, whole lines of the page and of the task.

    A line of one word is a word, no page.
    """
    lines = (re.sub(r"^Task: ", "", line.strip()) for line in prompt.splitlines())
    return {
        line
        for line in lines
        if len(re.findall(r"[\w/.:]+", re.sub(r"<[^>]*>", "", line))) > 1 and not line.startswith("<")
    }


def site_prompts() -> Iterator[str]:
    """Prompts of the pages of the seven sites in worlds of every template and split, each with its task."""
    splits: tuple[Split, ...] = ("train", "dev", "held-out")
    for world in (world for split in splits for world in make_worlds(split, len(TEMPLATES + UNSEEN))):
        for page in asyncio.run(crawl(world)):
            yield f"{page.url}\n" + render_text(
                build_prompt(
                    CONFIG,
                    task_text=world.text,
                    observation=page,
                    history=[],
                    count_tokens=lambda text: len(text.split()),
                ).messages
            )


def drill_prompts(count: int) -> Iterator[str]:
    """Prompts of drills as the base trains on them: the page, then every turn and its answer."""
    words = drills.Words(WORDS, CONFIG, ())
    for stage in drills.STAGES[1:]:  # the first one has no page: numbers and words in a row
        for seed in range(count):
            drill = stage(random.Random(seed), words)
            yield render_text(drill.page) + "".join(f"\n{turn.tail}\n{turn.target}" for turn in drill.turns)


def test_drills_show_no_page_and_no_task_of_the_playground() -> None:
    """A drill has no title, whole line or task text of a site and no address; the search finds every page."""
    pages = list(site_prompts())
    theirs = set[str]().union(*map(titles_and_lines, pages))
    assert {f"Page: {site} home" for site in SITES} - {"Page: news home"} <= theirs
    assert {world.text for world in make_worlds("held-out", 18)} <= theirs
    ours = list(drill_prompts(150))
    for prompt in ours:
        assert not titles_and_lines(prompt) & theirs
        assert "localhost" not in prompt
        assert "://" not in prompt
    assert len(set[str]().union(*map(titles_and_lines, ours))) > 1000
    assert all(titles_and_lines(page) & theirs for page in pages)


def test_splits_share_no_entity() -> None:
    """Each split has names of its own, all of them in the vocabulary."""
    train, dev, held_out = (set(entities(split)) for split in ("train", "dev", "held-out"))
    assert not train & dev | train & held_out | dev & held_out
    assert train | dev | held_out <= set(WORDS)
    with pytest.raises(ValueError, match="expected one of"):
        entities("test")  # type: ignore[arg-type]


def test_weights_are_zero_on_what_is_given(tmp_path: Path) -> None:
    """Only what follows the given part of an answer is trained; words weigh more than structure."""
    policy = PolicyModel(base_model.build_model(TOKENIZER, 0), TOKENIZER, prompt_config=CONFIG)
    words = drills.Words(WORDS, CONFIG, base_model.draw_pictures(tmp_path, CONFIG, 2, 0))
    encoder = base_model.DrillEncoder(policy, tmp_path)
    drill = drills.slots(random.Random(3), words)
    ids, weights = encoder.turns(drill)
    for turn, row, weight in zip(drill.turns, ids, weights, strict=True):
        trained = TOKENIZER.decode([i for i, w in zip(row, weight.tolist(), strict=True) if w])
        assert (turn.target + "<|im_end|>").endswith(trained.strip())
        assert {round(w, 6) for w in weight.tolist()} <= {0.0, base_model.STRUCTURE_WEIGHT, 1.0}
    batch = encoder.batch([drill, drills.recall(random.Random(1), words)])
    assert len(batch.weights) == len(batch.pack.targets)


@pytest.mark.slow
def test_a_minute_of_drills_teaches_recall(tmp_path: Path) -> None:
    """Training from scratch passes the first stage: the recipe that made the committed base still works."""
    torch.set_num_threads(1)
    policy = PolicyModel(base_model.build_model(TOKENIZER, 0), TOKENIZER, prompt_config=CONFIG)
    words = drills.Words(WORDS, CONFIG, base_model.draw_pictures(tmp_path, CONFIG, 8, 0))
    encoder = base_model.DrillEncoder(policy, tmp_path)
    base_model.train(policy, encoder, words, seed=0, seconds=90)
    assert base_model.skills(policy, encoder, words)["recall"] > 0.8


def test_the_committed_base_has_the_skills_that_it_claims(tmp_path: Path) -> None:
    """Fresh drills give the accuracies of skills.json, within sampling error."""
    policy = PolicyModel.load(base_model.BASE_FOLDER)
    assert policy.prompt_config == CONFIG
    words = drills.Words(WORDS, CONFIG, base_model.draw_pictures(tmp_path, CONFIG, 8, 5))
    measured = base_model.skills(policy, base_model.DrillEncoder(policy, tmp_path), words, seed=7, count=24)
    claimed = json.loads((base_model.BASE_FOLDER / "skills.json").read_text())["skills"]
    assert measured == pytest.approx(claimed, abs=0.12)
