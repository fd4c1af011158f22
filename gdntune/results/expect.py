"""What times a GPU that is not here may be expected to give, from journals of one that was. A
model, not a measurement.

With w work units on a GPU of N SMs and P GB/s, and N', P' those of the GPU that the journals are
of:

    w'   = w N' / N                                 the same load of each SM
    t, f = time and floor at w' there               linear between the two nearest cells
    r    = (P'/N') / (P/N)                          an SM's share of the DRAM, there over here
    time = t - (1 - r) (f - f0)                     the floor's transfer shrinks by r, nothing else
    does
    most = t                                        where the SMs decide and not the DRAM

f0 is the floor's fixed part: what its smallest cell takes beyond its bytes at the peak. So all that
a kernel takes beyond its floor, and what it takes to start, is as on the other GPU: equal clocks
and equal latencies are supposed. Arithmetic that the transfer hid there may show here: hence
`most`. A larger L2 is not in it.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gdntune import sol
from gdntune.device.arch import Device
from gdntune.results.derive import passes, timed_cells
from gdntune.errors import JournalError, UnsupportedProblem
from gdntune.results.records import Check, Record, Run
from gdntune.problem import Contract, Problem
from gdntune.timing import summary

OURS = "ours"


class Expected(NamedTuple):
    """time_us: by the model; most_us: were the SMs to decide, not the DRAM."""

    time_us: float
    most_us: float


class Line(NamedTuple):
    """Medians in microseconds by work units: who's, of a contract, under an L2 policy."""

    who: str
    contract: Contract
    l2: str
    times: Mapping[int, float]


# What a floor is timed for: L2 policy, state dtype, K, V and how often the state is read and
# written.
_Form = tuple[str, str, int, int, sol.FloorForm]


class Model:
    """Times of some journals of one GPU, carried over to another."""

    def __init__(
        self,
        journals: Iterable[tuple[Run, Sequence[Record]]],
        target: Device,
        *,
        peers: Sequence[str] = ("flashinfer",),
    ):
        """peers: whose times are carried over too, by the names of the journals' entries.

        Raises JournalError for no journals, or of several devices; UnsupportedProblem for one that
        is no GPU or has no DRAM peak.
        """
        journals = list(journals)
        sources = {run.device.name: run.device for run, _ in journals}
        if len(sources) != 1:
            raise JournalError(
                f"journals of {', '.join(sources) or 'no device'}: expected those of one"
                " device; name some"
            )
        self.source, self.target = next(iter(sources.values())), target
        if self.source.kind != "cuda":
            raise UnsupportedProblem(
                f"a journal of {self.source.name}, a CPU: expected one of a GPU (--journal),"
                " whose times are carried over to another"
            )
        if not self.source.peak_gb_s or not target.peak_gb_s:
            lacking = target.name if self.source.peak_gb_s else self.source.name
            raise UnsupportedProblem(
                f"{lacking}: its DRAM's peak is not known, and times are carried over by it"
            )
        self.source_peak, self.target_peak = self.source.peak_gb_s, target.peak_gb_s
        self.journals = tuple(
            f"{r.config} ({r.policy.get('l2', 'cold-clean')}, {r.started[:10]})"
            for r, _ in journals
        )
        found: dict[tuple[str, Contract, str], Line] = {}
        floors: dict[_Form, dict[int, float]] = {}
        for run, records in journals:
            l2 = run.policy.get("l2", "cold-clean")
            for line in (*_ours(records, l2, floors), *_theirs(records, l2, peers)):
                key = (line.who, line.contract, line.l2)
                # Of two journals with the same contract the one with more cells: fewer gaps to draw
                # lines across.
                if key not in found or len(line.times) > len(found[key].times):
                    found[key] = line
        self.lines, self._floors = found, floors

    @property
    def share(self) -> float:
        """r: an SM's share of the DRAM's bandwidth, source over target."""
        return (self.source_peak / self.source.sm_count) / (self.target_peak / self.target.sm_count)

    def line(self, contract: Contract, l2: str, who: str = OURS) -> Line | None:
        """The times of a contract under a policy, else under the policy that has most of its cells;
        parameters' dtypes do not count.
        """
        found = [
            line
            for line in self.lines.values()
            if (line.who, line.contract) == (who, _plain(contract))
        ]
        return max(found, key=lambda line: (line.l2 == l2, len(line.times), line.l2), default=None)

    def expected(self, line: Line, work_units: int) -> Expected | None:
        """What the target may be expected to take; None beyond the journal's cells, or where no
        floor is known.
        """
        at = work_units * self.source.sm_count / self.target.sm_count
        c = line.contract
        floors = self._floors.get((line.l2, c.state_dtype, c.K, c.V, sol.floor_form(c)), {})
        time, floor = self._between(line.times, at), self._between(floors, at)
        if time is None or floor is None:
            return None
        least = min(floors)
        fixed = max(
            0.0, floors[least] - sol.floor_bytes(Problem(c, 1, 1, least)) / (self.source_peak * 1e3)
        )
        return Expected(time - (1 - self.share) * max(0.0, floor - fixed), time)

    def _between(self, times: Mapping[int, float], at: float) -> float | None:
        """Linear between the two nearest cells. Below the first, its time, where not every SM has a
        head and one cell more or less hardly
        counts: the target's smallest problems load an SM less than the source's did.
        """
        units = sorted(times)
        if not units or at > units[-1]:
            return None
        if at < units[0]:
            near = at >= units[0] * self.source.sm_count / self.target.sm_count
            return times[units[0]] if near and units[0] <= self.source.sm_count else None
        after = bisect.bisect_left(units, at)
        high = units[after]
        low = units[max(0, after - 1)]
        if high in (low, at):
            return times[high]
        return times[low] + (times[high] - times[low]) * (at - low) / (high - low)


def expected_times(model: Model, problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """The model's times at cells, as plain values; a cell that no journal's load reaches is left
    out.
    """
    rows = []
    for p in problems:
        line = model.line(p.contract, "cold-clean")
        found = line and model.expected(line, p.work_units)
        if line and found:
            times = {name: round(us, 3) for name, us in found._asdict().items()}
            cell = {"contract": p.contract.key(), "B": p.B, "H": p.H, "HV": p.HV}
            rows.append({**cell, **times, "l2": line.l2})
    return rows


def _plain(c: Contract) -> Contract:
    """A contract without the dtypes of its parameters: some bytes a head, of 32 KiB and more."""
    return c.replace(A_log_dtype="fp32", dt_bias_dtype="fp32")


def _ours(records: Sequence[Record], l2: str, floors: dict[_Form, dict[int, float]]) -> list[Line]:
    """The best variant's times, by contract; the floors' are added to `floors`."""
    times: dict[Contract, dict[int, float]] = {}
    for cell in timed_cells(records):
        c, units = cell.problem.contract, cell.work_units
        mine = times.setdefault(_plain(c), {})
        best = cell.finals[cell.best].stats.median_us
        # Cells of equal work units: the best of them is what a table could choose.
        mine[units] = min(best, mine.get(units, best))
        if cell.floor is not None:
            known = floors.setdefault((l2, c.state_dtype, c.K, c.V, sol.floor_form(c)), {})
            known[units] = min(cell.floor.median_us, known.get(units, cell.floor.median_us))
    return [Line(OURS, c, l2, found) for c, found in times.items()]


def _theirs(records: Sequence[Record], l2: str, peers: Sequence[str]) -> list[Line]:
    """Each peer's best entry's times, of those that passed their check, by contract."""
    wrong = {(r.contract, r.variant) for r in records if isinstance(r, Check) and r.status != "ok"}
    times: dict[tuple[str, Contract], dict[int, float]] = {}
    for problem, trials in passes(records).items():
        for trial in trials:
            who = trial.variant.kernel.removeprefix("peer:").partition(".")[0]
            right = trial.status == "ok" and (problem.contract, trial.variant.id) not in wrong
            if trial.role == "peer" and who in peers and right and trial.samples_us:
                mine = times.setdefault((who, _plain(problem.contract)), {})
                median = summary(trial.samples_us).median_us
                mine[problem.work_units] = min(median, mine.get(problem.work_units, median))
    return [Line(who, c, l2, found) for (who, c), found in times.items()]
