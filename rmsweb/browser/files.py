"""The agent's own files: write, change and read them in one folder, which nothing leaves.

Purpose: the file actions of the schema, and a place for downloads. A name is a plain name: no folder, no
`..`, no link.

ours: the folder belongs to one session, so that episodes of a run do not read each other's notes.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path

from pypdf import PdfReader
from pypdf.errors import PyPdfError

_WRITABLE = re.compile(r"[A-Za-z0-9_-]{1,100}\.(md|txt|json|csv)")
_NAME = re.compile(r"[\w. ()-]{1,150}")
MAX_FILE_CHARS = 200_000
MAX_READ_CHARS = 30_000
MAX_PDF_PAGES = 20


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")  # line ends stay as they are


class FileProblem(ValueError):
    """Why a file action cannot be carried out, in words for the agent."""


class AgentFiles:
    """Files below `folder`; it is made when the first file is written.

    `uploads` are files of the user that may be uploaded.
    """

    def __init__(self, folder: Path, uploads: Sequence[Path] = ()) -> None:
        self.folder, self.uploads = folder, tuple(Path(path) for path in uploads)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if not _NAME.fullmatch(name) or name.startswith(".") or path.is_symlink():
            raise FileProblem(
                f"{name[:80]!r} is not the name of a file of yours; a name has letters, digits, _ and -, "
                "and no folder"
            )
        return path

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not path.is_file():
            names = ", ".join(self.names()) or "none"
            raise FileProblem(f"there is no file {name!r}; files: {names}")
        return path

    def names(self) -> list[str]:
        """Return the names of all files, sorted; none before the first file is written."""
        paths = self.folder.glob("*")
        return sorted(path.name for path in paths if path.is_file() and not path.is_symlink())

    def write(
        self,
        name: str,
        content: str,
        *,
        append: bool = False,
        trailing_newline: bool = True,
        leading_newline: bool = False,
    ) -> None:
        """Write or append to a md, txt, json or csv file."""
        if not _WRITABLE.fullmatch(name):
            raise FileProblem(
                f"{name[:80]!r} cannot be written: a name has letters, digits, _ and - and ends in "
                ".md, .txt, .json or .csv"
            )
        path = self._path(name)
        old = _text(path) if append and path.is_file() else ""
        text = old + ("\n" if leading_newline else "") + content + ("\n" if trailing_newline else "")
        if len(text) > MAX_FILE_CHARS:
            raise FileProblem(
                f"{name} would have {len(text)} characters, at most {MAX_FILE_CHARS} are allowed"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")

    def replace(self, name: str, old: str, new: str) -> int:
        """Replace every occurrence and return their number."""
        path = self._existing(name)
        text = _text(path)
        if not old or old not in text:
            raise FileProblem(
                f"{name} does not hold the text {old[:80]!r}" if old else "the text to replace is empty"
            )
        self.write(name, text.replace(old, new), trailing_newline=False)
        return text.count(old)

    def read(self, name: str) -> str:
        """Return a file's text (of a PDF, its first pages); at most MAX_READ_CHARS characters."""
        path = self._existing(name)
        if path.suffix.lower() == ".pdf":
            try:
                pages = PdfReader(io.BytesIO(path.read_bytes())).pages
                text = "\n\n".join(page.extract_text() for page in pages[:MAX_PDF_PAGES])
            except PyPdfError as error:
                raise FileProblem(f"{name} is not a readable PDF ({error})") from None
        else:
            text = _text(path)
        more = len(text) - MAX_READ_CHARS
        return text if more <= 0 else text[:MAX_READ_CHARS] + f"\n... ({more} more characters)"

    def upload(self, path: str) -> Path:
        """Return the file that an upload may take.

        It is one of the user's uploads, by its path or name, or a file of the agent's own.
        """
        for allowed in self.uploads:
            if path in (str(allowed), allowed.name):
                if not allowed.is_file():
                    raise FileProblem(f"{path!r} does not exist")
                return allowed
        return self._existing(path)

    def download_path(self, suggested: str) -> Path:
        """Return where a download goes: its name made plain, with a number if the name is taken."""
        name = (
            re.sub(r"[^\w. ()-]", "_", suggested.replace("\\", "/").split("/")[-1])[-120:].lstrip(".")
            or "download"
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        stem, dot, suffix = name.rpartition(".") if "." in name else (name, "", "")
        path, number = self.folder / name, 1
        while path.exists() or path.is_symlink():
            number += 1
            path = self.folder / f"{stem}-{number}{dot}{suffix}"
        return path
