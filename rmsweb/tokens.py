"""Tokens of a text without torch: by a tokenizer.json, or by an estimate where the tokenizer is unknown."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

CountTokens = Callable[[str], int]


def approximate_tokens(text: str) -> int:
    """Count one token for three UTF-8 bytes: an upper estimate for English where the tokenizer is unknown."""
    return len(text.encode()) // 3 + 1


def tokenizer_files(path: Path | None) -> tuple[Path, ...]:
    """Return the tokenizer.json that a path names, itself or by its folder; nothing without a path.

    Raises FileNotFoundError.
    """
    if path is None:
        return ()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no tokenizer there (a checkpoint folder with tokenizer.json, or that file)"
        )
    return (file,)


def token_counter(path: Path | None) -> CountTokens:
    """Return a counter with the tokenizer.json of a checkpoint folder, without one an upper estimate.

    Control tokens in a text count as plain text.
    """
    files = tokenizer_files(path)
    if not files:
        return approximate_tokens
    tokenizer = Tokenizer.from_file(str(files[0]))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # both may lie in the file, for the batches of a training
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
