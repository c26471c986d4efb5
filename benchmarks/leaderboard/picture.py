"""Leaderboard -> one self-contained HTML page, and the picture in it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from benchmarks.audits import report as audit_table
from benchmarks.leaderboard.board import Leaderboard
from benchmarks.leaderboard.report import (
    attack_line,
    comparison_lines,
    divergence_lines,
    floor_line,
    legend,
)
from benchmarks.leaderboard.sweep import tuning_lines, tuning_table, tuning_text
from benchmarks.leaderboard.tables import (
    BOUND_COLUMNS,
    bound_rows,
    further_table,
    gap_table,
    main_columns,
    main_rows,
)


def to_svg(board: Leaderboard) -> str:
    """AG of every row, one dot per seed, the floor as a band: to look at."""
    rows = [row for row in board.rows if row.ag_per_seed and row.label != "retrain"]
    top = max((max(row.ag_per_seed.values()) for row in rows), default=1.0) or 1.0
    left, width, pitch, head = 190, 520, 22, 46
    height = head + pitch * len(rows) + 40

    def x(value: float) -> float:
        return left + width * math.sqrt(value / top)

    floors = [v for v in board.floor.per_seed if v is not None]
    band = ""
    if floors:
        start, end = x(min(floors)), x(max(floors))
        band = (
            f'<rect x="{start:.1f}" y="{head - 8}" width="{max(end - start, 2):.1f}" '
            f'height="{pitch * len(rows) + 8}" fill="#d9ead3"/>'
        )
    body = []
    for index, row in enumerate(rows):
        y = head + pitch * index + 8
        colour = "#666" if row.method in ("retrain", "original") else "#1f4e9c"
        body.append(
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{html.escape(row.label)}</text>'
        )
        body.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#eee"/>')
        body += [
            f'<circle cx="{x(v):.1f}" cy="{y}" r="3.5" fill="{colour}" fill-opacity="0.55"/>'
            for v in row.ag_per_seed.values()
        ]
        mean = math.fsum(row.ag_per_seed.values()) / len(row.ag_per_seed)
        body.append(
            f'<line x1="{x(mean):.1f}" x2="{x(mean):.1f}" y1="{y - 7}" y2="{y + 7}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
    ticks = []
    for tick in _ticks(top):
        ticks.append(
            f'<text x="{x(tick):.1f}" y="{height - 14}" text-anchor="middle" '
            f'fill="#666">{tick:g}</text>'
        )
    title = html.escape(
        f"{board.suite.name}: {board.rule.title} to Retrain (points; square-root axis)"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 30}" '
        f'height="{height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="10" y="20" font-size="14" font-weight="bold">{title}</text>'
        f'<text x="10" y="36" fill="#666">dots: seeds; bar: mean; green: a second Retrain '
        f"(noise floor)</text>" + band + "".join(body) + "".join(ticks) + "</svg>\n"
    )


def _ticks(top: float) -> list[float]:
    candidates = (0, 0.5, 1, 2, 5, 10, 20, 40, 60, 80, 100)
    return [float(tick) for tick in candidates if tick <= top]


def to_html(board: Leaderboard) -> str:
    """A self-contained page: picture and tables."""

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def bullets(lines: Sequence[str]) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"

    style = (
        "body{font:14px sans-serif;margin:2em;max-width:1200px}table{border-collapse:collapse}"
        "td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}"
    )
    read = [*comparison_lines(board), *(f"diverged: {x}" for x in divergence_lines(board))]
    sections = [
        f"<h1>{html.escape(board.suite.name)} (measured)</h1>",
        f"<p>{html.escape(board.suite.spec.title)}</p>",
        to_svg(board),
        f"<p>{html.escape(legend(board))}</p>",
        table(main_columns(board), main_rows(board)),
        f"<p>{html.escape(floor_line(board) + ' ' + attack_line(board))}</p>",
        bullets(read),
        "<h2>Signed gaps to Retrain, with 95 % t-intervals</h2>",
        table(*gap_table(board)),
        "<h2>Did the bound act, and what did it cost?</h2>",
        table(BOUND_COLUMNS, bound_rows(board)),
        "<h2>Further measurements</h2>",
        table(*further_table(board)),
    ]
    for audit in board.audits:
        heads, rows, lines = audit_table.table_rows(audit)
        about = html.escape(f"{audit.name}: {audit_table.summary(audit)}")
        sections += [f"<h2>Audit {about}</h2>", table(heads, rows), bullets(lines)]
    if board.trials:
        text = html.escape(tuning_text(board).replace("*", ""))
        sections += ["<h2>Tuning</h2>", f"<p>{text}</p>", bullets(tuning_lines(board))]
        sections.append(table(*tuning_table(board)))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(board.suite.name)}</title>"
        f"<style>{style}</style>" + "".join(sections) + "\n"
    )
