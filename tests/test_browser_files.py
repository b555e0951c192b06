"""Laws of the agent's files and of page texts: nothing leaves the folder, and pieces of a text lose and
repeat nothing.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfWriter

from rmsweb.browser.extract import piece, splice_frames, to_markdown
from rmsweb.browser.files import MAX_FILE_CHARS, AgentFiles, FileProblem


@pytest.mark.parametrize(
    "name",
    [
        "../a.md",
        "/etc/passwd",
        "a/b.md",
        "a\\b.md",
        ".a.md",
        "..",
        "",
        "a.exe",
        "a",
        "a.md\n",
        "ä.md",
        "link.md",
        "a" * 200 + ".md",
    ],
)
def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    """A file has a plain name; paths, links and other kinds are refused for writing and reading."""
    outside = tmp_path / "outside.md"
    outside.write_text("secret")
    files = AgentFiles(tmp_path / "files")
    files.write("first.md", "x")
    (tmp_path / "files" / "link.md").symlink_to(outside)
    with pytest.raises(FileProblem):
        files.write(name, "x")
    with pytest.raises(FileProblem):
        files.read(name)
    assert outside.read_text() == "secret"
    assert files.names() == ["first.md"]


def test_files_keep_newlines_when_appended_and_replaced(tmp_path: Path) -> None:
    """A file holds exactly what the parameters say; replacing tells how often, and a text that is not there
    is an error.
    """
    files = AgentFiles(tmp_path)
    files.write("a.txt", "a\r\nb", trailing_newline=False)
    files.write("a.txt", "c", append=True, leading_newline=True)
    assert (tmp_path / "a.txt").read_bytes() == b"a\r\nb\nc\n"
    assert files.replace("a.txt", "b", "bb") == 1
    for old in ("zz", ""):
        with pytest.raises(FileProblem, match=r"does not hold|is empty"):
            files.replace("a.txt", old, "x")
    with pytest.raises(FileProblem, match="characters"):
        files.write("b.txt", "x" * MAX_FILE_CHARS)
    with pytest.raises(FileProblem, match=r"no file 'c.txt'; files: a.txt"):
        files.read("c.txt")


def test_pdfs_are_read_and_broken_ones_named(tmp_path: Path) -> None:
    """The text of a PDF comes back; a file that only looks like one is an error."""
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(tmp_path / "a.pdf")
    (tmp_path / "b.pdf").write_bytes(b"no pdf")
    assert AgentFiles(tmp_path).read("a.pdf") == ""
    with pytest.raises(FileProblem, match="not a readable PDF"):
        AgentFiles(tmp_path).read("b.pdf")


@given(st.text(max_size=60))
def test_any_download_gets_a_name_in_the_folder(
    tmp_path_factory: pytest.TempPathFactory, suggested: str
) -> None:
    """Whatever a server suggests, the file lies in the folder, can be read, and replaces none."""
    files = AgentFiles(tmp_path_factory.mktemp("files"))
    for _ in range(2):
        path = files.download_path(suggested)
        assert path.parent == files.folder
        assert not path.exists()
        path.write_text("x")
    assert [files.read(name) for name in files.names() if not name.lower().endswith(".pdf")] in (
        ["x", "x"],
        [],
    )


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 50))
def test_pieces_make_up_the_text(text: str, size: int) -> None:
    """Reading piece after piece gives the whole text once."""
    at: int | None = 0
    parts = []
    while at is not None:
        part = piece(text, at, size)
        assert len(part.text) <= size
        parts.append(part.text)
        at = part.next_char
    assert "".join(parts) == text


def test_markdown_keeps_tables_and_drops_links_unless_asked() -> None:
    """Headings, lists and tables keep their form, pictures go, frames stand in their place."""
    html = splice_frames(
        "<h2>A_b</h2><ul><li>1 * 2</li></ul><img alt='x' src='y'><rms-frame id=\"7\"></rms-frame><rms-frame id=\"8\"></rms-frame>",  # noqa: E501
        {7: "<p>in</p>"},
    )
    assert to_markdown(html) == "## A_b\n\n* 1 * 2\n\nin"
