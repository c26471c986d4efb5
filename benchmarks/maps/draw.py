"""A map as one self-contained SVG: per method accepted share above, drop of retained below."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from benchmarks.maps.derive import MapLine, Square
from benchmarks.maps.report import MapBoard, titles
from common.measure.gaps import summarise

CELL, LABEL, GAP, HEAD, FOOT = (34, 30), 44, 26, 70, 44
PER_STRIP = 4
WORST_DROP = 20.0
"""Points of the retained metric at which the lower panels' colour saturates."""
GOOD, BAD, UNKNOWN = (35, 110, 70), (170, 40, 30), "#bbbbbb"


def to_svg(board: MapBoard) -> str:
    """Strips of panels; x is log effective lr, y log lambda, both in the grid's own columns."""
    lrs = sorted({square.lr for line in board.lines for square in line.squares})
    tallest = max((len(_lams(line)) for line in board.lines), default=1)
    inner = len(lrs) * CELL[0], tallest * CELL[1]
    wide, tall = LABEL + inner[0] + GAP, inner[1] + GAP + 14
    strips = -(-len(board.lines) // PER_STRIP) or 1
    width = max(wide * min(len(board.lines), PER_STRIP) + GAP, 760)
    height = HEAD + strips * (2 * tall + FOOT) + 24
    body, names = [], titles(board)
    for index, line in enumerate(board.lines):
        strip, column = divmod(index, PER_STRIP)
        x = GAP + column * wide + LABEL
        y = HEAD + strip * (2 * tall + FOOT)
        axis = board.resolved.axis(line.label)
        name = line.label if axis in ("lam", None) else f"{line.label} (y: {axis})"
        name += f": {summarise(line.accepted).mean:.0f} % accepted"
        body.append(_panel(line, lrs, x, y, _accepted, name))
        body.append(_panel(line, lrs, x, y + tall, _dropped, f"{names.retained} drop"))
        body.append(_rates(lrs, x, y + tall + inner[1] + 14))
    title = html.escape(f"{board.resolved.name}: accepted share of (seed, step), {_seeds(board)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{GAP}" y="20" font-size="14" font-weight="bold">{title}</text>'
        f'<text x="{GAP}" y="38" fill="#555">x: effective lr, y: lambda. U: under-forgets '
        f"({names.forgotten} fails); D: damage ({names.retained} or {names.utility} fails, or "
        "diverged). Dashed: added to find an edge.</text>"
        + "".join(body)
        + _scales(GAP, height - 14, names.retained)
        + "</svg>\n"
    )


def _lams(line: MapLine) -> list[float]:
    """From the top of a panel down."""
    return sorted({square.lam for square in line.squares}, reverse=True)


def _seeds(board: MapBoard) -> str:
    return "seeds " + ", ".join(map(str, sorted(board.targets)))


Paint = Callable[[Square], tuple[str, str, str]]
"""Square -> fill, text, colour of the text."""


def _panel(
    line: MapLine, lrs: Sequence[float], x: float, y: float, paint: Paint, title: str
) -> str:
    parts = [f'<text x="{x}" y="{y - 5}" font-weight="bold">{html.escape(title)}</text>']
    lams = _lams(line)
    for row, lam in enumerate(lams):
        middle = y + row * CELL[1] + CELL[1] / 2 + 4
        parts.append(f'<text x="{x - 5}" y="{middle}" text-anchor="end">{lam:g}</text>')
    for square in line.squares:
        left = x + lrs.index(square.lr) * CELL[0]
        parts.append(_square(square, left, y + lams.index(square.lam) * CELL[1], paint))
    return "".join(parts)


def _square(square: Square, x: float, y: float, paint: Paint) -> str:
    fill, text, ink = paint(square)
    dashes = ' stroke-dasharray="3"' if square.extension else ""
    return (
        f'<rect x="{x}" y="{y}" width="{CELL[0] - 1}" height="{CELL[1] - 1}" fill="{fill}" '
        f'stroke="#888" stroke-width=".6"{dashes}/>'
        f'<text x="{x + CELL[0] / 2}" y="{y + CELL[1] / 2 + 4}" text-anchor="middle" '
        f'fill="{ink}">{text}</text>'
    )


def _accepted(square: Square) -> tuple[str, str, str]:
    text = square.letters or f"{square.share:.0f}"
    return _mix(GOOD, square.share / 100), text, "white" if square.share > 60 else "#222"


def _dropped(square: Square) -> tuple[str, str, str]:
    if square.retained_drop is None:
        return UNKNOWN, "∅", "#222"
    depth = min(max(square.retained_drop / WORST_DROP, 0.0), 1.0)
    text = f"{square.retained_drop:.0f}".replace("-0", "0")
    return _mix(BAD, depth), text, "white" if depth > 0.6 else "#222"


def _mix(colour: tuple[int, int, int], amount: float) -> str:
    """White at 0, the colour at 1."""
    return "#" + "".join(f"{round(255 + (c - 255) * amount):02x}" for c in colour)


def _rates(lrs: Sequence[float], x: float, y: float) -> str:
    return "".join(
        f'<text x="{x + (i + 0.5) * CELL[0]}" y="{y}" text-anchor="middle" font-size="9">'
        f"{lr:.0e}</text>".replace("e-0", "e-").replace("e+0", "e")
        for i, lr in enumerate(lrs)
    )


def _scales(x: float, y: float, retained: str) -> str:
    parts = []
    for start, name, colour, end in (
        (x, "accepted %", GOOD, 100.0),
        (x + 330, f"mean {retained} drop, points (saturates)", BAD, WORST_DROP),
    ):
        parts.append(f'<text x="{start}" y="{y}">{name}</text>')
        for i in range(5):
            left = start + len(name) * 6.5 + i * 32
            ink = "white" if i > 2 else "#222"
            parts.append(
                f'<rect x="{left}" y="{y - 11}" width="32" height="14" '
                f'fill="{_mix(colour, i / 4)}"/><text x="{left + 16}" y="{y}" fill="{ink}" '
                f'text-anchor="middle" font-size="9">{end * i / 4:g}</text>'
            )
    return "".join(parts)
