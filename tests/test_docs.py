"""What the tables in docs/ name exists."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"


def names_in(file: Path) -> set[str]:
    """Names of a file's test functions."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("document", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
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
    assert known or document.stem in ("browser", "engine", "situations", "walkthrough"), (
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
