"""Parts of the report page: tables, line charts as SVG, and the trajectory viewer.

Every text that comes from a page or a model is escaped.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from rmsweb.browser.actions import canonical_action
from rmsweb.records import Image, Judgement, Observation, Step, Trajectory, is_success

Point = tuple[float, float]
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 230, 52, 12, 12, 30
MAX_BOXES = 120


def text(value: object) -> str:
    """Any value as escaped text; floats are rounded, None is a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return escape(f"{value:.3g}" if isinstance(value, float) else str(value), quote=True)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in [0, 1] as a percentage.

    >>> percent(0.5), percent(None)
    ('50.0', '–')
    """
    return "–" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> str:
    """A table; the first cell of a row is its heading, numbers stand right."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{note}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def bars(values: Mapping[str, float], *, unit: str = "") -> str:
    """Horizontal bars, one a name."""
    largest = max(values.values(), default=0) or 1
    rows = "".join(
        f'<div class="bar"><span>{text(name)}</span><i style="width:{100 * max(0.0, value) / largest:.1f}%"></i><b>{text(value)}{text(unit)}</b></div>'
        for name, value in values.items()
    )
    return f'<div class="bars">{rows}</div>'


# ----------------------------------------------------------------------------------------------------- charts


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span [low, high].

    >>> _ticks(0.0, 1.0)
    [0.0, 0.5, 1.0]
    """
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def chart(title: str, series: Mapping[str, Sequence[Point]], *, note: str = "") -> str:
    """A line chart; series without points are left out, and so is a chart without series."""
    lines = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low, high = min(ys), max(ys)
    ticks = _ticks(low, max(high, low + max(1e-6 * abs(low), 1e-9)))
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1), ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    parts = []
    for tick in ticks:
        _, y = at(x0, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in (x0, (x0 + x1) / 2, x1):
        x, _ = at(tick, y0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{tick:g}</text>')
    for (_, points), colour in zip(lines.items(), COLOURS * 3, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        shape = (
            f'<circle cx="{path.split(",")[0]}" cy="{path.split(",")[1]}" r="3" fill="{colour}"/>'
            if len(points) == 1
            else ""
        )
        parts.append(shape or f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{text(name)}</span>'
        for name, colour in zip(lines, COLOURS * 3, strict=False)
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">{"".join(parts)}</svg>'
    foot = f"<small>{text(note)}</small>" if note else ""
    return f'<figure><figcaption>{text(title)}</figcaption>{svg}<div class="legend">{legend}</div>{foot}</figure>'


# ----------------------------------------------------------------------------------------------------- viewer


def link(folder: Path, image: Image, out: Path) -> str:
    """Relative address of a picture of a run folder, as seen from the report's folder."""
    return escape(Path(os.path.relpath(folder / image.path, out)).as_posix(), quote=True)


def screenshot(observation: Observation, folder: Path, out: Path, used: Iterable[object] = ()) -> str:
    """The picture of a state with the boxes of its indexed elements; those that the answer names are marked."""
    if observation.screenshot is None:
        return '<div class="shot none">no picture</div>'
    width, height = observation.viewport
    named = set(used)
    boxes: list[str] = []
    for node in observation.nodes:
        if node.index is None or node.box is None or not node.in_viewport or len(boxes) >= MAX_BOXES:
            continue
        x, y, w, h = node.box
        place = f"left:{100 * x / width:.2f}%;top:{100 * y / height:.2f}%;width:{100 * w / width:.2f}%;height:{100 * h / height:.2f}%"
        boxes.append(
            f'<i class="box{" used" if node.index in named else ""}" style="{place}"><b>{node.index}</b></i>'
        )
    return f'<div class="shot"><img loading="lazy" alt="" src="{link(folder, observation.screenshot, out)}">{"".join(boxes)}</div>'


def _step(step: Step, folder: Path, out: Path) -> str:
    output = step.output
    used = [action.params.get("index") for action in output.actions] if output else []
    lines = [f'<div class="url">{text(step.observation.url)}</div>']
    if output is None:
        reason = step.parse_failure.reason if step.parse_failure else "no answer"
        lines.append(
            f'<p class="error">not usable: {text(reason)}</p><pre>{text(step.response_text[:500])}</pre>'
        )
    else:
        lines += [
            f"<p><em>{name}</em> {text(value)}</p>"
            for name, value in (("thinking", output.thinking), ("goal", output.next_goal))
            if value
        ]
        lines += [f"<pre>{text(canonical_action(action))}</pre>" for action in output.actions]
    for result in step.results:
        lines += [f'<p class="error">{text(result.error)}</p>'] if result.error else []
        lines += (
            [f'<p class="result">{text(result.message[:300])}</p>']
            if result.message and not result.error
            else []
        )
    return f'<div class="step">{screenshot(step.observation, folder, out, used)}<div><h4>Step {step.number}</h4>{"".join(lines)}</div></div>'


def trajectory(
    found: Trajectory, judgement: Judgement | None, folder: Path, out: Path, *, opened: bool = False
) -> str:
    """One run, folded: the task and the verdict, then each step with its picture, answer and results."""
    verdict = judgement.verdict if judgement else "missing"
    good = is_success(found, judgement)
    mark = f'<span class="mark {"good" if good else "bad"}">{"success" if good else "failure"}</span>'
    judge = (
        f"{judgement.judge}{f' ({judgement.model})' if judgement.model else ''}: {verdict}. {judgement.reason}"
        if judgement
        else "not judged"
    )
    facts = f"{found.source.policy}, run {found.source.run}, round {found.source.round}; ended: {found.ended}; judged by {judge}"
    answer = f"<p><em>answer</em> {text(found.final_text)}</p>" if found.final_text is not None else ""
    guide = f"<p><em>guide given</em></p><pre>{text(found.guide_in)}</pre>" if found.guide_in else ""
    steps = "".join(_step(step, folder, out) for step in found.steps)
    return (
        f"<details{' open' if opened else ''}><summary>{mark} {text(found.task.text)} <small>{len(found.steps)} steps</small></summary>"
        f'<p class="facts">{text(facts)}</p>{answer}{guide}{steps}</details>'
    )


STYLE = """
:root{--bg:#f7f7f5;--card:#fff;--ink:#1c1f24;--soft:#667085;--line:#e4e7ec;--accent:#2563eb;--good:#067647;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1d2026;--ink:#e8eaed;--soft:#98a2b3;--line:#333842;--accent:#84adff;--good:#47cd89;--bad:#f97066}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 80px}h1{font-size:28px;margin:0 0 4px}h2{margin:44px 0 12px;font-size:20px}h4{margin:0 0 4px}
p{margin:6px 0}small,.facts,caption{color:var(--soft);font-size:13px}caption{text-align:left;padding:0 0 6px}
.note{background:var(--card);border-left:4px solid #d97706;padding:10px 14px;border-radius:4px}
.scroll{overflow-x:auto;margin:10px 0}table{border-collapse:collapse;background:var(--card);min-width:50%}
th,td{padding:7px 14px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}.wide td{white-space:normal;text-align:left;vertical-align:top}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}figcaption{font-weight:600}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--line)}
.legend span{margin-right:14px;font-size:13px;white-space:nowrap}.legend i{display:inline-block;width:14px;height:3px;margin-right:5px;vertical-align:middle}
.bars{background:var(--card);padding:10px 14px;border:1px solid var(--line);border-radius:8px;max-width:640px}
.bar{display:grid;grid-template-columns:200px 1fr 70px;gap:8px;align-items:center;font-size:13px}
.bar i{background:var(--accent);height:9px;border-radius:3px;min-width:1px}
.bar b{text-align:right;font-weight:500}
details{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0;padding:8px 14px}summary{cursor:pointer}
.mark{display:inline-block;border-radius:10px;padding:0 9px;font-size:12px;border:1px solid;margin-right:6px}
.good{color:var(--good)}.bad,.error{color:var(--bad)}
.step{display:grid;grid-template-columns:minmax(240px,420px) 1fr;gap:18px;border-top:1px solid var(--line);padding:14px 0;margin-top:10px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:14px}.shot{position:relative;align-self:start;border:1px solid var(--line);line-height:0;overflow:hidden}
.shot img{width:100%}.shot.none{line-height:1.5;padding:20px;color:var(--soft)}
.box{position:absolute;border:1px solid #2563eb}.box b{position:absolute;left:-1px;top:-1px;background:#2563eb;color:#fff;font:9px/11px system-ui;padding:0 2px}
.box.used{border:2px solid #dc2626}.box.used b{background:#dc2626}
.url{font:12px ui-monospace,monospace;color:var(--soft);overflow-wrap:anywhere}.result{color:var(--soft);font-size:13px}
pre{background:var(--bg);padding:6px 9px;border-radius:4px;font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0}
em{color:var(--soft);font-style:normal;font-size:12px;text-transform:uppercase;letter-spacing:.04em;margin-right:6px}
@media(max-width:760px){.step,.pair{grid-template-columns:1fr}}
"""


def page(title: str, body: str) -> str:
    """The whole page; it holds no script and loads nothing but the pictures of the run folders."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def pretty(value: object) -> str:
    """A JSON value as an indented, escaped block."""
    return f"<pre>{text(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"
