"""Line charts as numbers: scales and ticks. The template draws them.

Purpose: a chart comes in the unit square, (0, 0) at the lower left, so that nothing here knows of pixels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A point of a line."""

    x: float
    y: float


class Tick(NamedTuple):
    """A label of an axis and its place on it, in [0, 1]."""

    value: float
    at: float


@dataclass(frozen=True)
class Chart:
    """Lines by name and the ticks of both axes; the points lie in the unit square."""

    lines: dict[str, list[Point]]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers that span [low, high].

    >>> ticks(0.0, 1.0)
    [0.0, 0.5, 1.0]
    """
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def curves(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> dict[str, list[Point]]:
    """Return the values of metrics by step, under the names that the chart shows.

    Args: lines: of metrics.jsonl. names: metric -> name in the legend.
    """
    return {
        name: [Point(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]
        for key, name in names.items()
    }


def layout(series: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Return the chart of some series; None if none of them has a finite value."""
    lines = {name: [point for point in points if math.isfinite(point.y)] for name, points in series.items()}
    drawn = [point for points in lines.values() for point in points]
    if not drawn:
        return None
    left, right = min(point.x for point in drawn), max(point.x for point in drawn)
    low, high = min(point.y for point in drawn), max(point.y for point in drawn)
    labels = ticks(low, max(high, low + max(1e-6 * abs(low), 1e-9)))
    width, height = max(right - left, 1), labels[-1] - labels[0]

    def place(point: Point) -> Point:
        return Point((point.x - left) / width, (point.y - labels[0]) / height)

    return Chart(
        lines={name: [place(point) for point in points] for name, points in lines.items() if points},
        x_ticks=[Tick(left + width * at, at) for at in (0.0, 0.5, 1.0)],
        y_ticks=[Tick(value, (value - labels[0]) / height) for value in labels],
    )
