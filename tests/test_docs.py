"""What the documents name exists, and what they repeat agrees."""

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import collect
import evaluate
import mine
import train_rl
import train_sft
from rmsweb.config import parse_config
from rmsweb.prompt import PromptConfig

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "rmsweb"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
POLICIES = (
    "base",
    "SFT",
    "SFT + RL",
    "SFT + supervised on the same states",
    "SFT + RL without anchor",
    "SFT + RL on the mined states alone",
)


def names_in(file: Path) -> set[str]:
    """Names of a file's test functions."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def names_of(tree: ast.Module | ast.ClassDef) -> set[str]:
    """What a module or a class defines: functions, classes, and assigned names."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)
            }
    return found


def is_defined(name: str) -> bool:
    """Whether a dotted name below the package is a room, or something that the room's source defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        place = PACKAGE.joinpath(*parts[:count])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            scope: ast.Module | ast.ClassDef = ast.parse(file.read_text(encoding="utf-8"))
            for part in parts[count:]:
                if part not in names_of(scope):
                    return False
                classes = [
                    node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == part
                ]
                scope = classes[0] if classes else ast.Module(body=[], type_ignores=[])
            return True
    return False


def table_rows(document: Path) -> list[str]:
    """The rows of a document's tables."""
    return [line for line in document.read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def cells(row: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in row.strip("|").split("|")]


TABLES = [
    README,
    *(DOCS / f"{name}.md" for name in ("constants", "extending", "metrics", "rulings", "walkthrough")),
]


@pytest.mark.parametrize("document", TABLES, ids=lambda path: path.stem)
def test_every_path_in_a_table_exists(document: Path) -> None:
    """A path counts from the checkout, from the package, or from a folder that the same row names."""
    missing = []
    for row in table_rows(document):
        words = [word for word in re.findall(r"`([^`\s]+)`", row) if "::" not in word]
        bases = [ROOT, PACKAGE, *(ROOT / word for word in words if word.endswith("/")), TESTS]
        for word in words:
            is_path = word.endswith("/") or re.search(r"\w\.(py|js|sh|md|svg|toml|cff)$", word)
            if is_path and not any((base / word).exists() for base in bases):
                missing.append(word)
    assert not missing


@pytest.mark.parametrize("document", TABLES, ids=lambda path: path.stem)
def test_every_name_in_a_table_is_defined(document: Path) -> None:
    """`room.name` in a table is a function, class or constant of that room (read from its source)."""
    rooms = {path.stem for path in PACKAGE.iterdir()}
    names = [
        name
        for row in table_rows(document)
        for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", row)
        if name.split(".")[0] in rooms and not re.search(r"\.(py|js|md|jsonl|json)$", name)
    ]
    assert not [name for name in names if not is_defined(name)]
    assert names or document.stem != "README"


def test_the_readme_stays_short() -> None:
    """README.md has at most 150 lines of at most 160 columns."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 160


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
    assert known or document.stem not in ("README", "constants", "extending", "faults", "study"), (
        f"{document} names no test"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file of the checkout finds it."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_walkthrough_names_code_that_exists() -> None:
    """Its sentences name the function of each step."""
    text = (DOCS / "walkthrough.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:salvage|engine|browser|prompt|records)\.[\w.]+)`", text)
    assert len(names) > 15
    assert [name for name in names if not is_defined(name)] == []


def test_the_readmes_results_are_those_of_the_study() -> None:
    """README's one table repeats the study's column of all seeds."""
    study = table_rows(DOCS / "study.md")
    measured = {row[0]: row[-1] for row in map(cells, study) if len(row) == 5 and row[0] in POLICIES}
    rows = [row for row in map(cells, table_rows(README)) if row[0] in POLICIES]
    assert [row[0] for row in rows] == list(measured) == list(POLICIES)
    for name, value, difference in rows:
        assert value == measured[name]
        assert all(number in "".join(study) for number in re.findall(r"[+-][\d.]+", difference))


def test_the_picture_is_sound() -> None:
    """docs/loop.svg is XML, fits a page, and names the five scripts."""
    root = ElementTree.parse(DOCS / "loop.svg").getroot()
    assert int(root.get("width", "0")) <= 1000
    words = " ".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))
    scripts = set(re.findall(r"\w+\.py", words))
    assert len(scripts) == 5
    assert all((ROOT / script).is_file() for script in scripts)


SCRIPTS: dict[str, Any] = {
    f"{module.__name__}.py": module for module in (collect, evaluate, mine, train_rl, train_sft)
}
OTHERS = ("vllm", "llamafactory-cli", "train.py", "verl.trainer.main_ppo", "pip", "pytest", "ruff", "mypy")


def commands() -> list[tuple[str, str]]:
    """(page, command) of every command in a code block, continued lines joined, comments left out."""
    found = []
    for page in (README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        blocks = "".join(body for language, body in fences if language in ("", "bash", "sh"))
        for line in blocks.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if re.match(r"[A-Z_.a-z/=0-9]+ ", line) else []
            if {"python", "torchrun", "bash", ".venv/bin/python"} & {*words[:4]}:
                found.append((page.name, line))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_of_the_documents_is_understood(page: str, command: str) -> None:
    """The five scripts parse their flags, shell scripts exist, modules and other scripts know the flags."""
    words = shlex.split(command, comments=True)
    if any(name in words for name in OTHERS):
        return
    if name := next((word for word in words if word in SCRIPTS), None):
        flags = words[words.index(name) + 1 :]
        script = SCRIPTS[name]
        is_plan = "--plan" in flags
        parsed = parse_config(
            script.PlanConfig if is_plan else script.Config, [x for x in flags if x != "--plan"]
        )
        assert parsed
        return
    if "-m" in words:
        at = words.index("-m") + 1
        module, text = words[at], ""
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        known = subprocess.run(
            [
                sys.executable,
                "-m",
                module,
                *(x for x in words[at + 1 : at + 2] if x.isalpha() and "playground" in module),
                "--help",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        text = known
    else:
        file = next(word for word in words if word.endswith((".py", ".sh")))
        text = (ROOT / file).read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in text or word.removeprefix("--").replace("-", "_") in text, word


def test_using_names_every_field_of_the_prompt() -> None:
    """Its table has the fields of the PromptConfig with their defaults."""
    page = (DOCS / "using.md").read_text(encoding="utf-8")
    section = page.partition("## The prompt\n")[2].partition("\n## ")[0]
    rows = {row[0].strip("`"): row[1] for row in map(cells, section.splitlines()) if len(row) == 3}
    assert [*rows][2:] == [field.name for field in dataclasses.fields(PromptConfig)]
    plain = json.loads(json.dumps(dataclasses.asdict(PromptConfig())))
    for name, value in plain.items():
        if isinstance(value, list) and isinstance(value[0], str):
            continue
        assert json.loads(rows[name]) == value, name


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
