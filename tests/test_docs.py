"""What the documents name exists, and what they repeat agrees."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
# Pages that name code as module.name; older pages name files and situations.
CODE_PAGES = [
    page for page in PAGES if page.stem not in ("browser", "engine", "faults", "situations", "study")
]
PATH = re.compile(r"[\w./-]+\.(?:py|sh|js|md|json|svg|txt|toml|css|cff)|[\w./-]+/")
# Files of run folders and of checkpoints, which documents name and the checkout does not hold.
RUN_FILES = {
    "config.json",
    "env.json",
    "report.json",
    "summary.json",
    "prompt_config.json",
    "preprocessor_config.json",
    "screenshots/",
}
POLICIES = (
    "base",
    "SFT",
    "SFT + RL",
    "SFT + supervised on the same states",
    "SFT + RL without anchor",
    "SFT + RL on the mined states alone",
)


def cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [""]


def names_in(file: Path) -> set[str]:
    """Names of a file's test functions."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.stem)
def test_named_tests_exist(document: Path) -> None:
    """`file.py::test` in its file; a bare `test` in the file named before it."""
    file, known, missing = "", dict[str, set[str]](), []
    for found in re.finditer(r"`(?:(test_\w+\.py)::)?(test_\w+)`", document.read_text(encoding="utf-8")):
        file = found[1] or file
        if file and file not in known:
            known[file] = names_in(TESTS / file) if (TESTS / file).is_file() else set()
        if found[2] not in known.get(file, set()):
            missing.append(f"{file}::{found[2]}")
    missing += [
        name
        for name in re.findall(r"\btest_\w+\.py\b", document.read_text(encoding="utf-8"))
        if not (TESTS / name).is_file()
    ]
    assert not missing
    assert known or document.stem not in ("constants", "faults", "metrics", "study"), (
        f"{document} names no test"
    )


def test_every_situation_has_a_test() -> None:
    """The numbers of the table run from 1 on, and the docstring of a browser test starts with each."""
    rows = re.findall(
        r"^\| (\d[\d, ]*) \|", (DOCS / "situations.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    numbers = [int(number) for row in rows for number in row.split(", ")]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    heads = [
        head
        for path in TESTS.glob("test_*.py")
        for head in re.findall(r'"""(?:Cases?|Situations?) ([\d, and]+)', path.read_text(encoding="utf-8"))
    ]
    assert set(numbers) == {int(number) for head in heads for number in re.findall(r"\d+", head)}


def test_every_fault_has_a_guard_and_a_test_or_cannot_occur() -> None:
    """Thirty rows; one without a test says why the fault cannot occur."""
    rows = [
        line.split("|")[1:-1]
        for line in (DOCS / "faults.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| \d", line)
    ]
    assert [int(row[0]) for row in rows] == list(range(1, 31))
    assert all("::test_" in row[4] or row[3].strip().startswith("cannot occur: ") for row in rows)


# ----------------------------------------------------------------------------------------- names and places


def code_names(page: Path) -> list[str]:
    """What a page has in code quotes, code blocks left out."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )


def members(body: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    """The names that statements define: functions, classes, constants and fields."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [name for target in targets if target is not None for name in ast.walk(target)]
        found |= {name.id: node for name in names if isinstance(name, ast.Name)}
    return found


def module_of(name: str) -> tuple[Path, list[str]] | None:
    """The file of the longest part of a dotted name that is a module, and the rest of the name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        for base in (ROOT / "rmsweb", ROOT):
            file = base.joinpath(*parts[:cut]).with_suffix(".py")
            package = base.joinpath(*parts[:cut], "__init__.py")
            if file.is_file() or package.is_file():
                return (file if file.is_file() else package), parts[cut:]
    return None


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what a module defines, or a member of a class."""
    found = module_of(name)
    if found is None:
        return False
    file, rest = found
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in rest:
        node = members(body).get(part)
        if node is None:
            return False
        body = node.body if isinstance(node, ast.ClassDef) else []
    return True


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda path: path.stem)
def test_named_code_exists(page: Path) -> None:
    """A name such as `salvage.gating.gate` is a module, a function, a class or a constant of the package."""
    dotted = [name for name in code_names(page) if re.fullmatch(r"[a-z_]\w*(\.\w+)+", name)]
    named = [name for name in dotted if not PATH.fullmatch(name) and module_of(name) is not None]
    assert [name for name in named if not exists(name)] == []
    assert named or page.stem in ("CONTRIBUTING", "README", "constants")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_named_files_exist(page: Path) -> None:
    """A path in code quotes is in the checkout, in the package, or beside the file that it is named after."""
    bases = (ROOT, ROOT / "rmsweb", DOCS, TESTS, ROOT / "scripts", ROOT / "rmsweb" / "browser")
    paths = [
        name for name in code_names(page) if PATH.fullmatch(name) and not name.startswith(("/", "runs/"))
    ]
    wanted = [name for name in paths if name not in RUN_FILES]
    assert [name for name in wanted if not any((base / name).exists() for base in bases)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file of the checkout finds it."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_names_of_the_papers_table_exist() -> None:
    """Each row of README's table from the paper to the code names code and a test; a bare name belongs to the
    module named before it.
    """
    section = README.read_text(encoding="utf-8").split("## From the paper to the code")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    missing = []
    for _, code, test in rows:
        module = ""
        for name in re.findall(r"`([^`]+)`", code):
            full = name.removesuffix(".py") if "." in name or not module else f"{module}.{name}"
            if found := module_of(full):
                module = ".".join(full.split(".")[: len(full.split(".")) - len(found[1])])
            missing += [] if exists(full) else [full]
        missing += [] if re.fullmatch(r"`test_\w+\.py::test_\w+`", test) else [test]
    assert missing == []


def test_readme_is_short() -> None:
    """At most 150 lines of at most 160 columns."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160] == []


def test_readmes_results_are_those_of_the_study() -> None:
    """README's one table repeats the column of all seeds."""
    study = (DOCS / "study.md").read_text(encoding="utf-8")
    measured = {
        row[0]: row[-1] for row in map(cells, study.splitlines()) if len(row) == 5 and row[0] in POLICIES
    }
    rows = [row for row in map(cells, README.read_text(encoding="utf-8").splitlines()) if row[0] in measured]
    assert [row[0] for row in rows] == list(measured) == list(POLICIES)
    for name, value, difference in rows:
        assert value == measured[name]
        points = re.search(r"[+-][\d.]+ \([^)]*\)", difference)
        assert name == "base" or (points is not None and points[0] in study)


def test_the_picture_is_sound() -> None:
    """docs/loop.svg is XML, fits a page, and names scripts that exist."""
    root = ElementTree.parse(DOCS / "loop.svg").getroot()
    assert int(root.get("width", "0")) <= 1000
    words = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    scripts = set(re.findall(r"\w+\.py", words))
    assert len(scripts) == 5
    assert all((ROOT / script).is_file() for script in scripts)
