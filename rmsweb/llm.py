"""LLM roles behind OpenAI-compatible endpoints: retries, a concurrency cap, and a cache of replies on disk.

Purpose: every LLM role of the paper (teacher, reflection handler, judges, extraction) is one `Endpoint`; a
local server of a trained policy is one more. An endpoint is a `records.Policy`. Pictures travel as data URLs,
unresized: the endpoint's own image processor holds the pixel cap.

Keys come from the environment alone (RMSWEB_<ROLE>_API_KEY, else OPENAI_API_KEY) and are in no message, cache
entry or exception.

ours: bounded retries with jitter on 408, 409, 429, 5xx and timeouts, honouring Retry-After; none on other
refusals.
"""

import asyncio
import base64
import email.utils
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from rmsweb.jsonl import dumps, from_json, replace_file
from rmsweb.pictures import load_picture
from rmsweb.records import Image, Message, Reply

RETRY_STATUSES = frozenset({408, 409, 429})
FIRST_REFUSALS = 3  # so many refused requests without one answer mean that the options are wrong
LENGTH_FIELD, NEW_LENGTH_FIELD = "max_tokens", "max_completion_tokens"  # newer models renamed it
MAX_WAIT_S = 60.0
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


class ChatError(ConnectionError):
    """The endpoint gave no answer after all attempts; trying again later may help."""


class ChatRefused(ChatError):
    """The endpoint refused this one request (400, 413, 422): the same request will be refused again."""


class ChatConfigError(ValueError):
    """Key, URL, model or options are wrong (401, 403, 404, or every request refused): none can succeed."""


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or an HTTP date), within 0..60.

    None where it is missing or unreadable.

    >>> retry_after_s("2.5"), retry_after_s("soon"), retry_after_s("-1")
    (2.5, None, 0.0)
    """
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = date.timestamp() - time.time()
    return min(MAX_WAIT_S, max(0.0, seconds)) if seconds == seconds else None


def data_url(image: Image, root: Path) -> str:
    """Return a picture as a data URL, index boxes drawn.

    Raises FileNotFoundError, and ValueError for a file of an unknown kind.
    """
    path = root / image.path
    mime = MIME.get(path.suffix.lower())
    if mime is None:
        kind = path.suffix or "nameless"
        raise ValueError(f"{path}: found a {kind} file, expected one of {', '.join(MIME)}")
    data = path.read_bytes()
    if image.boxes:
        drawn = BytesIO()
        load_picture(image, root).save(drawn, format="PNG")
        mime, data = "image/png", drawn.getvalue()
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def openai_messages(messages: Sequence[Message], image_root: Path) -> list[dict[str, Any]]:
    """Return messages in the OpenAI chat format.

    Neighbouring texts are joined without a separator; a message without a picture is a plain string.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        content: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, Image):
                content.append({"type": "image_url", "image_url": {"url": data_url(part, image_root)}})
            elif content and "text" in content[-1]:
                content[-1]["text"] += part.text
            else:
                content.append({"type": "text", "text": part.text})
        plain = len(content) == 1 and "text" in content[0]
        result.append({"role": message.role, "content": content[0]["text"] if plain else content})
    return result


@dataclass(kw_only=True)
class Endpoint:
    """The endpoint of one role, as a Policy. Use as `async with Endpoint(...) as endpoint`.

    `url` is everything before /chat/completions. `options` (temperature, top_p, top_k, ...) go with every
    request, but those that are None. `image_root` is the folder that paths of pictures are relative to.
    `cache` is a folder of replies, None for no cache. `backoff_s` is the first pause between attempts.

    Raises ValueError for settings with which no request can succeed.
    """

    role: str
    url: str
    model: str
    image_root: Path = Path()
    options: dict[str, Any] = field(default_factory=dict)
    cache: Path | None = None
    concurrency: int = 16
    max_attempts: int = 6
    timeout_s: float = 120.0
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        variable = f"RMSWEB_{self.role.upper().replace(' ', '_')}_API_KEY"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.role} endpoint {self.url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"the {self.role} endpoint's URL holds credentials or a query; give the key in {variable} "
                "instead"
            )
        if not self.model:
            raise ValueError(f"the {self.role} endpoint needs a model name")
        self._key = os.environ.get(variable) or os.environ.get("OPENAI_API_KEY") or None
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy from the environment must not see requests to this machine.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, trust_env=parts.hostname not in LOOPBACK
        )
        self._slots = asyncio.Semaphore(self.concurrency)
        self._length_field = LENGTH_FIELD
        self._answered, self._refusals = False, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def __call__(
        self, messages: Sequence[Message], *, seed: int, purpose: str, max_tokens: int
    ) -> Reply:
        """Return one answer.

        A request that the endpoint refuses (too long, filtered) is an empty answer: the model's failure, not
        the run's.
        """
        try:
            return await self.chat(
                openai_messages(messages, self.image_root), max_tokens=max_tokens, seed=seed
            )
        except ChatRefused as error:
            return Reply(text="", finish_reason=f"refused: {error}", model=self.model)

    async def chat(self, messages: list[dict[str, Any]], *, max_tokens: int, seed: int) -> Reply:
        """Ask the endpoint, or the cache, with messages in the OpenAI chat format.

        Raises ChatError after `max_attempts`, ChatRefused for a request that is not acceptable,
        ChatConfigError for a wrong key, URL or model.
        """
        body = {"model": self.model, "messages": messages, "seed": seed, **self.options}
        body = {name: value for name, value in body.items() if value is not None}
        entry = self._entry(body | {LENGTH_FIELD: max_tokens})
        reply = _stored(entry) if entry else None
        if reply is None:
            async with self._slots:
                reply = await self._ask(body, max_tokens)
            self._answered = True
            if entry:
                with replace_file(entry) as temporary:
                    temporary.write_text(dumps(reply), encoding="utf-8")
        return reply

    def _entry(self, body: dict[str, Any]) -> Path | None:
        """Return the cache file of a request: its name is the sha256 of URL and body, pictures included."""
        if self.cache is None:
            return None
        request = json.dumps([self.url.rstrip("/"), body], sort_keys=True, ensure_ascii=False)
        return self.cache / f"{hashlib.sha256(request.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    async def _ask(self, body: dict[str, Any], max_tokens: int) -> Reply:
        """Send a request until it is answered or refused."""
        url, problem, wait = self.url.rstrip("/") + "/chat/completions", "", 0.0
        for attempt in range(self.max_attempts):
            if attempt:
                await asyncio.sleep(wait)
            # Jitter: callers that wait do not return together.
            wait = min(MAX_WAIT_S, self.backoff_s * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                response = await self._http.post(url, json=body | {self._length_field: max_tokens})
            except httpx.TransportError as error:  # timeouts included
                problem = f"{type(error).__name__} {self._safe(str(error))}".strip()
                continue
            problem = f"HTTP {response.status_code} {self._safe(response.text)}"
            if response.status_code == 200:
                reply = _reply(response, self.model)
                if reply is not None:
                    return reply
                problem = "the answer is not a chat completion"
            elif response.status_code in RETRY_STATUSES or response.status_code >= 500:
                wait = retry_after_s(response.headers.get("retry-after")) or wait
            elif (
                response.status_code == 400
                and self._length_field == LENGTH_FIELD
                and NEW_LENGTH_FIELD in response.text
            ):
                self._length_field, wait = NEW_LENGTH_FIELD, 0.0
            else:
                self._refuse(response, problem)
        raise ChatError(
            f"{self.role} endpoint {url}: no answer after {self.max_attempts} attempts; last: {problem}"
        )

    def _refuse(self, response: httpx.Response, problem: str) -> None:
        """Raise for an answer that a retry cannot change."""
        self._refusals += 1
        hopeless = not self._answered and self._refusals >= FIRST_REFUSALS
        wrong = response.status_code in (401, 403, 404) or response.is_redirect or hopeless
        raise (ChatConfigError if wrong else ChatRefused)(f"{self.role} endpoint {response.url}: {problem}")

    def _safe(self, text: str) -> str:
        """Return a server's words, shortened, without the key."""
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _reply(response: httpx.Response, model: str) -> Reply | None:
    """Return the body of a 200 answer as a reply, None where it is not a chat completion."""
    try:
        data = response.json()
        choice = data["choices"][0]
        text, usage = choice["message"].get("content") or "", data.get("usage") or {}
        if not isinstance(text, str):
            return None
        return Reply(
            text=text,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            finish_reason=str(choice.get("finish_reason") or ""),
            model=str(data.get("model") or model),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _stored(entry: Path) -> Reply | None:
    """Return a cached reply; a file that a killed writer left broken counts as absent."""
    with suppress(OSError, ValueError):
        return from_json(Reply, json.loads(entry.read_bytes()))
    return None
