"""Which rows and contracts a part of a report is of, and the letters of its variants."""

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any

from gdntune.problem import Contract
from gdntune.results.records import Cell, Check, Trial
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


class Letters(dict[str, str]):
    """A short name for each variant, A, B, ... Z, AA, ..., in the order in which they are asked
    for; the same in all tables.
    """

    def __missing__(self, name: str) -> str:
        n, letters = len(self) + 1, ""
        while n:
            # Counting without a zero, as a spreadsheet names its columns.
            n, digit = divmod(n - 1, 26)
            letters = chr(ord("A") + digit) + letters
        self[name] = letters
        return letters


def bases(source: LoadedRun) -> list[Contract]:
    """A sweep's contracts without T, a section each: usual sizes and few unusual fields first.

    Those of which a cell was tried, or a check failed: of what only passed its check there is
        nothing to say yet.
    """
    # by problem first: a hundred trials share one
    tried = {r.problem for r in source.records if isinstance(r, (Cell, Trial))}
    found = {problem.contract for problem in tried}
    found |= {r.contract for r in source.records if isinstance(r, Check) and r.status != "ok"}
    plain = Contract()

    def order(c: Contract) -> tuple[Any, ...]:
        unusual = sum(
            getattr(c, name) != getattr(plain, name) for name in Contract.__struct_fields__
        )
        return c.op, (c.K, c.V) != (plain.K, plain.V), c.layout, unusual, c

    return sorted({c.replace(tokens=1) for c in found}, key=order)


def of_run(frame: "pd.DataFrame", source: LoadedRun) -> "pd.DataFrame":
    """The rows of a run."""
    its = frame["run"] == source.name
    # As it stands where it has one run only: a copy of a long journal's takes a while.
    return frame if its.all() else frame[its]


def of_contract(frame: "pd.DataFrame", base: Contract) -> "pd.DataFrame":
    """The rows of a contract at every T."""
    its = (frame[n] == getattr(base, n) for n in Contract.__struct_fields__ if n != "tokens")
    # Taken out once: each time copies all columns.
    return frame[reduce(operator.and_, its)]
