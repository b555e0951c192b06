"""Similarity of texts and URLs: when two values mean the same, nearly the same, or something else.

Purpose: the reward (App. H, Table 4) needs "text similarity high" and "host and path match"; the miner
compares states and memories; the contamination check compares tasks. All of them use these functions.

Place in the paper: App. H asks that formatting-only changes count as near and that 100 / 1000, neighbouring
indices and near-identical URLs with another date do not; it leaves the measure open.

Deviations, all `ours:` because the paper names no measure:
1. Texts are near by content words and guarded tokens, not by an edit ratio: a ratio scores "100" and "1000"
   above 0.85.
2. Word order is ignored, except that a word behind `from`, `to`, `between`, `before`, ... may not change
   (swapped origin and destination).
3. A URL whose query contradicts a date of the other one is another destination, although host and path match.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

SIMILAR_TEXT = 0.8  # ours: smallest Jaccard overlap of content words of "similar" texts

_SMALL = (
    "a an and are as at be by for from i in is it its me my of on our please some that the their these this "
    "those to was we were will with you your"
)
_NEGATIONS = "no non none not nor never neither without except excluding cannot unless anti un"
_BOUNDS = (
    "under over below above less fewer more least most min max minimum maximum before after until since am "
    "pm lowest highest cheapest ascending descending"
)
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand "
    "million billion half double "
    "first second third fourth fifth sixth seventh eighth ninth tenth"
)
_WEEKDAYS = (
    "monday tuesday wednesday thursday friday saturday sunday mon tue wed thu fri sat sun "
    "today tomorrow yesterday"
)
_MONTHS = "january february march april may june july august september october november december"
_BINDING = "from to between before after until since in on at by"  # words whose object matters

_STOP_WORDS = frozenset(_SMALL.split())
_MONTH_NUMBER = {
    name[:length]: number for number, name in enumerate(_MONTHS.split(), 1) for length in {3, len(name)}
} | {"sept": 9}
_GUARDED = frozenset(f"{_NEGATIONS} {_BOUNDS} {_NUMBER_WORDS} {_WEEKDAYS}".split()) | set(_MONTH_NUMBER)
_RELATIONS = frozenset(_BINDING.split())

_ACCENT = re.compile("[\u0300-\u036f]")  # other scripts' combining marks are letters of their own
_NOT_CONTRACTED = re.compile(r"n['’]t\b")
_MINUS = re.compile(r"(?<![^\s(\[$€£¥])[-−–](?=[^\W_])")  # a sign or a search engine's "not", unlike a hyphen
_THOUSANDS = re.compile(r"(?<=\d)[,'’](?=\d{3}(?!\d))")
_GLUED = re.compile(r"(?<=\d)(am|pm)\b|(?<=\d)(?:st|nd|rd|th)\b")
# A word or number of a folded text; also 3.5, 12:30, c++.
_TOKEN = re.compile("[a-z0-9\x80-\U0010ffff]+(?:[.:][0-9]+)*[+#]*")
_UNIT = re.compile(r"[€£¥₹$%°]")
_SIGNS = re.compile(r"[€£¥₹°−–]")


def jaccard(a: Iterable[Hashable], b: Iterable[Hashable]) -> float:
    """Return the overlap of two multisets, |a & b| / |a | b|, in [0, 1]; two empty ones overlap fully.

    >>> jaccard("aab", "abb")
    0.5
    """
    x, y = Counter(a), Counter(b)
    union = (x | y).total()
    return (x & y).total() / union if union else 1.0


@dataclass(frozen=True, slots=True)
class _Folded:
    """A text without its formatting."""

    content: tuple[str, ...]  # content words and numbers, singular
    guarded: Counter[str]  # tokens that carry a number, a negation, a bound or a date
    letters: str  # all letters and digits on end
    digits: tuple[str, ...]  # runs of digits, in order
    # "from" -> the content words behind it; "unit" -> currency and per cent signs
    relations: dict[str, set[str]]


def _plain(text: str) -> str:
    """Return a text without accents and case.

    A sign beyond ASCII that is no letter, digit or combining mark becomes a space.
    """
    plain = _ACCENT.sub("", unicodedata.normalize("NFKD", text)).casefold()
    if plain.isascii():
        return plain
    return "".join(
        char
        if char < "\x80" or char in "€£¥₹°’−–" or char.isalnum() or unicodedata.category(char)[0] == "M"
        else " "
        for char in plain
    )


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _fold(text: str) -> _Folded:
    plain = _MINUS.sub(" not ", _NOT_CONTRACTED.sub(" not", _plain(text)))
    relations: dict[str, set[str]] = {"unit": set(_UNIT.findall(plain))}
    plain = _GLUED.sub(
        lambda match: f" {match[1] or ''}",
        _SIGNS.sub(" ", _THOUSANDS.sub("", plain).replace("'", "").replace("’", "")),
    )
    words = [_singular(word) for word in _TOKEN.findall(plain)]
    for before, word in pairwise(words):
        if before in _RELATIONS and word not in _STOP_WORDS:
            relations.setdefault(before, set()).add(word)
    return _Folded(
        content=tuple(word for word in words if word not in _STOP_WORDS),
        guarded=Counter(word for word in words if word in _GUARDED or any(char.isdigit() for char in word)),
        letters="".join(words),
        digits=tuple(re.findall(r"\d+", plain)),
        relations=relations,
    )


def text_similarity(a: str, b: str) -> float:
    """Return the Jaccard overlap of the content words of two texts, in [0, 1].

    Case, accents, punctuation, spaces and plural s do not count.

    >>> text_similarity("The red shoes", "red shoe, size 9")
    0.5
    """
    return jaccard(_fold(a).content, _fold(b).content)


def texts_similar(a: str, b: str) -> bool:
    """Say whether two texts mean the same (Table 4, "text similarity high").

    Content words overlap by 0.8, and no number, negation, bound or date differs.

    >>> texts_similar("wireless mouse", "Wireless  Mouse."), texts_similar("a table for 2", "the table for 2")
    (True, True)
    >>> texts_similar("100", "1000"), texts_similar("flights in March", "flights in May")
    (False, False)
    """
    if a == b:
        return True
    x, y = _fold(a), _fold(b)
    if not x.content or not y.content:  # punctuation and small words: only spaces and case are formatting
        return " ".join(a.casefold().split()) == " ".join(b.casefold().split())
    if any(
        x.relations[word] and y.relations[word] and x.relations[word].isdisjoint(y.relations[word])
        for word in x.relations.keys() & y.relations.keys()
    ):
        return False
    if x.letters == y.letters and x.digits == y.digits:  # "wi-fi" and "wifi"
        return x.guarded.keys() & _GUARDED == y.guarded.keys() & _GUARDED
    return x.guarded == y.guarded and jaccard(x.content, y.content) >= SIMILAR_TEXT


# ------------------------------------------------------------------------------------------------------- URLs

UrlMatch = Literal["same", "query differs", "date differs", "other"]

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_OPAQUE = re.compile(r"(?:about|blob|chrome|data|file|javascript|mailto|tel|view-source):", re.IGNORECASE)
_TRACKING = re.compile(
    r"utm_\w+|mtm_\w+|gclid|gclsrc|dclid|fbclid|msclkid|yclid|gbraid|wbraid|srsltid|igshid|mc_[ce]id|_ga|_gl|_hs\w+",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_DATE_KEY = re.compile(
    r"(?:^|[^a-z]|start|end|in|out|arrival|departure|return|pickup|dropoff|from|to)(?:date|day|month|year)s?(?:$|[^a-z])|check[_-]?(?:in|out)$"
)
_NUMERIC_DATE = re.compile(
    r"(?<!\d)(?:(\d{4})[-/.]?(\d{2})[-/.]?(\d{2})|(\d{4})-(\d{1,2})-(\d{1,2})|(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}))(?!\d)"
)
_MONTH_NAME = "|".join(sorted(_MONTH_NUMBER, key=len, reverse=True))
_NAMED_DATE = re.compile(
    rf"(?:(\d{{1,2}})(?:st|nd|rd|th)?[\s,._+-]*)?\b({_MONTH_NAME})\b[\s,._+-]*(\d{{1,2}}(?!\d))?"
)


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in the form in which two spellings of one address are equal."""

    scheme: str  # "web" for http and https
    host: str  # ASCII, without "www."
    port: int | None  # None for 80 and 443
    path: tuple[str, ...]  # decoded segments; a routing fragment (#/..., #!...) counts as path
    query: tuple[tuple[str, str], ...]  # sorted, without tracking parameters
    fragment: str


def _split(url: str) -> tuple[SplitResult, int | None]:
    parts = urlsplit(url if _SCHEME.match(url) else "http://" + url.lstrip("/"))
    return parts, parts.port


def parse_url(url: str) -> Url:
    """Return any text as a Url; a text that is no URL has an empty host and itself as path.

    >>> parse_url("HTTPS://www.Example.com:443/a/?utm_source=x&b=1") == parse_url("example.com/a?b=1")
    True
    """
    url = url.strip()
    if _OPAQUE.match(url):
        return Url(scheme="opaque", host="", port=None, path=(url,), query=(), fragment="")
    try:
        parts, port = _split(url)
        host = unicodedata.normalize("NFKC", unquote(parts.hostname or "")).casefold().rstrip(".")
    except ValueError:  # an impossible port or address
        return Url(scheme="invalid", host="", port=None, path=(url,), query=(), fragment="")
    try:
        host = host.encode("idna").decode()
    except UnicodeError:  # a label that DNS would refuse stays as it is written
        host = host.strip()
    path, fragment = parts.path, parts.fragment
    if fragment.startswith(("/", "!")):
        path, fragment = f"{path}/#{fragment}", ""
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(unquote(segment))
    query = sorted(
        (key, value)
        for key, value in parse_qsl(parts.query, keep_blank_values=True)
        if not _TRACKING.fullmatch(key)
    )
    return Url(
        scheme="web" if parts.scheme in ("http", "https") else parts.scheme,
        host=host.removeprefix("www.") if host.count(".") > 1 else host,
        port=None if port in (80, 443) else port,
        path=tuple(segments),
        query=tuple(query),
        fragment=unquote(fragment),
    )


def dates_in(text: str) -> set[tuple[int, int, int]]:
    """Return the dates of a text as (year, month, day), 0 for a part that is not given.

    ours: 3/4/2026 is read month first, as on the paper's US sites.

    >>> sorted(dates_in("2026-03-04 to 5 Mar")) == [(0, 3, 5), (2026, 3, 4)]
    True
    """
    dates = set()
    for match in _NUMERIC_DATE.finditer(text):
        year, month, day = ([int(part) for part in match.groups() if part is not None] + [0])[:3]
        if match[9] is not None:
            month, day, year = year, month, day
            if month > 12:
                month, day = day, month
        if 1 <= month <= 12 and 1 <= day <= 31 and 1900 <= year <= 2200:
            dates.add((year, month, day))
    for match in _NAMED_DATE.finditer(text.casefold()):
        if match[1] or match[3]:
            dates.add((0, _MONTH_NUMBER[match[2]], int(match[1] or match[3])))
    return dates


def _names_date(key: str, value: str) -> bool:
    """Say whether a query parameter holds a date, or a part of one."""
    part = any(char.isdigit() for char in value) or value.casefold() in _GUARDED
    return bool(dates_in(value)) or (part and bool(_DATE_KEY.search(_CAMEL.sub("_", key).lower())))


def _date_contradicted(target: Url, other: Url) -> bool:
    """Whether a date of the target's query stands as another date in the other query.

    A date left out is no contradiction.
    """
    wanted, found = dict(target.query), dict(other.query)
    for key, value in wanted.items():
        there = found.get(key, "")
        if (
            there not in ("", value)
            and _names_date(key, value)
            and not (dates_in(value) and dates_in(value) == dates_in(there))
        ):
            return True
    dates, others = (set().union(*(dates_in(value) for _, value in url.query)) for url in (target, other))
    return bool(dates - others) and bool(others - dates)


def compare_urls(target: str, other: str) -> UrlMatch:
    """Say how an address relates to the target's (Table 4, go_to_url).

    Args: target, other: any texts. Returns: "same" (scheme http/https, www., default port, trailing slash,
    percent-encoding, IDN, query order and tracking parameters aside), "query differs" (host and path match;
    also another fragment), "date differs" (the query contradicts a date), or "other".

    >>> compare_urls("https://a.com/x?b=1&c=2", "http://www.a.com/x/?c=2&b=1")
    'same'
    >>> compare_urls("a.com/x?b=1", "a.com/x"), compare_urls("a.com", "b.com")
    ('query differs', 'other')
    >>> compare_urls("a.com/hotel?checkin=2026-03-04", "a.com/hotel?checkin=2026-03-05")
    'date differs'
    """
    a, b = parse_url(target), parse_url(other)
    if (a.scheme, a.host, a.port, a.path) != (b.scheme, b.host, b.port, b.path):
        return "other"
    if _date_contradicted(a, b):
        return "date differs"
    return "same" if (a.query, a.fragment) == (b.query, b.fragment) else "query differs"


def host_of(url: str) -> str:
    """Return the host of a URL without `www.` and port; empty for a text without a host.

    >>> host_of("https://www.example.com:8080/a")
    'example.com'
    """
    return parse_url(url).host
