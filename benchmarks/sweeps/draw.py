"""The picture of a sweep: per method accepted share above, drop of the retained metric below."""

from __future__ import annotations

from collections.abc import Callable

from stable_forgetting.benchmarks.report import svg
from stable_forgetting.benchmarks.report.section import Picture
from stable_forgetting.benchmarks.sweeps.board import Sweep
from stable_forgetting.benchmarks.sweeps.derive import Square, SweepLine
from stable_forgetting.common.measure.gaps import summarise

CELL, LABEL, GAP, HEAD, FOOT = (30, 28), 44, 22, 70, 44
PAGE, LETTER = 830, 6.8
"""Width of a page of documents, and of a bold letter, in pixels."""
WORST_DROP = 20.0
"""Points of the retained metric at which the lower panels' colour saturates."""
GOOD, BAD, UNKNOWN, DARK = (35, 110, 70), (170, 40, 30), "#bbbbbb", "#222"
FILE = "leaderboard.svg"
"""The picture's name in a folder, as that of any suite."""
Paint = Callable[[Square], tuple[str, str, str]]
"""Square -> fill, text, colour of the text."""


def picture(board: Sweep) -> Picture:
    """Strips of panels; x is log effective lr, y log lambda, each in a row's own columns."""
    most = max((len(_rates(line)) for line in board.lines), default=1)
    tallest = max((len(_lams(line)) for line in board.lines), default=1)
    inner = most * CELL[0], tallest * CELL[1]
    names = [_name(board, line) for line in board.lines]
    broad = max((inner[0], *(len(name) * LETTER for name in names)))
    wide, tall = LABEL + broad + GAP, inner[1] + GAP + 14
    beside = max(1, int((PAGE - GAP) // wide))
    strips = -(-len(board.lines) // beside) or 1
    width = round(max(wide * min(len(board.lines), beside) + GAP, PAGE))
    height = HEAD + strips * (2 * tall + FOOT) + 24
    body, titles = [], board.titles
    for index, line in enumerate(board.lines):
        strip, column = divmod(index, beside)
        x = GAP + column * wide + LABEL
        y = HEAD + strip * (2 * tall + FOOT)
        body.append(_panel(line, x, y, _accepted, names[index]))
        body.append(_panel(line, x, y + tall, _dropped, f"{titles.retained} drop"))
        body.append(_axis(line, x, y + tall + inner[1] + 14))
    body.append(_scale(GAP, height - 14, "accepted %", GOOD, 100.0))
    drop = f"mean {titles.retained} drop, points (saturates)"
    body.append(_scale(GAP + 330, height - 14, drop, BAD, WORST_DROP))
    seeds = ", ".join(map(str, sorted(board.targets)))
    title = f"{board.suite.name}: accepted share of (seed, step), seeds {seeds}"
    subtitle = (
        f"x: effective lr, y: lambda. U: {titles.forgotten} too high; D: {titles.retained} or "
        f"{titles.utility} too low, or diverged. Dashed: added to find an edge."
    )
    drawn = svg.picture(width, height, body, title=title, subtitle=subtitle, left=GAP, font_size=11)
    return Picture(drawn, "sweep", FILE)


def _name(board: Sweep, line: SweepLine) -> str:
    """A panel's head: the method, its own second axis if any, and its accepted share."""
    axis = board.axis(line.label)
    name = line.label if axis in ("forget_weight", None) else f"{line.label} (y: {axis})"
    return f"{name}: {summarise(line.accepted).mean:.0f} %"


def _lams(line: SweepLine) -> list[float]:
    """From the top of a panel down."""
    return sorted({square.lam for square in line.squares}, reverse=True)


def _rates(line: SweepLine) -> list[float]:
    """From the left of a panel on."""
    return sorted({square.lr for square in line.squares})


def _panel(line: SweepLine, x: float, y: float, paint: Paint, title: str) -> str:
    parts = [svg.text(x, y - 5, title, font_weight="bold")]
    lrs, lams = _rates(line), _lams(line)
    for row, lam in enumerate(lams):
        middle = y + row * CELL[1] + CELL[1] / 2 + 4
        parts.append(svg.text(x - 5, middle, f"{lam:g}", text_anchor="end"))
    for square in line.squares:
        left = x + lrs.index(square.lr) * CELL[0]
        parts.append(_square(square, left, y + lams.index(square.lam) * CELL[1], paint))
    return "".join(parts)


def _square(square: Square, x: float, y: float, paint: Paint) -> str:
    fill, text, ink = paint(square)
    told = f"lr {square.lr:g}, λ {square.lam:g}: {square.share:.0f} % accepted"
    frame = svg.element(
        "rect",
        svg.tip(told),
        class_="cell",
        x=x,
        y=y,
        width=CELL[0] - 1,
        height=CELL[1] - 1,
        fill=fill,
        stroke="#888",
        stroke_width=0.6,
        stroke_dasharray="3" if square.extension else None,
    )
    middle = x + CELL[0] / 2, y + CELL[1] / 2 + 4
    return frame + svg.text(*middle, text, text_anchor="middle", fill=ink, pointer_events="none")


def _accepted(square: Square) -> tuple[str, str, str]:
    text = square.letters or f"{square.share:.0f}"
    return _mix(GOOD, square.share / 100), text, "white" if square.share > 60 else DARK


def _dropped(square: Square) -> tuple[str, str, str]:
    if square.retained_drop is None:
        return UNKNOWN, "∅", DARK
    depth = min(max(square.retained_drop / WORST_DROP, 0.0), 1.0)
    text = f"{square.retained_drop:.0f}".replace("-0", "0")
    return _mix(BAD, depth), text, "white" if depth > 0.6 else DARK


def _mix(colour: tuple[int, int, int], amount: float) -> str:
    """White at 0, the colour at 1."""
    return "#" + "".join(f"{round(255 + (c - 255) * amount):02x}" for c in colour)


def _axis(line: SweepLine, x: float, y: float) -> str:
    """The rates under the columns that a panel has."""
    return "".join(
        svg.text(x + (index + 0.5) * CELL[0], y, _power(lr), text_anchor="middle", font_size=9)
        for index, lr in enumerate(_rates(line))
    )


def _power(rate: float) -> str:
    """``3e-3``, ``1.5e-3``: up to three digits, as many as it has."""
    number, _, exponent = f"{rate:.2e}".partition("e")
    return f"{number.rstrip('0').rstrip('.')}e{int(exponent)}"


def _scale(x: float, y: float, name: str, colour: tuple[int, int, int], end: float) -> str:
    """A name and five shades, from white to the colour."""
    parts = [svg.text(x, y, name)]
    for i in range(5):
        left = x + len(name) * 6.5 + i * 32
        shade = {"fill": _mix(colour, i / 4)}
        parts.append(svg.element("rect", x=left, y=y - 11, width=32, height=14, **shade))
        ink = "white" if i > 2 else DARK
        style = {"text_anchor": "middle", "font_size": 9, "fill": ink}
        parts.append(svg.text(left + 16, y, f"{end * i / 4:g}", **style))
    return "".join(parts)
