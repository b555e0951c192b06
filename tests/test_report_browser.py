"""Laws of the report in a real Chromium, opened from disk: nothing fails to load, nothing sticks out, keys
and addresses work, and hostile texts are texts.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mining_world import BAD, GOOD, held_out, run, write_folder
from playwright.sync_api import Browser, Page, sync_playwright
from test_report import call, rollouts

import mine
from rmsweb.browser.chromium import find_chromium
from rmsweb.records import Element, Trajectory

pytestmark = pytest.mark.browser
HOSTILE = "</script><script>window.hacked=1</script>\u2028\"'`${1}<b onclick=x> 😀 " + "x" * 10_000


@pytest.fixture(scope="module")
def browser(report: Path) -> Iterator[Browser]:
    """A Chromium; the report is made before: the miner cannot run beside a synchronous playwright."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two evaluations, a pool of a mined folder, and RL groups, under hostile names."""
    root = tmp_path_factory.mktemp("a #1 & 100% <b>")
    runs = [run(GOOD, True), run(BAD, False, name="b"), run(GOOD, True, name="c#&=%+'\"<")]
    pool = write_folder(root / "po ol#?", runs)
    assert mine.main(["--pool", str(pool), "--out", str(root / "mined")]) == 0
    rollouts(root / "mined", root / "train-rl")
    folders = [held_out(root / "base", "---"), held_out(root / "sft", "+-?", hostile=True)]
    assert call(*folders, pool, root / "mined", root / "train-rl", "--out", root) == 0
    return root / "report.html"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose errors, warnings and failed requests fail the test."""
    troubles: list[str] = []
    context = browser.new_context(viewport={"width": 1366, "height": 900})
    opened = context.new_page()
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("requestfailed", lambda request: troubles.append(request.url[-200:]))
    yield opened
    context.close()
    assert not troubles


def wait(page: Page, expression: str) -> None:
    """Wait until an expression is true; wait_for_function uses eval, which the page forbids."""
    ends = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < ends, expression
        page.wait_for_timeout(20)


def visit(page: Page, report: Path, address: str = "") -> None:
    """Open an address of the report and wait until it is drawn."""
    page.goto("about:blank")
    page.goto(report.as_uri() + address)
    wait(page, "shown.opened !== undefined")


def width_over(page: Page) -> int:
    """How many pixels the page is wider than the window."""
    found = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1366, 400])
def test_nothing_sticks_out_and_everything_loads(page: Page, report: Path, width: int, theme: str) -> None:
    """Each view fits into the window; every picture is there; tables scroll inside their own box."""
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 800})
    visit(page, report)
    assert width_over(page) == 0
    for link in page.eval_on_selector_all("header nav a", "all => all.map(a => a.hash)"):
        visit(page, report, link)
        assert width_over(page) == 0
        if width == 1366:  # no column is cut
            assert page.evaluate(
                "[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth)"
            )
        for opened in page.eval_on_selector_all("tbody a", "all => all.map(a => a.hash)"):
            visit(page, report, opened)
            page.wait_for_selector("#view .side")
            assert width_over(page) == 0
            assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert not page.evaluate("window.hacked")
    colours = {"light": "rgb(246, 247, 249)", "dark": "rgb(18, 20, 25)"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == colours[theme]


def test_an_address_opens_its_run_and_back_returns(page: Page, report: Path) -> None:
    """`#run=folder/id` opens that run from disk; the back button returns to the list as it was filtered."""
    visit(page, report, "#run=base/t0.n1")
    page.wait_for_selector("#view .side")
    assert "run 1" in page.inner_text("#view")
    visit(page, report, "#runs")
    page.select_option("#runs [name=outcome]", "failure")
    page.fill("#runs [name=q]", "t0.n2 base")
    wait(page, "document.querySelectorAll('#runs tbody tr').length === 1")
    page.click("#runs tbody a")
    page.wait_for_selector("#view .side")
    page.go_back()
    page.wait_for_selector("#runs tbody a")
    assert page.input_value("#runs [name=q]") == "t0.n2 base"
    assert page.locator("#runs tbody tr").count() == 1


def test_filters_leave_what_they_name(page: Page, report: Path) -> None:
    """Every filter has every value of its field, with its count, and leaves exactly these rows."""
    for name in ("runs", "pairs", "groups"):
        visit(page, report, f"#{name}")
        fields = page.eval_on_selector_all(f"#{name} select", "all => all.map(one => one.name)")
        assert fields
        for field in fields:
            values = page.evaluate("([name, field]) => lists[name].map(row => row[field])", [name, field])
            for value in {value for value in values if value != ""}:
                page.select_option(f"#{name} [name={field}]", str(value))
                wait(page, f"document.querySelectorAll('#{name} tbody tr').length === {values.count(value)}")
            page.click(f"#{name} [type=reset]")


def test_keys_move_between_steps_and_runs(page: Page, report: Path) -> None:
    """j and k go through the steps, n and p through the list, b and t show boxes and prompt, Esc leaves."""

    def step() -> str:
        return page.inner_text("#view .said h3")

    visit(page, report, "#runs")
    page.click("#runs tbody a")
    page.wait_for_selector("#view .side")
    for key, expected in {"j": "step 2", "ArrowRight": "step 3", "k": "step 2"}.items():
        page.keyboard.press(key)
        wait(page, f"document.querySelector('#view .said h3').innerText === '{expected}'")
    first = page.inner_text("#view")
    page.keyboard.press("n")
    wait(page, "shown.opened === 'run=base/t0.n1' && location.hash.endsWith('n1')")
    assert page.inner_text("#view") != first
    page.keyboard.press("p")
    wait(page, "shown.opened === 'run=base/t0.n0'")
    assert step() == "step 1"
    page.keyboard.press("t")
    assert "Actions:" in page.inner_text("#view .prompt")
    assert page.locator("#view .boxes i").first.is_visible()
    for count in ("named", "none"):
        page.keyboard.press("b")
        assert page.get_attribute(".sides", "data-boxes") == count
    assert not page.locator("#view .boxes i").first.is_visible()
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("#runs tbody a")


def test_two_runs_of_a_task_stand_side_by_side(page: Page, report: Path) -> None:
    """Any other run of the task can be chosen, of the same policy or of another one; keys move both."""
    visit(page, report, "#run=base/t0.n0")
    page.wait_for_selector("#view .side")
    assert (
        page.locator("#view [name=with] option").count() == 6
    )  # two of the same policy, three of the pool, and none
    page.select_option("#view [name=with]", "base/t0.n2")
    wait(page, "document.querySelectorAll('#view .side').length === 2")
    page.keyboard.press("j")
    wait(
        page,
        "[...document.querySelectorAll('#view h3')].map(one => one.innerText).join() === 'step 2,step 2'",
    )


def test_a_label_covers_no_box(page: Page, report: Path) -> None:
    """The number of a box lies outside of every box, where the picture has room."""
    visit(page, report, "#run=base/t0.n0")
    page.wait_for_selector("#view .boxes b")
    page.wait_for_timeout(200)
    assert (
        page.evaluate(
            """() => {
          const boxes = [...document.querySelectorAll(".boxes i")].map((one) => one.getBoundingClientRect());
          const labels = [...document.querySelectorAll(".boxes b")].map((one) => one.getBoundingClientRect());
          return labels.filter((a) => boxes.some((b) =>
            a.left < b.right - 1 && b.left < a.right - 1 &&
            a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
        }"""
        )
        == 0
    )


def hostile(found: Trajectory) -> Trajectory:
    """The run with a hostile text wherever a page or a model writes one."""
    steps = []
    for step in found.steps:
        nodes = (
            *step.observation.nodes,
            Element(index=99, node_key="x", tag=HOSTILE[:40], text=HOSTILE, box=(0, 0, 9, 9)),
        )
        seen = replace(step.observation, url="javascript:alert(1)" + HOSTILE, title=HOSTILE, nodes=nodes)
        output = step.output and replace(step.output, thinking=HOSTILE, memory=HOSTILE, next_goal=HOSTILE)
        results = tuple(replace(result, content=HOSTILE, message=HOSTILE) for result in step.results)
        steps.append(replace(step, observation=seen, output=output, results=results, response_text=HOSTILE))
    task = replace(found.task, text=HOSTILE, task_id=HOSTILE[:60])
    return replace(
        found, steps=tuple(steps), task=task, final_text=HOSTILE, trajectory_id=HOSTILE[:60].strip()
    )


def test_hostile_texts_are_shown_as_text(page: Page, tmp_path: Path) -> None:
    """Markup, quotes, emoji and lines of 10,000 characters are texts and stay in the window."""
    item = run(GOOD, True)
    folder = write_folder(tmp_path / "sft", [replace(item, trajectory=hostile(item.trajectory))])
    assert call(folder, "--out", tmp_path) == 0
    for width in (1366, 400):
        page.set_viewport_size({"width": width, "height": 800})
        visit(page, tmp_path / "report.html", "#runs")
        assert width_over(page) == 0
        assert "<script>window.hacked=1</script>" in page.inner_text("#runs tbody")
        page.click("#runs tbody a", position={"x": 5, "y": 5})
        page.wait_for_selector("#view .side")
        page.keyboard.press("t")
        assert width_over(page) == 0
        assert page.inner_text("#view").count("<script>window.hacked=1</script>") > 6
        assert (
            page.evaluate("document.querySelectorAll('main script, #view a[href^=javascript]').length") == 0
        )
        assert not page.evaluate("window.hacked")


def test_five_hundred_runs_open_in_two_seconds(page: Page, tmp_path: Path) -> None:
    """A report of 500 runs is drawn within two seconds, list included."""
    folder = write_folder(
        tmp_path / "sft", [run(GOOD, number % 2 == 0, task_id=f"t{number}") for number in range(500)]
    )
    assert call(folder, "--out", tmp_path) == 0
    page.goto("about:blank")
    started = time.monotonic()
    page.goto((tmp_path / "report.html").as_uri() + "#runs")
    page.wait_for_selector("#runs tbody a")
    assert time.monotonic() - started < 2.0
    assert page.inner_text("#runs output") == "500 of 500"
