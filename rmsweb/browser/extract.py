"""A page as markdown, in pieces: what the extraction role reads.

Purpose: `extract_structured_data` answers from the whole page, not from the screen. The page's HTML comes
from act.js with shadow roots in place and a stand-in for each frame, so nothing that is displayed is missing;
tables stay tables.

ours: a piece ends at a paragraph or a line, and the next one starts at the very next character: nothing is
lost or read twice.
"""

import re
from dataclasses import dataclass

from markdownify import markdownify

PIECE_CHARS = 30_000  # Browser Use 0.7.10
_FRAME = re.compile(r'<rms-frame id="(\d+)"></rms-frame>')


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a page's text; `next_char` is where the following piece starts, None at the end."""

    text: str
    next_char: int | None
    total: int


def splice_frames(html: str, frames: dict[int, str]) -> str:
    """Put each frame's HTML in the place of its stand-in."""
    return _FRAME.sub(lambda match: f"<div>{frames.get(int(match[1]), '')}</div>", html)


def to_markdown(html: str, *, links: bool = False) -> str:
    """Return HTML of displayed content as markdown, with link addresses only if `links`.

    >>> to_markdown("<h1>Menu</h1><p>Tea <a href='/t'>2 EUR</a></p>")
    '# Menu\\n\\nTea 2 EUR'
    """
    strip = ["img"] if links else ["img", "a"]
    text = markdownify(
        html,
        heading_style="ATX",
        strip=strip,
        escape_misc=False,
        escape_asterisks=False,
        escape_underscores=False,
    )
    text = re.sub(r"[ \t]+$", "", text.replace("\u00a0", " "), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def piece(text: str, start: int = 0, size: int = PIECE_CHARS) -> Piece:
    """Return the piece of a text that starts at a character; at most `size` characters.

    >>> piece("one\\n\\ntwo", 0, 6)
    Piece(text='one\\n\\n', next_char=5, total=8)
    """
    if start + size >= len(text):
        return Piece(text[start:], None, len(text))
    end = start + size
    for mark, share in (("\n\n", 0.5), ("\n", 0.25), (" ", 0.1)):
        at = text.rfind(mark, end - max(len(mark), int(size * share)), end)
        if at > start:
            end = at + len(mark)
            break
    return Piece(text[start:end], end, len(text))
