"""What reading a source found: rows kept, and rows and parts of rows left out, by reason and row number."""

from dataclasses import dataclass, field
from pathlib import Path

from rlhf.data.examples import DELETED, JUDGED_BAD, UNJUDGED
from rlhf.data.messages import Unusable

FIRST_FEW = 5  # row numbers kept for each reason
# Left out without counting as bad data: such a row has nothing to learn from, or nothing that is not read elsewhere.
BLANK, DUPLICATE, TIED = "blank text", "duplicate prompt", "all answers tied"
HARMLESS = BLANK, DUPLICATE, TIED, UNJUDGED, DELETED, JUDGED_BAD
# Of rows of another kind, which are no bad ones of the kind that is wanted.
PLAIN, DOCUMENT = "plain text where a row with columns is needed", "a text file is one document"


@dataclass
class Dropped:
    """How many rows one reason cost (or one remark is about), and the numbers of the first few."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    detail: str = ""
    """What the first of them adds to the reason."""

    def add(self, row: int) -> None:
        """Count one more."""
        self.count += 1
        if self.count <= FIRST_FEW:
            self.rows.append(row)

    @property
    def where(self) -> str:
        """Their rows: (rows 1, 2, …)."""
        more = ", …" if self.count > len(self.rows) else ""
        return f"(row{'s' if self.count > 1 else ''} {', '.join(map(str, self.rows))}{more})"


@dataclass
class Report:
    """What reading a source found; `rows` = `kept` + all dropped."""

    kind: str
    format: str = ""
    rows: int = 0
    kept: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    dropped_ties: int = 0
    """Equal pairs in rankings that were dropped because all their answers are tied."""
    parts: dict[str, Dropped] = field(default_factory=dict)
    """What was left out of rows that were kept, such as one of many rankings in a tree of answers."""
    warnings: list[str] = field(default_factory=list)
    judged: str = ""
    """The one of the warnings that says that demonstrations may be answers of rankings, bad ones too."""
    files: list[Path] = field(default_factory=list)
    """Files read so far, in order; while rows are read the last one is theirs. A hub id or a function has none."""

    @property
    def bad(self) -> int:
        """Dropped rows that count against `max_dropped`."""
        return sum(drop.count for reason, drop in self.dropped.items() if reason not in HARMLESS)

    def first_bad(self) -> tuple[int, str]:
        """The first unusable row and what is wrong with it; a harmless one only if there is no other."""
        passed = HARMLESS if self.bad else ()
        drops = {reason: drop for reason, drop in self.dropped.items() if reason not in passed}
        reason, drop = min(drops.items(), key=lambda item: item[1].rows[0])
        return drop.rows[0], reason + drop.detail

    def summary(self) -> str:
        """One line: kept n of m, with reasons and first row numbers."""
        parts = [f"kept {self.kept} of {self.rows} rows"]
        for reason, drop in self.dropped.items():
            parts.append(f"{drop.count} × {reason} {drop.where}")
        return "; ".join(parts)

    def drop(self, number: int, unusable: Unusable) -> None:
        """Count one row out."""
        self._count(self.dropped, number, unusable)

    def drop_part(self, number: int, unusable: Unusable) -> None:
        """Count out one example of a row that may be kept for others."""
        self._count(self.parts, number, unusable)

    def _count(self, where: dict[str, Dropped], number: int, unusable: Unusable) -> None:
        where.setdefault(unusable.reason, Dropped(detail=unusable.detail)).add(number)
        self.dropped_ties += unusable.ties
