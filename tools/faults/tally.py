"""What came of trials: how often what, and every breach of a promise in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stable_forgetting.benchmarks.report.section import Section, table


@dataclass
class Tally:
    """One kind of fault.

    Attributes:
        what: The fault, in words.
        tried: Trials.
        outcomes: Outcome -> how many trials ended so.
        breaches: What should not have happened, one line each.
    """

    what: str
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)

    def note(self, outcome: str, breach: str = "") -> None:
        """One trial."""
        self.tried += 1
        self.outcomes[outcome] += 1
        if breach:
            self.breaches.append(f"{self.what}: {breach}")


def sections(tallies: Sequence[Tally], title: str, lines: Sequence[str]) -> list[Section]:
    """The table of a campaign, and its breaches."""
    rows = []
    for tally in tallies:
        outcomes = ", ".join(f"{name} {count}" for name, count in tally.outcomes.most_common())
        rows.append([tally.what, str(tally.tried), outcomes, str(len(tally.breaches))])
    breaches = [text for tally in tallies for text in tally.breaches]
    heads = ["fault", "tried", "outcomes", "breaches"]
    content = table(heads, rows, words=True)
    verdict = f"{len(breaches)} breaches." if breaches else "No promise was broken."
    return [
        Section(title, tuple(lines), content, depth=1),
        Section("", (verdict,), None, tuple(breaches)),
    ]
