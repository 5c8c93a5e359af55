"""Time and memory against size, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from benchmark.report import MIB, Summary

WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 260, 60, 40, 90
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")


def plot(summaries: Sequence[Summary], sizes: Sequence[float]) -> str:
    """An SVG document: a panel for time and one for memory, a line for each case.

    Parameters
    ----------
    summaries
        Of cases that write something, each at every size.
    sizes
        GiB, in the order in which they were measured; labels of the summaries are ``"1 GiB"``.
    """
    cases = list(dict.fromkeys(one.case for one in summaries))
    panels = (
        ("wall time (s)", lambda one: one.seconds),
        ("peak memory (MiB)", lambda one: one.peak_bytes / MIB),
    )
    parts: list[str] = []
    for number, (title, value) in enumerate(panels):
        x = LEFT + number * (WIDTH + GAP)
        parts += _panel(x, title, summaries, cases, sizes, value)
    for row, case in enumerate(cases):
        y = TOP + HEIGHT + 50 + 18 * row
        parts.append(_line([(LEFT, y), (LEFT + 24, y)], row))
        parts.append(_text(LEFT + 32, y + 4, case))
    width, height = LEFT + 2 * WIDTH + 2 * GAP, TOP + HEIGHT + 60 + 18 * len(cases)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def label(size: float) -> str:
    """A size in GiB as it stands in summaries."""
    return f"{size:g} GiB"


def _panel(
    x: int,
    title: str,
    summaries: Sequence[Summary],
    cases: Sequence[str],
    sizes: Sequence[float],
    value: Callable[[Summary], float],
) -> Iterable[str]:
    most = _round_up(max(value(one) for one in summaries))
    widest = max(sizes)
    yield _text(x, TOP - 15, title)
    yield f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    for part in range(5):
        y = TOP + HEIGHT * (4 - part) // 4
        yield _text(x - 8, y + 4, f"{most * part / 4:g}", "end")
    for size in sizes:
        yield _text(x + WIDTH * size / widest, TOP + HEIGHT + 18, label(size), "middle")
    for color, case in enumerate(cases):
        points = [
            (x + WIDTH * size / widest, TOP + HEIGHT * (1 - value(one) / most))
            for size in sizes
            for one in summaries
            if one.case == case and one.size == label(size)
        ]
        yield _line(points, color)


def _round_up(value: float) -> float:
    """The next number of the form 1, 2, 4 or 8 times a power of ten."""
    unit = 10.0 ** (len(str(int(max(value, 1)))) - 1)
    return next(n * unit for n in (1, 2, 4, 8, 10) if n * unit >= value)


def _line(points: Sequence[tuple[float, float]], color: int) -> str:
    shade = COLORS[color % len(COLORS)]
    dashes = ' stroke-dasharray="5 3"' if color >= len(COLORS) else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{shade}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{shade}"{dashes}/>{dots}'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
