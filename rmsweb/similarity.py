"""Similarity of texts and URLs: when two values mean the same, nearly the same, or something else.

Purpose: the reward (App. H, Table 4) needs "text similarity high" and "host and path match"; the miner
compares states and memories.

Place in the paper: App. H asks that formatting-only changes count as near and that 100 / 1000, neighbouring
indices and near-identical URLs with another date do not.

Deviations, all `ours:` because the paper leaves the measure open:
1. Texts are compared by content words and guarded tokens: an edit ratio of "100" and "1000" is above 0.85.
2. Order counts where it carries meaning. Numbers, dates, comparisons and sort directions are compared in
   order, a number keeps the word that it counts, and the word behind `from`, `to`, `between`, `before`, ...
   may not change. The order of other words is ignored.
3. What follows a digit without a space belongs to the number (1990s, 10²), and so does a unit: 20 is not
   20 %. Mail addresses, URLs and paths are one token each.
4. A URL whose query contradicts a date of the other one is another destination, although host and path match.
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
_COMPARISONS = (
    "under over below above less fewer more least most min max minimum maximum before after until since "
    "lt gt le ge"
)
_DIRECTIONS = (
    "lowest highest cheapest priciest ascending descending asc desc increasing decreasing newest oldest "
    "latest earliest low high first last azorder zaorder"
)
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand "
    "million billion half double second third fourth fifth sixth seventh eighth ninth tenth"
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
_NEGATION = frozenset(_NEGATIONS.split())
_ORDERED = frozenset(f"{_COMPARISONS} {_DIRECTIONS} {_NUMBER_WORDS} {_WEEKDAYS}".split()) | set(_MONTH_NUMBER)
_RELATIONS = frozenset(_BINDING.split())

_ACCENT = re.compile("[\u0300-\u036f]")  # other scripts' combining marks are letters of their own
_SUPERSCRIPT = re.compile("[²³¹⁰⁴-⁹₀-₉]+")  # NFKD would make 102 of 10²
_NOT_CONTRACTED = re.compile(r"n['’]t\b")
_MINUS = re.compile(r"(?<![^\s(\[$€£¥])[-−–](?=[^\W_])")  # a sign or a search engine's "not", unlike a hyphen
_THOUSANDS = re.compile(r"(?<=\d)[,'’](?=\d{3}(?!\d))")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")
_CLOCK = re.compile(r"(?<=\d)\s+(?=[ap]\.?m\b)")  # 3 pm is 3pm
_SIGN = re.compile(r"<=|>=|≤|≥|<|>")
_SIGN_NAMES = {"<=": " le ", "≤": " le ", ">=": " ge ", "≥": " ge ", "<": " lt ", ">": " gt "}
_SORT = re.compile(r"\b(a\s*(?:-|–|to|→|->)\s*z|z\s*(?:-|–|to|→|->)\s*a)\b")
_ADDRESS = re.compile(
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"  # mail
    r"|(?:https?://|www\.)[^\s<>\"')\]]+"
    r"|(?<![^\s(\"'])~?(?:/[\w.%-]+)+/?(?!\w)"  # path
)
_UNITS = "€£¥₹$%°"
_UNIT_BEFORE = re.compile(rf"([{_UNITS}])\s?(\d+(?:[.:]\d+)*)")
_UNIT_BEHIND = re.compile(rf"(?<=\d)\s?([{_UNITS}])")
# A word or number of a folded text; also 3.5, 12:30, c++, and the units of numbers.
_TOKEN = re.compile(rf"[a-z0-9\x80-\U0010ffff{_UNITS}]+(?:[.:][0-9]+)*[{_UNITS}+#]*")
_NUMBER = re.compile(rf"(\d+(?:[.:]\d+)*[{_UNITS}]*)([^\W\d_]*\w*)")  # digits with their unit, letters


def jaccard(a: Iterable[Hashable], b: Iterable[Hashable]) -> float:
    """Return the overlap of two multisets, |a & b| / |a | b|, in [0, 1]; two empty ones overlap fully.

    >>> jaccard("aab", "abb")
    0.5
    """
    x, y = (items if isinstance(items, Counter) else Counter(items) for items in (a, b))
    common = sum(min(count, y.get(item, 0)) for item, count in x.items())
    return common / (x.total() + y.total() - common) if x or y else 1.0


@dataclass(frozen=True, slots=True)
class _Number:
    """A token whose order and neighbours carry meaning: a number, a date, a comparison, a sort direction."""

    value: str  # digits with their unit; a word; a date as date<year>x<month>x<day>
    suffix: str  # letters glued to the digits: "s" of 1990s, "pm" of 3pm
    before: str  # the content word before it
    behind: str  # the content word behind it

    def matches(self, other: "_Number") -> bool:
        """Say whether two tokens are the same number: "16gb" is "16 gb", and "1990s" is not "1990"."""
        if self.value != other.value:
            return False
        if self.suffix == other.suffix:
            return True
        if self.suffix and other.suffix:
            return False
        return (self.suffix or other.suffix) == (other.behind if self.suffix else self.behind)


@dataclass(frozen=True, slots=True)
class _Folded:
    """A text without its formatting."""

    content: tuple[str, ...]  # content words and numbers, singular
    ordered: tuple[_Number, ...]  # numbers, dates, comparisons, directions, in order
    negations: Counter[str]
    letters: str  # all letters and digits on end
    relations: dict[str, set[str]]  # "from" -> the content words behind it


def _plain(text: str) -> str:
    """Return a text without accents and case.

    A sign beyond ASCII that is no letter, digit, unit, comparison or combining mark becomes a space.
    """
    kept = _SUPERSCRIPT.sub(lambda found: "sup" + unicodedata.normalize("NFKD", found[0]), text)
    plain = _ACCENT.sub("", unicodedata.normalize("NFKD", kept)).casefold()
    if plain.isascii():
        return plain
    return "".join(
        char
        if char < "\x80" or char in "€£¥₹°’−–≤≥→" or char.isalnum() or unicodedata.category(char)[0] == "M"
        else " "
        for char in plain
    )


def _singular(word: str) -> str:
    plural = len(word) > 3 and word.endswith("s") and not word.endswith("ss")
    return word[:-1] if plural and not any(char.isdigit() for char in word) else word


def _address_token(found: "re.Match[str]") -> str:
    """Return an address as one word: its letters and digits, with the other signs spelt out."""
    word = "".join(char if char.isalnum() else f"q{ord(char):x}q" for char in found[0].rstrip(".,/"))
    return f" {word} "


def _date_token(found: "re.Match[str]") -> str:
    """Return a date as one word; what looks like a date and is none stays."""
    date = _date_of(found)
    return found[0] if date is None else f" date{date[0]}x{date[1]}x{date[2]} "


def _tokens(text: str) -> list[str]:
    """Return the words and numbers of a text, folded."""
    plain = _ADDRESS.sub(_address_token, _plain(text))
    plain = _SORT.sub(lambda found: " azorder " if found[0][0] == "a" else " zaorder ", plain)
    plain = _SIGN.sub(lambda found: _SIGN_NAMES[found[0]], plain)
    plain = _DATE.sub(_date_token, _THOUSANDS.sub("", plain))
    plain = _MINUS.sub(" not ", _NOT_CONTRACTED.sub(" not", plain))
    plain = _UNIT_BEHIND.sub(r"\1", _UNIT_BEFORE.sub(r"\2\1", plain))  # a unit goes behind its number
    plain = _ORDINAL.sub("", _CLOCK.sub("", plain).replace("'", "").replace("’", ""))
    words = map(_singular, _TOKEN.findall(re.sub("[−–→]", " ", plain)))
    return [word for word in words if word.strip(_UNITS) or len(word) == 1]


def _number(words: list[str], place: int) -> _Number | None:
    """Return the word at a place as a number with its neighbours; None where its order has no meaning."""
    word = words[place]
    before, behind = (
        words[near] if 0 <= near < len(words) and words[near] not in _STOP_WORDS else ""
        for near in (place - 1, place + 1)
    )
    parts = _NUMBER.fullmatch(word)
    if parts:
        return _Number(parts[1], parts[2], before, behind)
    if word in _ORDERED or any(char.isdigit() for char in word):
        return _Number(word, "", before, behind)
    return None


def _fold(text: str) -> _Folded:
    words = _tokens(text)
    relations: dict[str, set[str]] = {}
    for before, word in pairwise(words):
        if before in _RELATIONS and word not in _STOP_WORDS:
            relations.setdefault(before, set()).add(word)
    ordered = (_number(words, place) for place in range(len(words)))
    return _Folded(
        content=tuple(word for word in words if word not in _STOP_WORDS),
        ordered=tuple(found for found in ordered if found is not None),
        negations=Counter(word for word in words if word in _NEGATION),
        letters="".join(words),
        relations=relations,
    )


def text_similarity(a: str, b: str) -> float:
    """Return the Jaccard overlap of the content words of two texts, in [0, 1].

    Case, accents, punctuation, spaces and plural s do not count.

    >>> text_similarity("The red shoes", "red shoe, size 9")
    0.5
    """
    return jaccard(_fold(a).content, _fold(b).content)


def _same_order(x: _Folded, y: _Folded) -> bool:
    """Say whether numbers, comparisons and directions of two texts agree, in order and with what they count.

    "2 rooms 3 guests" and "2 guests 3 rooms" have the same numbers in order, but 2 rooms are not 3 rooms.
    """
    if len(x.ordered) != len(y.ordered) or not all(map(_Number.matches, x.ordered, y.ordered)):
        return False
    for side in ("before", "behind"):
        counts: list[dict[str, set[str]]] = []
        for text in (x, y):
            counted: dict[str, set[str]] = {}
            for number in text.ordered:
                if word := getattr(number, side):
                    counted.setdefault(word, set()).add(number.value)
            counts.append(counted)
        if any(counts[0][word].isdisjoint(counts[1][word]) for word in counts[0].keys() & counts[1].keys()):
            return False
    return True


def texts_similar(a: str, b: str) -> bool:
    """Say whether two texts mean the same (Table 4, "text similarity high").

    Content words overlap by 0.8, and no number, date, comparison, sort direction or negation differs.

    >>> texts_similar("wireless mouse", "Wireless  Mouse."), texts_similar("a table for 2", "the table for 2")
    (True, True)
    >>> texts_similar("100", "1000"), texts_similar("flights in March", "flights in May")
    (False, False)
    >>> texts_similar("2026-03-05", "March 5, 2026"), texts_similar("05/03/2026", "03/05/2026")
    (True, False)
    """
    if a.casefold().split() == b.casefold().split():
        return True
    x, y = _fold(a), _fold(b)
    if not x.content or not y.content:  # punctuation and small words: only spaces and case are formatting
        return False
    if not _same_order(x, y) or x.negations != y.negations:
        return False
    if any(x.relations[word].isdisjoint(y.relations.get(word, x.relations[word])) for word in x.relations):
        return False
    # The letters on end are equal for "wi-fi" and "wifi".
    return x.letters == y.letters or jaccard(x.content, y.content) >= SIMILAR_TEXT


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
_MONTH_NAME = "|".join(sorted(_MONTH_NUMBER, key=len, reverse=True))
# Year first; month (or an unmistakable day) first; day with a month's name; month's name with a day. The last
# two may lack a year.
_DATE = re.compile(
    rf"""
    (?<!\d) (?: (\d{{4}})[-/.]?(\d{{2}})[-/.]?(\d{{2}}) | (\d{{4}})-(\d{{1,2}})-(\d{{1,2}})
               | (\d{{1,2}})[-/.](\d{{1,2}})[-/.](\d{{4}}) ) (?!\d)
    | (?<!\d)(\d{{1,2}})(?:st|nd|rd|th)?(?:\s+of)?[\s,._+-]*\b({_MONTH_NAME})\b(?:[\s,._+-]*(\d{{4}})(?!\d))?
    | \b({_MONTH_NAME})\b[\s,._+-]*(\d{{1,2}})(?:st|nd|rd|th)?(?![\d:])(?:[\s,._+-]+(\d{{4}})(?!\d))?
    """,
    re.VERBOSE,
)
Date = tuple[int, int, int]  # year, month, day; 0 for a part that is not given


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


def _date_of(found: "re.Match[str]") -> Date | None:
    """Return the date of a match of _DATE; None for numbers that are no date.

    ours: 3/4/2026 is read month first, as on the paper's US sites, unless the first number cannot be a month.
    """
    year, month, day = 0, 0, 0
    if found[1] or found[4]:
        year, month, day = (int(part) for part in found.groups()[:6] if part)
    elif found[7]:
        month, day, year = int(found[7]), int(found[8]), int(found[9])
        if month > 12:
            month, day = day, month
    elif found[11]:
        year, month, day = int(found[12] or 0), _MONTH_NUMBER[found[11]], int(found[10])
    else:
        year, month, day = int(found[15] or 0), _MONTH_NUMBER[found[13]], int(found[14])
    valid = 1 <= month <= 12 and 1 <= day <= 31 and (year == 0 or 1900 <= year <= 2200)
    return (year, month, day) if valid else None


def dates_in(text: str) -> set[Date]:
    """Return the dates of a text.

    >>> sorted(dates_in("2026-03-04 to 5 Mar")) == [(0, 3, 5), (2026, 3, 4)]
    True
    """
    return {date for found in _DATE.finditer(text.casefold()) if (date := _date_of(found)) is not None}


def _same_day(a: Date, b: Date) -> bool:
    """Say whether two dates may be one day: a part that one of them does not give is no difference."""
    return all(x == y or 0 in (x, y) for x, y in zip(a, b, strict=True))


def _missing(dates: set[Date], others: set[Date]) -> bool:
    """Say whether a date has no counterpart among the others."""
    return any(not any(_same_day(date, other) for other in others) for date in dates)


def _names_date(key: str, value: str) -> bool:
    """Say whether a query parameter holds a date, or a part of one."""
    part = any(char.isdigit() for char in value) or value.casefold() in _ORDERED
    return bool(dates_in(value)) or (part and bool(_DATE_KEY.search(_CAMEL.sub("_", key).lower())))


def _date_part(value: str) -> str:
    """Return a part of a date in one spelling: "March ", "mar" and "03" are 3."""
    plain = value.strip().casefold()
    return str(_MONTH_NUMBER.get(plain, plain)).lstrip("0")


def _date_contradicted(target: Url, other: Url) -> bool:
    """Say whether a date of the target's query is another date in the other query.

    A date left out is no contradiction, nor is a year.
    """
    wanted, found = dict(target.query), dict(other.query)
    for key, value in wanted.items():
        there = found.get(key, "")
        if not there.strip() or not (_names_date(key, value) or _names_date(key, there)):
            continue
        dates, others = dates_in(value), dates_in(there)
        if dates and others:
            if _missing(dates, others) or _missing(others, dates):
                return True
        elif _date_part(value) != _date_part(there):
            return True
    dates, others = (set().union(*(dates_in(value) for _, value in url.query)) for url in (target, other))
    return bool(others) and _missing(dates, others) and _missing(others, dates)


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
