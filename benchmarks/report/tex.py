"""Sections -> LaTeX: every table as a float of a paper, what stands between them as comments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stable_forgetting.benchmarks.report.section import Column, Section, Table

HEAD = "% Needs: \\usepackage{booktabs,threeparttable,adjustbox,amsmath,amssymb}"
LONGEST = 45
"""Rows of one float; what is longer goes on in the next."""
SPECIAL = {
    **{character: f"\\{character}" for character in "#$%&_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\ensuremath{<}",
    ">": "\\ensuremath{>}",
    "|": "\\textbar{}",
    "–": "--",
    "—": "---",
    "…": "\\dots{}",
    "‖": "\\ensuremath{\\Vert}",
    "±": "\\ensuremath{\\pm}",
    "−": "\\ensuremath{-}",
    "×": "\\ensuremath{\\times}",
    "·": "\\ensuremath{\\cdot}",
    "→": "\\ensuremath{\\rightarrow}",
    "↑": "\\ensuremath{\\uparrow}",
    "↓": "\\ensuremath{\\downarrow}",
    "≈": "\\ensuremath{\\approx}",
    "≠": "\\ensuremath{\\neq}",
    "≲": "\\ensuremath{\\lesssim}",
    "≤": "\\ensuremath{\\leq}",
    "≥": "\\ensuremath{\\geq}",
    "∅": "\\ensuremath{\\varnothing}",
    "✗": "\\ensuremath{\\times}",
    "λ": "\\ensuremath{\\lambda}",
    "ω": "\\ensuremath{\\omega}",
    "φ": "\\ensuremath{\\phi}",
}
"""Character -> what LaTeX prints as it; letters with accents are read as they stand."""
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CODE = re.compile(r"`([^`]+)`")
_LABEL = re.compile(r"[^a-z0-9]+")


def write(sections: Sequence[Section]) -> str:
    """The tables of a report, to be read by ``\\input``."""
    blocks, labels = [HEAD], Counter[str]()
    heading = name = ""
    for section in sections:
        heading = section.title or heading
        name = name or heading.split(" ")[0]
        if isinstance(section.content, Table):
            title = heading if heading.startswith(name) else f"{name}: {heading}"
            label = _LABEL.sub("-", title.lower()).strip("-")
            blocks += _floats(section, section.content, title, label, labels)
        else:
            paragraphs = [section.title, *section.text, *(f"- {line}" for line in section.lines)]
            blocks += [f"% {line}" for text in paragraphs for line in text.splitlines()]
    return "\n".join(blocks) + "\n"


def escaped(text: str) -> str:
    """Plain text as LaTeX prints it; what stands in backticks is code, in ** bold."""
    text = _MINUS.sub("−", text.replace("\n", " "))
    text = "".join(SPECIAL.get(character, character) for character in text)
    return _BOLD.sub(r"\\textbf{\1}", _CODE.sub(r"\\texttt{\1}", text))


def _floats(
    section: Section, table: Table, heading: str, label: str, labels: Counter[str]
) -> Iterator[str]:
    """The floats of a table; ``labels`` counts those of each label so far, as none may recur."""
    caption = " ".join(filter(None, [heading and f"{heading}.", *section.text]))
    for start in range(0, len(table.rows), LONGEST):
        part = replace(table, rows=table.rows[start : start + LONGEST])
        labels[label] += 1
        number = f"-{labels[label]}" if labels[label] > 1 else ""
        yield _float(part, f"{caption} (continued)" if start else caption, label + number)
    yield from (f"% {line}" for text in section.lines for line in text.splitlines())


def _float(table: Table, caption: str, label: str) -> str:
    columns = [column for column in table.columns if column.kind != "mark"]
    widths = {"number": "r", "words": "p{.3\\textwidth}"}
    kinds = "".join(widths.get(column.kind, "l") for column in columns)
    rows = [_row(table, row) for row in table.rows]
    heads = " & ".join(escaped(column.head) for column in columns)
    return "\n".join(
        [
            "\\begin{table*}",
            "\\centering\\small",
            f"\\caption{{{escaped(caption)}}}\\label{{tab:{label}}}",
            "\\begin{adjustbox}{max width=\\textwidth,max totalheight=.8\\textheight}",
            "\\begin{threeparttable}",
            f"\\begin{{tabular}}{{{kinds}}}",
            "\\toprule",
            f"{heads} \\\\",
            "\\midrule",
            *rows,
            "\\bottomrule",
            "\\end{tabular}",
            *_notes(table, columns),
            "\\end{threeparttable}",
            "\\end{adjustbox}",
            "\\end{table*}",
        ]
    )


def _row(table: Table, row: Sequence[str]) -> str:
    """The cells; a mark stands as a note at the cell before it."""
    cells: list[str] = []
    for column, cell in zip(table.columns, row, strict=True):
        if column.kind != "mark":
            cells.append(escaped(cell))
        elif cell:
            cells[-1] += f"\\tnote{{{escaped(cell)}}}"
    return f"{' & '.join(cells)} \\\\"


def _notes(table: Table, columns: Sequence[Column]) -> Iterator[str]:
    """What the marks that occur mean, then what the columns show."""
    cells = {cell for row in table.rows for cell in row}
    used = [mark for mark in table.notes if mark in cells]
    docs = [f"`{column.head}` {column.doc}" for column in columns if column.doc]
    if not used and not docs:
        return
    yield "\\begin{tablenotes}\\footnotesize"
    yield from (f"\\item[{escaped(mark)}] {escaped(table.notes[mark])}" for mark in used)
    yield from (f"\\item[] {escaped('; '.join(docs))}." for _ in docs[:1])
    yield "\\end{tablenotes}"
