"""LLM roles behind OpenAI-compatible endpoints: retries, a concurrency cap, and a cache of replies on disk.

Purpose: every LLM role of the paper (teacher, reflection handler, judges, extraction) is one `Endpoint`; a
local server of a trained policy is one more. An endpoint is a `records.Policy`. Pictures travel as data URLs,
unresized: the endpoint's own image processor holds the pixel cap.

Keys come from the environment alone (KEY_VARIABLES) and are in no message, cache entry or exception.

ours: bounded retries with jitter where `answers.RULES` say so, honouring Retry-After. ours: tokens that are
not reported are unknown.
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
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import httpx

from rmsweb.answers import Unanswered, read_answer
from rmsweb.config import Config, opt
from rmsweb.jsonl import dumps, from_json, inside, replace_file
from rmsweb.pictures import load_picture
from rmsweb.records import Image, Message, Reply

# Finish reasons of answers that may come out otherwise next time, so that no cache keeps them.
UNFINISHED = frozenset({"length", "content_filter"})
# So many requests refused for no reason that `answers` knows, without one answer: the options are wrong.
FIRST_REFUSALS = 20
LENGTH_FIELD, NEW_LENGTH_FIELD = "max_tokens", "max_completion_tokens"  # newer models renamed it
MAX_WAIT_S = 60.0
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
# Where each role's key comes from. A role that has no URL of its own uses another role's endpoint, and there
# also that role's key, which is the second name.
# fmt: off
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "policy": ("RMSWEB_POLICY_API_KEY",),
    "teacher": ("RMSWEB_TEACHER_API_KEY",),
    "reflection": ("RMSWEB_REFLECTION_API_KEY", "RMSWEB_TEACHER_API_KEY"),
    "extraction": ("RMSWEB_EXTRACTION_API_KEY", "RMSWEB_TEACHER_API_KEY"),
    "judge": ("RMSWEB_JUDGE_API_KEY",),
    "failure judge": ("RMSWEB_FAILURE_JUDGE_API_KEY",),
}
# fmt: on
ANY_KEY = "OPENAI_API_KEY"  # of every role without a key of its own


def key_variables(role: str, *, shares_key: bool) -> tuple[str, ...]:
    """Return the environment variables that may hold a role's key; the first that is set counts."""
    return (*KEY_VARIABLES[role][: 2 if shares_key else 1], ANY_KEY)


class ChatError(ConnectionError):
    """The endpoint gave no answer after all attempts; trying again later may help."""


class ChatRefused(ChatError):
    """The endpoint refused this one request: the same request will be refused again."""


class ChatConfigError(ValueError):
    """Key, quota, URL, model or options are wrong: no request can succeed."""


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
    path = inside(root, image.path)
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
    request, but those that are None. `shares_key`: it is the endpoint of the role that this one falls back
    to. `image_root` is the folder that paths of pictures are relative to. `cache` is a folder of replies,
    None for no cache. `backoff_s` is the first pause between attempts.

    Raises ValueError for settings with which no request can succeed.
    """

    role: str
    url: str
    model: str
    image_root: Path = Path()
    options: dict[str, Any] = field(default_factory=dict)
    length_field: str = LENGTH_FIELD
    shares_key: bool = False
    cache: Path | None = None
    concurrency: int = 16
    max_attempts: int = 6
    timeout_s: float = 120.0
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._variables = key_variables(self.role, shares_key=self.shares_key)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.role} endpoint {self.url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"the {self.role} endpoint's URL holds credentials or a query; give the key in "
                f"{self._variables[0]} instead"
            )
        if not self.model:
            raise ValueError(f"the {self.role} endpoint needs a model name")
        keys = (os.environ.get(variable, "").strip() for variable in self._variables)
        self._key = next(filter(None, keys), None)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy from the environment must not see requests to this machine.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, trust_env=parts.hostname not in LOOPBACK
        )
        self._slots = asyncio.Semaphore(self.concurrency)
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
        fields = {"model": self.model, "messages": messages, "seed": seed, **self.options}
        body = {name: value for name, value in fields.items() if value is not None}
        entry = self._entry(body | {LENGTH_FIELD: max_tokens})
        reply = _stored(entry) if entry else None
        if reply is None:
            async with self._slots:
                reply = await self._ask(body, max_tokens)
            self._answered = True
            if entry and reply.text and reply.finish_reason not in UNFINISHED:
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
                response = await self._http.post(url, json={self.length_field: max_tokens} | body)
            except httpx.RequestError as error:  # timeouts included
                problem = f"{type(error).__name__} {self._safe(str(error))}".strip()
                continue
            if isinstance(answer := read_answer(response, self.model), Reply):
                return answer
            words = response.headers.get("location") or response.text
            problem = f"HTTP {response.status_code} {self._safe(words)}"
            if answer.status == 400 and self.length_field == LENGTH_FIELD and NEW_LENGTH_FIELD in words:
                self.length_field, wait = NEW_LENGTH_FIELD, 0.0
            elif answer.then == "retry":
                wait = retry_after_s(response.headers.get("retry-after")) or wait
            else:
                self._refuse(f"{self.role} endpoint {response.url}: {problem}", answer)
        raise ChatError(
            f"{self.role} endpoint {url}: no answer after {self.max_attempts} attempts; last: {problem}"
        )

    def _refuse(self, problem: str, answer: Unanswered) -> None:
        """Raise for an answer that a retry cannot change."""
        self._refusals += answer.then is None
        if answer.then == "stop" or (not self._answered and self._refusals >= FIRST_REFUSALS):
            source = f"; the key comes from {', else '.join(self._variables)}"
            raise ChatConfigError(problem + (source if answer.status in (401, 403) else ""))
        raise ChatRefused(problem)

    def _safe(self, text: str) -> str:
        """Return a server's words, shortened, without the key."""
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _stored(entry: Path) -> Reply | None:
    """Return a cached reply; a file that a killed writer left broken counts as absent."""
    with suppress(OSError, ValueError):
        return from_json(Reply, json.loads(entry.read_bytes()))
    return None


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(Config):
    """Endpoint of a role. A subclass names the role and, as `prefix`, what its flags begin with."""

    role: ClassVar[str]
    url: str | None = opt(None, "OpenAI-compatible endpoint, such as https://host/v1")
    model: str | None = opt(None, "model name there")
    length_field: str | None = opt(
        None,
        "request field that limits the answer (without it max_tokens, or max_completion_tokens if asked)",
    )
    extra: dict[str, Any] | None = opt(
        None,
        'further fields of the request, such as \'{"reasoning_effort":"low"}\'; they win over those of '
        "other flags, and null leaves a field out",
    )

    @classmethod
    def title(cls) -> str:
        """Return the heading in --help, with the names of the key's variables."""
        return f"{super().title()} (key: {', else '.join(key_variables(cls.role, shares_key=True))})"

    def or_else(self, other: "EndpointConfig") -> Self:
        """Return the config with the other role's values where it has none.

        The request fields are the other role's only at the other role's endpoint.
        """
        own = {name: value for name, value in vars(self).items() if value is not None}
        same = self.url in (None, other.url)
        there = {name: vars(other)[name] for name in ("url", "model", "length_field", "extra")}
        return replace(self, **((there if same else {"model": other.model}) | own))

    def open(self, root: Path, concurrency: int, *, shares_key: bool = False, **options: Any) -> Endpoint:
        """Return the endpoint of a run in folder `root`; nothing is sent yet."""
        return Endpoint(
            role=self.role,
            url=self.url or "",
            model=self.model or "",
            image_root=root,
            concurrency=concurrency,
            length_field=self.length_field or LENGTH_FIELD,
            shares_key=shares_key,
            options=options | (self.extra or {}),
        )


@dataclass(frozen=True, kw_only=True)
class RoleConfig(EndpointConfig):
    """Endpoint of a role, with the temperature of its answers."""

    temperature: float | None = opt(
        None, "sampling temperature; none leaves the field out, as some models ask for", at_least=0
    )

    def open(self, root: Path, concurrency: int, **settings: Any) -> Endpoint:
        """Return the endpoint of a run in folder `root`; nothing is sent yet."""
        return super().open(root, concurrency, temperature=self.temperature, **settings)
