"""An OpenAI-compatible chat client on httpx: retries, a concurrency cap, token accounting, and a reply cache
on disk.

Purpose: every LLM role of the paper (teacher, reflection handler, judges, extraction) is one `ChatClient`; a
local server of a trained policy is one more. Nothing here imports the package: messages are the JSON that the
endpoint takes (`rmsweb.endpoint` makes it).

Keys come from the environment alone (RMSWEB_<ROLE>_API_KEY, else OPENAI_API_KEY) and are in no message, cache
entry or exception.

ours: bounded retries with jitter on 408, 409, 429, 5xx and timeouts, honouring Retry-After; none on other
refusals.
"""

import asyncio
import email.utils
import hashlib
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

RETRY_STATUSES = frozenset({408, 409, 429})
FIRST_REFUSALS = 3  # so many refused requests without one answer mean that the options are wrong
LENGTH_FIELDS = ("max_tokens", "max_completion_tokens")
MAX_WAIT_S = 60.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class ChatError(ConnectionError):
    """The endpoint gave no answer after all attempts; trying again later may help."""


class ChatRefused(ChatError):
    """The endpoint refused this one request (400, 413, 422): the same request will be refused again."""


class ChatConfigError(ValueError):
    """Key, URL, model or options are wrong (401, 403, 404, or every request refused): none can succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One answer of an endpoint; `cached` says that it came from disk and cost nothing."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    model: str = ""
    cached: bool = False


@dataclass(kw_only=True, slots=True)
class Totals:
    """What a client has used so far; cached answers are counted in `cached` alone."""

    calls: int = 0
    cached: int = 0
    retries: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for (a number or an HTTP date), within 0..60; None where it is
    missing or unreadable.

    >>> retry_after_s("2.5"), retry_after_s("soon"), retry_after_s("-1")
    (2.5, None, 0.0)
    """
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - (
                time.time() if now is None else now
            )
        except ValueError:
            return None
    return min(MAX_WAIT_S, max(0.0, seconds)) if seconds == seconds else None


def _api_key(role: str) -> str | None:
    return (
        os.environ.get(f"RMSWEB_{role.upper().replace('-', '_')}_API_KEY")
        or os.environ.get("OPENAI_API_KEY")
        or None
    )


@dataclass(kw_only=True)
class ChatClient:
    """One role's endpoint. Use as `async with ChatClient(...) as client`, or call `aclose` in the end.

    `base_url` is everything before /chat/completions; `cache` is a folder, None for no cache; `backoff_s` is
    the first pause between attempts.
    """

    base_url: str
    model: str
    role: str = "policy"
    concurrency: int = 16
    max_attempts: int = 6
    timeout_s: float = 120.0
    backoff_s: float = 0.5
    cache: Path | None = None
    totals: Totals = field(default_factory=Totals)
    _length_field: str = LENGTH_FIELDS[0]

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{self.role} endpoint {self.base_url!r} is not an http(s) URL, such as http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"the {self.role} endpoint's URL holds credentials or a query; give the key in RMSWEB_{self.role.upper()}_API_KEY instead"
            )
        if not self.model:
            raise ValueError(f"the {self.role} endpoint needs a model name")
        if min(self.concurrency, self.max_attempts) < 1:
            raise ValueError("concurrency and max_attempts must be at least 1")
        self._key = _api_key(self.role)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # A proxy from the environment must not see requests to this machine.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=self.timeout_s, trust_env=parts.hostname not in _LOOPBACK
        )
        self._slots = asyncio.Semaphore(self.concurrency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def chat(
        self, messages: list[dict[str, Any]], *, max_tokens: int, seed: int | None = None, **options: Any
    ) -> Completion:
        """Asks the endpoint. Options (temperature, top_p, top_k, ...) are sent as they are, those that are
        None are left out.

        Raises ChatError after `max_attempts`, ChatRefused for a request that is not acceptable,
        ChatConfigError for a wrong key, URL or model.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "seed": seed,
            **options,
        }
        body = {name: value for name, value in body.items() if value is not None}
        entry = self._entry(body)
        stored = _read_entry(entry)
        if stored is not None:
            self.totals.cached += 1
            return stored
        async with self._slots:
            completion = await self._ask(body)
        self.totals.calls += 1
        self.totals.prompt_tokens += completion.prompt_tokens
        self.totals.completion_tokens += completion.completion_tokens
        if entry is not None:
            _write_entry(entry, completion)
        return completion

    def _entry(self, body: dict[str, Any]) -> Path | None:
        """Cache file of a request: the key is the sha256 of URL and body, images included."""
        if self.cache is None:
            return None
        request = json.dumps([self.base_url.rstrip("/"), body], sort_keys=True, ensure_ascii=False)
        return self.cache / f"{hashlib.sha256(request.encode('utf-8', 'surrogatepass')).hexdigest()}.json"

    async def _ask(self, body: dict[str, Any]) -> Completion:
        """One request with its retries."""
        url, problem = self.base_url.rstrip("/") + "/chat/completions", ""
        for attempt in range(1, self.max_attempts + 1):
            wait = min(MAX_WAIT_S, self.backoff_s * 2 ** (attempt - 1)) * random.uniform(
                0.5, 1.0
            )  # jitter: waiting callers do not return together
            try:
                response = await self._http.post(url, json=self._named(body))
            except httpx.TransportError as error:  # timeouts included
                problem = f"{type(error).__name__} {self._safe(str(error))}".strip()
            else:
                if response.status_code == 200:
                    completion = _completion(response, self.model)
                    if completion is not None:
                        return completion
                    problem = "the answer is not a chat completion"
                elif response.status_code in RETRY_STATUSES or response.status_code >= 500:
                    problem = f"HTTP {response.status_code} {self._safe(response.text)}"
                    wait = retry_after_s(response.headers.get("retry-after")) or wait
                elif (
                    response.status_code == 400
                    and LENGTH_FIELDS[1] in response.text
                    and self._length_field != LENGTH_FIELDS[1]
                ):
                    self._length_field, wait = LENGTH_FIELDS[1], 0.0  # newer models renamed the field
                    problem = "HTTP 400 about max_tokens"
                else:
                    self._refuse(response)
            if attempt < self.max_attempts:
                self.totals.retries += 1
                await asyncio.sleep(wait)
        raise ChatError(
            f"{self.role} endpoint {url}: no answer after {self.max_attempts} attempts; last: {problem}"
        )

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the length limit under the name that this endpoint takes."""
        return {
            self._length_field if name == LENGTH_FIELDS[0] else name: value for name, value in body.items()
        }

    def _refuse(self, response: httpx.Response) -> None:
        """Raises for an answer that a retry cannot change."""
        self.totals.refused += 1
        message = (
            f"{self.role} endpoint {response.url}: HTTP {response.status_code} {self._safe(response.text)}"
        )
        hopeless = self.totals.calls == 0 and self.totals.refused >= FIRST_REFUSALS
        if response.status_code in (401, 403, 404) or response.is_redirect or hopeless:
            raise ChatConfigError(message)
        raise ChatRefused(message)

    def _safe(self, text: str) -> str:
        """A server's words, shortened, without the key."""
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]


def _completion(response: httpx.Response, model: str) -> Completion | None:
    """The body of a 200 answer, None where it is not a chat completion."""
    try:
        data = response.json()
        choice = data["choices"][0]
        text, usage = choice["message"].get("content") or "", data.get("usage") or {}
        if not isinstance(text, str):
            return None
        return Completion(
            text=text,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
            finish_reason=str(choice.get("finish_reason") or ""),
            model=str(data.get("model") or model),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _read_entry(entry: Path | None) -> Completion | None:
    """A cached answer; a file that a killed writer left broken counts as absent."""
    if entry is None or not entry.exists():
        return None
    try:
        return Completion(**json.loads(entry.read_text(encoding="utf-8")), cached=True)
    except (ValueError, TypeError):
        return None


def _write_entry(entry: Path, completion: Completion) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}.{id(completion)}.tmp")
    values = {
        name: getattr(completion, name)
        for name in ("text", "prompt_tokens", "completion_tokens", "finish_reason", "model")
    }
    temporary.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, entry)
