"""Line charts as numbers: scales and ticks. The template draws them.

Purpose: a chart comes in the unit square, (0, 0) at the lower left, so that nothing here knows of pixels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

MAX_COLUMNS = 200  # places of a chart where values are shown


class Point(NamedTuple):
    """A point of a line."""

    x: float
    y: float


class Tick(NamedTuple):
    """A label of an axis and its place on it, in [0, 1]."""

    value: float
    at: float


class Band(NamedTuple):
    """A range of values beside the lines, such as the paper's course; both ends in [0, 1] of the axis."""

    name: str
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Column:
    """What is shown for one x when the pointer is there: its place, half widths, and each line's point."""

    x: float
    value: float
    left: float
    right: float
    points: dict[str, tuple[float, float]]  # by line: place and value


@dataclass(frozen=True)
class Chart:
    """Lines by name, the ticks of both axes, bands and columns; all lie in the unit square."""

    lines: dict[str, list[Point]]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bands: list[Band]
    columns: list[Column]


def ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers that span [low, high]; whole ones for counts.

    >>> ticks(0.0, 1.0)
    [0.0, 0.5, 1.0]
    >>> ticks(0.0, 1.0, whole=True)
    [0, 1]
    """
    raw = max((high - low) / count, 1.0 if whole else 0.0)
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def curves(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[Point]]:
    """Return the values of metrics by step, under the names that the chart shows.

    Args: lines: of metrics.jsonl. names: metric -> name in the legend.
    """
    return {
        name: [
            Point(line["step"], line[key])
            for line in lines
            if isinstance(line.get(key), int | float) and isinstance(line.get("step"), int | float)
        ]
        for key, name in names.items()
    }


def columns(lines: Mapping[str, Sequence[Point]], values: Mapping[str, Sequence[Point]]) -> list[Column]:
    """Return at most MAX_COLUMNS places where values are shown, each as wide as reaches to its neighbours.

    Args: lines: in the unit square. values: the same points as they were measured.
    """
    found: dict[float, dict[str, tuple[float, float]]] = {}
    numbers: dict[float, float] = {}
    for name, points in lines.items():
        for place, value in zip(points, values[name], strict=True):
            found.setdefault(place.x, {})[name] = (place.y, value.y)
            numbers[place.x] = value.x
    places = sorted(found)[:: len(found) // MAX_COLUMNS + 1]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
    return [
        Column(x=x, value=numbers[x], left=edges[at], right=edges[at + 1], points=found[x])
        for at, x in enumerate(places)
    ]


def layout(
    series: Mapping[str, Sequence[Point]],
    *,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    counts: bool = False,
    steps: bool = True,
) -> Chart | None:
    """Return the chart of some series; None if none of them has a finite value.

    Args: ranges: (first, last) values by series, drawn as bands. counts: the values are whole numbers. steps:
    the x axis is.
    """
    finite = {
        name: [point for point in points if math.isfinite(point.y) and math.isfinite(point.x)]
        for name, points in series.items()
    }
    values = {name: points for name, points in finite.items() if points}
    drawn = [point for points in values.values() for point in points]
    if not drawn:
        return None
    shown = {name: ends for name, ends in (ranges or {}).items() if name in values}
    heights = [*(point.y for point in drawn), *(end for ends in shown.values() for end in ends)]
    left, right = min(point.x for point in drawn), max(point.x for point in drawn)
    low, high = min(heights), max(heights)
    if high - low <= max(1e-6 * abs(low), 1e-9):  # a level line
        high = low + (1.0 if counts or abs(low) < 1e-9 else abs(low))
    labels = ticks(low, high, whole=counts)
    width, height = max(right - left, 1), labels[-1] - labels[0]

    def up(value: float) -> float:
        return (value - labels[0]) / height

    lines = {
        name: [Point((point.x - left) / width, up(point.y)) for point in points]
        for name, points in values.items()
    }
    across = [value for value in ticks(left, left + width, whole=steps) if left <= value <= left + width]
    return Chart(
        lines=lines,
        x_ticks=[Tick(value, (value - left) / width) for value in across],
        y_ticks=[Tick(value, up(value)) for value in labels],
        bands=[
            Band(name, up(min(ends)), up(max(ends)), f"{ends[0]:g} to {ends[1]:g}")
            for name, ends in shown.items()
        ],
        columns=columns(lines, values),
    )
