"""An endpoint as a Policy: records' messages -> the OpenAI chat format -> a Reply.

Purpose: the agent loop, the reflection handler and the judges take a `records.Policy`; this one asks a
`ChatClient`. Pictures travel as data URLs, unresized: the endpoint's own image processor holds the pixel cap.
"""

import base64
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rmsweb.llm import ChatClient, ChatRefused
from rmsweb.pictures import load_picture
from rmsweb.records import Image, Message, Reply, Text

_MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


def data_url(image: Image, root: Path) -> str:
    """A picture as a data URL, index boxes drawn; FileNotFoundError where there is none, ValueError where its
    kind is not known.
    """
    path = root / image.path
    mime = _MIME.get(path.suffix.lower())
    if mime is None:
        raise ValueError(
            f"{path}: found a {path.suffix or 'nameless'} file, expected one of {', '.join(_MIME)}"
        )
    data = path.read_bytes()
    if image.boxes:
        drawn = BytesIO()
        load_picture(image, root).save(drawn, format="PNG")
        mime, data = "image/png", drawn.getvalue()
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def openai_messages(messages: Sequence[Message], image_root: Path) -> list[dict[str, Any]]:
    """Messages in the OpenAI chat format.

    Neighbouring texts are joined without a separator; a message without a picture is a plain string.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, Image):
                content.append({"type": "image_url", "image_url": {"url": data_url(part, image_root)}})
            elif content and content[-1]["type"] == "text":
                content[-1]["text"] += part.text
            else:
                content.append({"type": "text", "text": part.text})
        plain = all(isinstance(part, Text) for part in message.parts)
        result.append(
            {"role": message.role, "content": "".join(item["text"] for item in content) if plain else content}
        )
    return result


class EndpointPolicy:
    """A Policy that asks an endpoint; `options` (temperature, top_p, top_k, ...) go with every request."""

    def __init__(self, client: ChatClient, image_root: Path, **options: Any) -> None:
        self.client, self.image_root, self.options = client, image_root, options

    async def __call__(self, messages: list[Message], *, seed: int, purpose: str, max_tokens: int) -> Reply:
        """One answer.

        A request that the endpoint refuses (too long, filtered) is an empty answer: the model's failure, not
        the run's.
        """
        try:
            done = await self.client.chat(
                openai_messages(messages, self.image_root), max_tokens=max_tokens, seed=seed, **self.options
            )
        except ChatRefused as error:
            return Reply(text="", finish_reason=f"refused: {error}", model=self.client.model)
        return Reply(
            text=done.text,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            finish_reason=done.finish_reason,
            model=done.model,
        )


def open_endpoint(
    role: str,
    url: str,
    model: str,
    image_root: Path,
    *,
    concurrency: int = 16,
    cache: Path | None = None,
    **options: Any,
) -> EndpointPolicy:
    """The Policy of an LLM role; close it with `await policy.client.aclose()`. ValueError for a wrong URL."""
    return EndpointPolicy(
        ChatClient(base_url=url, model=model, role=role, concurrency=concurrency, cache=cache),
        image_root,
        **options,
    )


def token_counter(path: Path) -> Callable[[str], int]:
    """Counts tokens with the tokenizer.json of a checkpoint folder; control tokens in a text count as plain
    text. Needs no torch.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no tokenizer there (a checkpoint folder with tokenizer.json, or that file)"
        )
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
