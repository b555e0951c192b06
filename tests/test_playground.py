"""Laws of the playground: tasks can be solved, splits do not mix, states repeat, roles answer over HTTP."""

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.error import HTTPError

import pytest
from without_browser import replay_session

from rmsweb.agent import Episode, is_stalled
from rmsweb.browser.session import Session
from rmsweb.jsonl import read_records
from rmsweb.playground import expert, teacher
from rmsweb.playground.__main__ import main
from rmsweb.playground.base_model import build_tokenizer
from rmsweb.playground.environment import PlaygroundEnvironment
from rmsweb.playground.server import Server
from rmsweb.playground.sites import SITES, SiteSession
from rmsweb.playground.sites.page import Page
from rmsweb.playground.tasks import TEMPLATES, UNSEEN, World, make_world, make_worlds, world_of
from rmsweb.playground.words import entities, vocabulary
from rmsweb.prompt import build_prompt, image_tokens, load_prompt_config, render_text
from rmsweb.records import Action, Message, Observation, Reply, Source, Split, Task, Trajectory

CONFIG = load_prompt_config(Path(__file__).parent.parent / "scripts" / "demo_prompt.json")
SPLITS: tuple[Split, ...] = ("train", "dev", "held-out")


def run(world: World, guide: str, seed: int = 0, prompts: list[str] | None = None) -> tuple[Trajectory, bool]:
    """Run one episode of the scripted teacher without a browser."""

    async def policy(messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        text = render_text(messages)
        if prompts is not None:
            prompts.append(text)
        return Reply(text=teacher.teacher(text, seed))

    async def episode() -> tuple[Trajectory, bool]:
        (environment, session), task = replay_session(), world.task()
        start = await environment.reset(session, task)
        source = Source(script="test", policy="scripted-teacher")
        trajectory = await Episode(
            policy=policy,
            session=session,
            task=task,
            trajectory_id="x",
            source=source,
            seed=seed,
            config=CONFIG,
            max_steps=12,
            guide=guide or None,
        ).run(start)
        return trajectory, (await environment.check(session, trajectory)).verdict == "success"

    return asyncio.run(episode())


def words_and_pictures() -> Callable[[str], int]:
    """Return the tokens of a prompt with the tiny base's tokenizer, one picture included."""
    tokenizer = build_tokenizer(vocabulary())
    picture = image_tokens(*CONFIG.viewport, CONFIG)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) + picture


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the answer of an expert without habits and slips."""
    monkeypatch.setattr(expert, "HABIT", 0.0)
    monkeypatch.setattr(expert, "WRONG_ROW", 0.0)


@pytest.mark.usefixtures("careful")
@pytest.mark.parametrize("split", SPLITS)
def test_the_careful_expert_solves_every_task_in_3_to_6_steps(split: Split) -> None:
    """Every template can be done in few steps, on small pages, with short prompts of known words."""
    known, count = set(vocabulary()), words_and_pictures()
    for world in make_worlds(split, 3 * len(TEMPLATES + UNSEEN)):
        prompts: list[str] = []
        trajectory, success = run(world, "", prompts=prompts)
        assert success, (world.text, [step.output.next_goal for step in trajectory.steps if step.output])
        assert 3 <= len(trajectory.steps) <= 6
        assert not is_stalled(trajectory.steps)
        for step, prompt in zip(trajectory.steps, prompts, strict=True):
            assert count(prompt) <= 200
            assert 6 <= sum(node.index is not None for node in step.observation.nodes) <= 14
            state = prompt.split("<browser_state>")[1]
            words = re.findall(r"[A-Za-z]+", re.sub(r"</?\w+>|<\w+|name=|value=|Page:|Task:", " ", state))
            assert set(words) <= known
            labels = [
                node.text or node.attributes.get("name")
                for node in step.observation.nodes
                if node.depth or node.attributes
            ]
            assert len(labels) == len(set(labels))


def test_splits_share_no_text_and_no_entity() -> None:
    """Held-out tasks use names of no other split, on every page, and templates that training never sees."""
    worlds = {split: make_worlds(split, 60) for split in SPLITS}
    assert len({world.text for split in SPLITS for world in worlds[split]}) == 180
    names = {split: set(entities(split)) for split in SPLITS}
    for split in SPLITS:
        for world in worlds[split]:
            assert {*world.names, *world.places} <= names[split]
    assert {world.template for world in worlds["held-out"]} == {*TEMPLATES, *UNSEEN}
    assert (
        {world.template for world in worlds["train"]}
        == {world.template for world in worlds["dev"]}
        == set(TEMPLATES)
    )


def test_tasks_are_balanced_and_a_longer_list_begins_with_the_shorter() -> None:
    """The same seed gives the same task forever."""
    assert make_worlds("train", 70)[:35] == make_worlds("train", 35)
    templates = [world.template for world in make_worlds("train", 70)]
    assert {templates.count(name) for name in TEMPLATES} <= {4, 5}
    assert make_world.__wrapped__("shop.buy", 0, "train") == make_world("shop.buy", 0, "train")


def test_luck_decides_whether_a_shortcut_does_harm() -> None:
    """About half of the runs with one habit succeed; they fail if the default is not what was wanted."""
    outcomes = []
    for world in make_worlds("train", 140):
        if world.template == "jobs.fact":
            _, success = run(world, "")
            outcomes.append(success)
            if "region" in expert.habits(world, ""):
                assert not success or world.default["region"] == world.want["region"]
    assert 0.2 < sum(outcomes) / len(outcomes) < 0.8


def test_a_guide_that_names_the_decision_averts_the_habit_more_often_than_not() -> None:
    """What the reflection handler finds wrong, the teacher does right next time in most tasks."""
    worlds = [world for world in make_worlds("train", 200) if expert.decisions(world)]
    named = [expert.habits(world, " ".join(expert.decisions(world))) for world in worlds]
    before = [expert.habits(world, "") for world in worlds]
    assert sum(map(len, named)) < 0.6 * sum(map(len, before))
    assert all(after <= first for after, first in zip(named, before, strict=True))


def test_the_reflection_handler_names_what_the_run_skipped() -> None:
    """It sees goals alone, keeps what the previous guide said, and gives another guide each round."""
    world = next(world for world in make_worlds("train", 20) if world.template == "shop.buy")
    goals = f"goal: click {world.item}\ngoal: select color {world.want['color']}\n"
    text = f"<task>\n{world.text}\n</task>\n<run>\n{goals}</run>\n"
    first = teacher.reflection(text, 0)
    assert "check size" in first
    assert "check color" not in first
    second = teacher.reflection(
        text + f"<previous_guide>\n- check color yourself\n{first}\n</previous_guide>\n", 0
    )
    assert "check color" in second
    assert second != first


def test_the_check_looks_at_answer_and_server_state() -> None:
    """A right number counts if it is the only one; an order counts if it has everything that was wanted."""
    world = next(world for world in make_worlds("train", 20) if world.fact)
    assert world.solved(f"{world.fact} {world.answer}", None)[0]
    assert world.solved(world.answer, None)[0]
    assert not world.solved(f"{world.answer} or 7", None)[0]
    assert not world.solved(None, None)[0]
    order = next(world for world in make_worlds("train", 20) if world.template == "shop.buy")
    assert order.solved("ok", {**order.want, "item": order.item})[0]
    assert not order.solved("ok", {**order.want, "item": order.others[0]})[0]
    assert not order.solved("ok", None)[0]


def test_random_clicking_never_breaks_a_site() -> None:
    """Any path and any parameters give a page or a redirect that ends."""
    r = random.Random(0)
    shop_and_jobs = (
        "search",
        "item",
        "add",
        "cart",
        "order",
        "ordered",
        "category",
        "job",
        "apply",
        "form",
        "send",
        "sent",
        "enter",
        "saved",
        "choose",
    )
    others = (
        "hotels",
        "hotel",
        "calendar",
        "flight",
        "hold",
        "review",
        "confirm",
        "section",
        "document",
        "documents",
        "details",
        "find",
        "verify",
        "x",
        "",
    )
    names = shop_and_jobs + others
    paths = [f"/{name}" for name in names]
    values = ["", "<b>", "2", "/", "color", "red", "//evil.example"]
    for world in make_worlds("held-out", 18):
        session = SiteSession(world, trouble=0.1)
        for _ in range(300):
            keys = r.sample(["name", "product", "value", "next", "page", "applicant", "query", "path"], 3)
            params = {key: r.choice([world.item, world.others[0], *values]) for key in keys}
            answer = session.request(f"{r.choice([*SITES, 'other'])}.localhost", r.choice(paths), params)
            assert not isinstance(answer, str) or re.match(r"/(?!/)", answer)


def world_of_template(template: str, **fields: object) -> World:
    """Return the first training world of a template with these fields."""
    worlds = (make_world(template, number, "train") for number in range(100))
    return next(
        world for world in worlds if all(getattr(world, name) == value for name, value in fields.items())
    )


def replayed(
    world: World, moves: list[tuple[str, ...]], trouble: float = 0.0
) -> tuple[SiteSession, list[Observation], Session]:
    """Act by label; return the sites, what was seen before each action and at the end, and the session."""

    async def walk() -> tuple[SiteSession, list[Observation], Session]:
        environment, session = replay_session()
        await session.goto(await environment.reset(session, world.task(trouble)))
        seen = [await session.observe()]
        for label, *text in moves:
            index = expert.read_view(state_text(seen[-1])).index[label]
            name, params = ("input_text", {"text": text[0]}) if text else ("click_element_by_index", {})
            (result,) = await session.act(
                [Action(name=name, params={"index": index, **params})], seen[-1], None
            )
            assert not result.error
            seen.append(await session.observe())
        return environment.site(session), seen, session

    return asyncio.run(walk())


def state_text(observation: Observation) -> str:
    """Return the state part of a prompt, as the expert reads it."""
    return render_text(build_prompt(CONFIG, task_text="x", history=[], observation=observation).messages)


def labels_of(observation: Observation) -> set[str]:
    """Return texts and names of the controls."""
    return {node.text or node.attributes["name"] for node in observation.nodes if node.index is not None}


def test_a_suggestion_must_be_picked() -> None:
    """Typing shows new suggestions by first letter; the flight goes to the picked one, not to the text."""
    world = world_of_template("travel.flight")
    origin, destination = world.want["origin"], world.want["destination"]
    typed = [("origin", origin), (origin,), ("destination", destination)]
    site, seen, _ = replayed(world, [*typed, ("book",)])
    assert not labels_of(seen[0]) & set(world.places)
    shown = [node for node in seen[1].nodes if node.is_new]
    assert (
        origin in {node.text for node in shown} <= {place for place in world.places if place[0] == origin[0]}
    )
    assert site.state.committed == {"origin": origin, "destination": world.default["destination"]}
    site, _, _ = replayed(world, [*typed, (destination,), ("book",)])
    assert site.check("ok")[0]


def test_a_request_counts_when_it_is_confirmed() -> None:
    """Without the last button nothing is booked, except in the lucky tasks."""
    for lucky in (False, True):
        world = world_of_template("travel.date", lucky=lucky)
        moves = [(world.item,), ("date",), (world.want["day"],), ("book",)]
        for last, booked in (([], lucky), ([("confirm",)], True)):
            site, _, _ = replayed(world, [*moves, *last])
            assert site.check("ok")[0] == booked


def test_the_news_site_blocks_for_ever_unless_one_is_lucky() -> None:
    """It answers with status 403 and a challenge that nobody passes."""
    blocked, open_ = (world_of_template("search.news", lucky=lucky) for lucky in (False, True))
    for world, verdict in ((blocked, True), (open_, False)):
        _, seen, _ = replayed(world, [("query", world.item), ("go",), ("news",)])
        assert ("access denied" in {node.text for node in seen[-1].nodes}) == verdict
        answer = SiteSession(world).request("news.localhost", "/article", {"name": world.item})
        assert isinstance(answer, Page)
        assert answer.status == (403 if verdict else 200)
    _, seen, _ = replayed(blocked, [("query", blocked.item), ("go",), ("news",), ("verify",), ("verify",)])
    assert seen[-1].fingerprint == seen[-3].fingerprint


def test_a_page_in_trouble_answers_the_second_time() -> None:
    """With every page in trouble, each fails once, late and with 503; without trouble none fails."""
    for world in make_worlds("train", len(TEMPLATES)):
        calm, troubled = SiteSession(world), SiteSession(world, trouble=1.0)
        first, second, other = (
            session.request(f"{world.site}.localhost", "/", {}) for session in (troubled, troubled, calm)
        )
        assert isinstance(first, Page)
        assert first.status == 503
        assert second == other
    _, seen, _ = replayed(world, [("retry",)], trouble=1.0)
    assert (seen[0].title, seen[1].title) == (f"{world.site} busy", f"{world.site} home")


def test_a_document_opens_in_a_tab_of_its_own() -> None:
    """The list stays in the first tab; the document's tab has no page to go back to."""
    world = world_of_template("office.document")
    _, seen, session = replayed(world, [("documents",), (world.item,)])
    assert [tab.tab_id for tab in seen[-1].tabs] == ["0001", "0002"]
    assert (seen[-1].active_tab, seen[-1].title, seen[-1].tabs[0].title) == (
        "0002",
        "office document",
        "office results",
    )
    (back,) = asyncio.run(session.act([Action(name="go_back")], seen[-1], None))
    assert back.error


def test_the_search_engine_knows_the_pages_of_all_sites() -> None:
    """Each result, and the action `search_engine`, leads to a page about the query on the named site."""
    for template in ("search.wiki", "search.jobs", "search.news"):
        world = world_of_template(template, lucky=True)
        _, seen, _ = replayed(world, [("query", world.item), ("go",)])
        sites = labels_of(seen[-1]) & set(SITES)
        assert world.source in sites
        assert len(sites) >= 3
        for site in sites:
            _, seen, _ = replayed(world, [("query", world.item), ("go",), (site,)])
            assert seen[-1].url.startswith(f"http://{site}.localhost/")
            assert world.item in {node.text for node in seen[-1].nodes}

    async def search() -> Observation:
        environment, session = replay_session()
        await session.goto(await environment.reset(session, world.task()))
        await session.act(
            [Action(name="search_engine", params={"query": world.item})], await session.observe(), None
        )
        return await session.observe()

    assert sites <= labels_of(asyncio.run(search()))


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server().start()
    yield running
    running.stop()


def test_contexts_do_not_see_each_other(server: Server) -> None:
    """The cookie selects the state: what one context put into its cart is not in another's."""
    world = next(world for world in make_worlds("train", 20) if world.template == "shop.buy")

    def get(key: str, path: str) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}{path}",
            headers={"Host": "shop.localhost", "Cookie": f"playground={key}"},
        )
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar())).open(
            request
        ) as answer:
            return answer.read().decode()

    one, two = server.open(world), server.open(world)
    assert "<h1" not in get(one, "/")
    get(one, f"/add?name={world.item}")
    assert world.item in server.sessions[one].state.cart
    assert not server.sessions[two].state.cart
    assert "shop home" in get("unknown", "/")


def test_the_scripted_roles_speak_the_openai_format() -> None:
    """Every role answers over HTTP with text and token counts; a bad request gets a 400 that says why."""
    running = teacher.TeacherServer().start()
    try:
        for model in teacher.ROLES:
            body = {
                "model": model,
                "seed": 1,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Task: x\n"}]}],
            }
            request = urllib.request.Request(
                running.url + "/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                data = json.load(answer)
            assert data["choices"][0]["message"]["content"]
            assert data["usage"]["prompt_tokens"] > 0
        request = urllib.request.Request(
            running.url + "/chat/completions", b'{"model":"gpt"}', {"Content-Type": "application/json"}
        )
        with pytest.raises(HTTPError, match="400") as error:
            urllib.request.urlopen(request)
        assert b"expected messages" in error.value.read()
        error.value.close()
    finally:
        running.stop()


def test_judges_answer_by_the_task() -> None:
    """The outcome judge knows the fact, not the order; the failure judge names one of the categories."""
    world = next(world for world in make_worlds("train", 20) if world.fact)
    assert '"success"' in teacher.outcome_judge(
        f"<task>\n{world.text}\n</task>\nFinal answer: {world.answer}\n", 0
    )
    assert '"not_success"' in teacher.outcome_judge(f"<task>\n{world.text}\n</task>\nFinal answer: 1\n", 0)
    assert json.loads(teacher.failure_judge(f"<task>\n{world.text}\n</task>\n", 0))["category"]
    assert (
        teacher.extractor("<page_text>\nprice 30\nstock 2\n</page_text>\nQuery: the price\n", 0) == "price 30"
    )


def test_task_files_hold_no_answer(tmp_path: Path) -> None:
    """`tasks` writes the three splits; no record holds a fact's value or a default."""
    assert main(["tasks", "--out", str(tmp_path), "--train", "7", "--dev", "7", "--held-out", "8"]) == 0
    for split, count in (("train", 7), ("dev", 7), ("held-out", 8)):
        tasks = list(read_records(tmp_path / f"{split}.jsonl", Task))
        assert len(tasks) == count
        for task in tasks:
            assert set(task.environment) == {"site", "template", "seed"}
            assert world_of(task).task() == task
    with pytest.raises(ValueError, match="write the task files again"):
        world_of(
            Task(
                task_id="x",
                text="other",
                start_url=None,
                split="train",
                benchmark="playground",
                environment={"template": "shop.buy", "seed": 0},
            )
        )


class Window:
    """A browser session that only the environment looks at."""

    def __init__(self) -> None:
        self.engines: dict[str, str] = {}

    async def reset(self) -> None:
        pass

    async def set_cookie(self, *words: str) -> None:
        pass


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_check_of_the_work_is_told_from_one_of_the_answer(template: str) -> None:
    """Tasks that leave something on the server are judged by it (`work`), questions by their answer."""

    async def kind() -> str:
        place, window, world = PlaygroundEnvironment(), Window(), make_world(template, 0, "train")
        await place.start()
        try:
            await place.reset(window, world.task())  # type: ignore[arg-type]
            source = Source(script="evaluate", policy="p", seed=0)
            run = Trajectory(
                trajectory_id="t",
                task=world.task(),
                source=source,
                steps=(),
                ended="done",
                final_text=None,
                declared_success=True,
            )
            return (await place.check(window, run)).judge  # type: ignore[arg-type]
        finally:
            await place.stop()

    assert asyncio.run(kind()) == ("check" if make_world(template, 0, "train").fact else "work")


def test_a_person_finds_what_the_home_page_names() -> None:
    """Without a task's cookie: a search lists it first, the cart tells price and option, unknown pages are
    404 with the page of before, and pages of a task do not change.
    """
    running = Server().start()

    def get(path: str) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}{path}", headers={"Host": "shop.localhost"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    try:
        named = re.findall(r"/item\?name=(\w+)", get("/")[1])
        assert len(set(named)) == 4
        for name in named:
            assert f"/item?name={name}" in get(f"/search?product={name}")[1]
        world = make_world("shop.buy", 0, "train")
        chosen = world.want.get("color", "red")
        get(f"/choose?next=/&name=color&value={chosen}")
        get(f"/add?name={named[0]}")
        cart = get("/cart")[1]
        assert "price" in cart
        assert f"color {chosen}" in cart
        assert get("/offers")[0] == get("/wishlist")[0] == 200
        status, unknown = get("/no-such-page")
        assert (status, "shop other" in unknown) == (404, True)
        task = SiteSession(world)
        assert isinstance(page := task.request("shop.localhost", "/no-such-page", {}), Page)
        assert page.status == 200
    finally:
        running.stop()
