"""What the tables in docs/ name exists."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "rmsweb"


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


TABLES = [ROOT / "README.md", DOCS / "extending.md", DOCS / "metrics.md"]


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
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.stem
)
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
    untested = ("browser", "engine", "situations", "walkthrough", "metrics", "rulings")
    assert known or document.stem in untested, f"{document} names no test"


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
