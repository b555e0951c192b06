"""What the agent may open, and what must not leak: URL schemes, allowed domains, placeholders for secrets.

Purpose: safety of live runs. Pages are untrusted and so are the policy's answers: a URL is judged before it
is opened and again after it was reached. A secret that a user lends to a task is written as
`<secret>name</secret>` wherever the policy or a record could see it.

ours: the paper says nothing about safety.
"""

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote_plus, urlsplit

SEARCH_URLS = {
    "duckduckgo": "https://duckduckgo.com/?q={query}",
    "google": "https://www.google.com/search?q={query}&udm=14",
    "bing": "https://www.bing.com/search?q={query}",
}
BLANK = "about:blank"
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: no file takes it
_ESCAPE = re.compile(r"\\(?:(ud[89a-f]..)|.)")
_SECRET = re.compile(r"<secret>(.*?)</secret>")
_HOST = re.compile(r"^(localhost|[\w-]+(\.[\w-]+)+)(:\d+)?([/?#]|$)", re.IGNORECASE)


def complete_url(url: str) -> str:
    """Return a URL as people type it with its scheme.

    >>> complete_url("shop.localhost/cart"), complete_url(" example.com ")
    ('http://shop.localhost/cart', 'https://example.com')
    """
    url = url.strip()
    match = _HOST.match(url)
    if not match:
        return url
    local = (
        match[1].lower() == "localhost"
        or match[1].lower().endswith(".localhost")
        or re.fullmatch(r"[\d.]+", match[1])
    )
    return ("http://" if local else "https://") + url


def search_url(query: str, engine: str, engines: Mapping[str, str] = SEARCH_URLS) -> str:
    """Return the results page of a search.

    `engine` is a known name or a URL with {query}. ValueError for another one.

    >>> search_url("red shoes", "bing")
    'https://www.bing.com/search?q=red+shoes'
    """
    template = engine if "{query}" in engine else engines.get(engine.lower())
    if template is None:
        raise ValueError(
            f"unknown search engine {engine[:60]!r}; known are {', '.join(engines)} and a URL with {{query}}"
        )
    return template.replace("{query}", quote_plus(query))


class Guard:
    """Which URLs may be opened.

    `domains`: None for any host; an entry stands for itself and everything below it, with or without `*.`.
    """

    def __init__(self, domains: Sequence[str] | None = None) -> None:
        self.domains = (
            None
            if domains is None
            else tuple(domain.lower().removeprefix("*.").strip(".") for domain in domains)
        )

    def allows(self, url: str) -> bool:
        """Return whether the URL is one of the domains' web pages."""
        return url != BLANK and not url.startswith("blob:") and self.problem(url) is None

    def problem(self, url: str) -> str | None:
        """Return why the URL may not be opened, None if it may.

        >>> Guard(["example.com"]).problem("https://www.example.com/a") is None
        True
        >>> Guard(["example.com"]).problem("https://example.com.evil.org/")
        'the host example.com.evil.org is not among the allowed domains (example.com)'
        """
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").rstrip(".")
        except ValueError:
            return f"{url[:100]!r} is not a URL"
        if url == BLANK or parts.scheme == "blob":
            return None
        if parts.scheme not in ("http", "https"):
            return f"URLs with {parts.scheme or 'no scheme'!r} may not be opened, only http and https"
        if not host:
            return f"{url[:100]!r} has no host"
        if self.domains is None or any(
            host == domain or host.endswith("." + domain) for domain in self.domains
        ):
            return None
        return f"the host {host} is not among the allowed domains ({', '.join(self.domains)})"


class Secrets:
    """Values that the policy and the records see only by name: domain -> name -> value.

    A value is given to its domain and what lies below it alone.
    """

    def __init__(self, domains: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._given = [
            (Guard([domain]), name, value)
            for domain, values in (domains or {}).items()
            for name, value in values.items()
            if value
        ]
        self._masked = sorted(
            {(value, name) for _, name, value in self._given}, key=lambda pair: (-len(pair[0]), pair)
        )

    def fill(self, text: str, url: str) -> str:
        """Put values in the place of placeholders, for a text that a document of this URL will get.

        ValueError for an unknown name or one that is not for this URL.

        >>> Secrets({"example.com": {"pin": "0042"}}).fill("<secret>pin</secret>", "https://www.example.com/a")
        '0042'
        """

        def value(match: re.Match[str]) -> str:
            known = [(guard, value) for guard, name, value in self._given if name == match[1]]
            if not known:
                raise ValueError(f"there is no secret named {match[1][:60]!r}")
            found = next((value for guard, value in known if guard.allows(url)), None)
            if found is None:
                raise ValueError(f"the secret {match[1]!r} may not be given to this site")
            return found

        return _SECRET.sub(value, text) if self._given else text

    def mask(self, text: str) -> str:
        """Put placeholders in the place of values, longest first; half of a surrogate pair becomes U+FFFD.

        >>> Secrets({"example.com": {"pin": "0042"}}).mask("pin 0042")
        'pin <secret>pin</secret>'
        """
        text = _HALF.sub("\ufffd", text)
        for value, name in self._masked:
            text = text.replace(value, f"<secret>{name}</secret>")
        return text

    def mask_json(self, text: str) -> str:
        """Do the same in JSON text, where a value may have escapes and half of a pair is always escaped."""
        if "\\ud" in text:
            text = _ESCAPE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
        for value, name in self._masked:
            for ascii_only in (False, True):
                text = text.replace(
                    json.dumps(value, ensure_ascii=ascii_only)[1:-1], f"<secret>{name}</secret>"
                )
        return text
