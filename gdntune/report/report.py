"""The report of runs: Markdown, CSV, HTML, terminal. The same journals give the same bytes."""

import functools
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdntune.errors import JournalError
from gdntune.problem import Contract, Problem
from gdntune.report import against
from gdntune.report.document import Document
from gdntune.report.html import html
from gdntune.report.markdown import markdown
from gdntune.report.panels import Fact, Panel, facts, panel
from gdntune.report.peers import compared, is_theirs
from gdntune.report.rows import Letters, bases, of_contract, of_run
from gdntune.report.sections import document
from gdntune.results.baseline import Baseline, add_baseline
from gdntune.results.frame import frame
from gdntune.results.journal import uncollected
from gdntune.results.published import PREFIX, Published
from gdntune.results.records import Check
from gdntune.results.samples import LoadedRun, load

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console


class Report:
    """What was found. frame: one row a cell and implementation, with COLUMNS. sources: the sweeps
    it came from.

    publications: what stands beside ours. baseline: what times are compared with too, by its name;
        see `baseline.add_baseline`.
    """

    def __init__(
        self,
        sources: Sequence[LoadedRun],
        publications: Sequence[Published] = (),
        baseline: str | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.publications = tuple(publications)
        self.baseline: Baseline | None = None
        if baseline is not None:
            self.frame, self.baseline = add_baseline(
                self.frame, [s.name for s in self.sources], baseline
            )

    @functools.cached_property
    def frame(self) -> "pd.DataFrame":
        """All rows."""
        return frame(self.sources)

    @functools.cached_property
    def _shown(self) -> "pd.DataFrame":
        """The rows that a page has anything of: of a sweep's 140,000 a twentieth."""
        # Those at hand cost nothing, and a baseline's columns are in them.
        return self.frame if "frame" in vars(self) else frame(self.sources, first_looks=False)

    @property
    def document(self) -> Document:
        """The report apart from how it looks."""
        return self._document(Letters())

    def _document(self, letters: Letters) -> Document:
        more = [
            s
            for p in self.publications
            for s in against.sections(self.sources, self._shown, p, self.baseline)
        ]
        options = [w for p in self.publications for w in ("--against", f"{PREFIX}{p.name}")]
        if self.baseline:
            options += ["--baseline", self.baseline.name]
        return document(self.sources, self._shown, letters, more, self.baseline, options)

    def peers(self) -> list[dict[str, Any]]:
        """How our choices compare with each peer, as plain values: one a sweep and peer that was
        asked for.
        """
        return [
            summary for s in self.sources for summary in compared(of_run(self._shown, s), s.records)
        ]

    def values(self) -> dict[str, Any]:
        """What was found, as plain values: the runs, the chosen variant's row of each cell with the
        columns of `csv`, and the peers. A value that there is none of is None.
        """
        runs = [
            {
                "name": s.name,
                "device": s.run.device,
                "policy": s.run.policy,
                "started": s.run.started,
                "cells": s.cells,
                "left": s.left,
                "notes": s.notes,
            }
            for s in self.sources
        ]
        chosen = self._shown[self._shown["chosen"]]
        rows = chosen.astype(object).where(chosen.notna(), None).to_dict("records")
        return {"runs": runs, "chosen": rows, "peers": self.peers()}

    def markdown(self) -> str:
        """The report for GitHub; tables are at most 100 columns wide."""
        return markdown(self.document)

    def csv(self) -> str:
        """The frame; `pandas.read_csv` gives its dtypes back, and there is no index column."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    @uncollected()
    def html(self) -> str:
        """The report as one file, with pictures and samples. Raises ToolMissing where matplotlib is
        not installed.
        """
        letters = Letters()
        # First, since it fills in the letters.
        text = self._document(letters)
        panels: dict[tuple[str, str], Panel] = {}
        numbers: list[Fact] = []
        for source in self.sources:
            mine = of_run(self._shown, source)
            of_base: dict[Contract, list[Problem]] = {}
            for p in source.counted:
                of_base.setdefault(p.contract.replace(tokens=1), []).append(p)
            for base in bases(source):
                its = [(p, t) for p in of_base.get(base, ()) for t in source.counted[p]]
                part, title = of_contract(mine, base), f"{source.name}: {base.key()}"
                panels[source.name, base.key()] = panel(
                    title, part, its, source.table, letters, source.default, self.baseline
                )
            for other in self.publications:
                panels[against.subject(source, other)] = against.panel(source, self._shown, other)
            checks = Counter[str](
                r.status for r in source.records if isinstance(r, Check) and not is_theirs(r)
            )
            name = source.name if len(self.sources) > 1 else ""
            numbers += facts(name, mine, source.cells, checks, compared(mine, source.records))
        return html(text, numbers, panels)

    def terminal(self, console: "Console", *, details: bool = False) -> None:
        """Prints the report, cells coloured by their share of the DRAM's peak."""
        from gdntune.report.terminal import print_document

        print_document(self.document, console, details=details)


@uncollected()
def report(
    folders: Sequence[str | os.PathLike[str]],
    publications: Sequence[Published] = (),
    baseline: str | None = None,
    regret: float | None = None,
) -> Report:
    """The report of sweeps' folders (or journals), in the order given, beside publications'
    figures, over a baseline.

    regret: the choices are those of `judge.replay` with it, instead of the folder's table or the
        sweep's own regret.
    Raises JournalError for one that cannot be read, UnknownName for a baseline that is not in them.
    """
    if not folders:
        raise JournalError(
            "no sweep was named: give one or more folders that `gdntune sweep` wrote"
        )
    return Report(load(folders, regret), publications, baseline)
