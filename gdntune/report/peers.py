"""What a report says of peers: how much faster our choice is than each, where least, which have no
times and why.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gdntune.errors import counted
from gdntune.problem import Contract
from gdntune.report.document import Block, Bullets, Grid, Text
from gdntune.report.words import cell_words, geometric_mean, ratio
from gdntune.results.bootstrap import (
    CONFIDENCE,
    LEAST_SAMPLES,
    RatioInterval,
    geometric_mean_of_ratios,
    ratio_of_means,
    verdict,
)
from gdntune.results.derive import passes
from gdntune.results.records import Cell, Check, Record, Trial
from gdntune.timing import tie

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "peer:"
# What became of a peer where it has no time; else the status of the entry that was called.
NOT_INSTALLED, NOT_SERVED = "not installed", "not served"
READING = (
    "Peers are other libraries' functions, called on the same tensors within the same measurement."
    " Each was first compared with the reference at the cell's own sizes, by the relative norm of a"
    " few requests' outputs and states: 0.01 is accepted of 16-bit values, 0.002 of fp32, more"
    " where an entry says so. A call of several kernels counts from the first one's start to the"
    " last one's end. Where a peer has several functions for a cell, its fastest counts. One that"
    " does more than the contract is compared with ours and the same behind it. Speed-ups"
    " are of medians; `behind` are the cells where our mean is the larger one by more than a tie,"
    " the larger of 1% and 32 ns."
)


def is_theirs(record: Record) -> bool:
    """Whether a record is a peer's timing, or its check."""
    if isinstance(record, Trial):
        return record.variant.kernel.startswith(PREFIX)
    return isinstance(record, Check) and record.variant.startswith(PREFIX)


def fate(trial: Trial) -> str:
    """Why a peer has no time: it is not installed, does not serve the problem, or an entry failed,
    crashed or hung (timeout).
    """
    if trial.variant.id != trial.variant.kernel:
        return trial.status
    # No entry of it was called: the bench says of the whole peer why.
    return NOT_INSTALLED if trial.reason.startswith(NOT_INSTALLED) else NOT_SERVED


def _trials(records: list[Record]) -> list[Trial]:
    """The peers' trials that count, so none of a cell that was done again since."""
    # A long journal is looked through often: a call a record would take as long as the rest.
    theirs = [r for r in records if type(r) is Cell or (type(r) is Trial and r.role == "peer")]
    return [r for trials in passes(theirs, failed=True).values() for r in trials]


def _reason(trial: Trial) -> str:
    """The reason without what `fate` says."""
    return " ".join(trial.reason.removeprefix(f"{NOT_INSTALLED}: ").split()) or trial.status


def _untimed(kernel: str, trials: list[Trial]) -> Counter[str]:
    """The cells at which a peer has no time, by its fate."""
    mine = [r for r in trials if r.variant.kernel == kernel]
    timed = {r.problem for r in mine if r.status == "ok"}
    return Counter({r.problem: fate(r) for r in mine if r.problem not in timed}.values())


def rivals(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The fastest timed entry of each peer at each cell, beside a choice of ours, or its partner
    where the entry does more than the contract; `behind`: ours is slower, by means beyond a tie.
    """
    timed = frame[
        (frame["role"] == "peer") & (frame["status"] == "ok") & frame["chosen_speedup"].notna()
    ]
    place = ["run", *Contract.__struct_fields__, "B", "H", "HV"]
    # Sorted by the variant too, so that of equal entries the same one counts on every machine.
    best = timed.sort_values([*place, "kernel", "chosen_speedup", "variant"]).drop_duplicates(
        [*place, "kernel"]
    )
    asked = (frame["status"] == "ok") & frame["variant"].isin(set(best["beside"]))
    ours = frame.loc[asked, [*place, "mean_us", "variant"]].rename(
        columns={"mean_us": "chosen_us", "variant": "ours"}
    )
    best = best.merge(ours, left_on=[*place, "beside"], right_on=[*place, "ours"], how="left")
    pairs = zip(best["chosen_us"], best["mean_us"], strict=True)
    return best.assign(behind=[mine > theirs and not tie(mine, theirs) for mine, theirs in pairs])


def names(frame: "pd.DataFrame") -> list[str]:
    """The peers in a frame, by their kernels' names."""
    return sorted(set(frame["kernel"]))


def label(kernel: str, records: list[Record]) -> str:
    """A peer's name with the version that was timed."""
    for r in records:
        if isinstance(r, Trial) and r.variant.kernel == kernel and r.status == "ok":
            return f"{kernel.removeprefix(PREFIX)} {r.variant.knobs.get('version', '')}".strip()
    return kernel.removeprefix(PREFIX)


def compared(frame: "pd.DataFrame", records: list[Record]) -> Iterator[dict[str, Any]]:
    """For each peer that was asked for: over how many cells, the geometric mean, the worst cell,
    and reasons for the others.

    mean_ratio: theirs over ours by means, geometric mean, low, high. FASTER, TIE, SLOWER, UNCLEAR:
    cells by the interval of that ratio, which is beyond a tie, within it, or across its edge.
    slower: cells where our median is the larger one; behind: where our mean is, beyond a tie.
    untimed: cells without a time of it, by `fate`. without_times: reasons, by how often an entry,
    or the whole peer, had them.
    """
    best = rivals(frame)
    trials = _trials(records)
    samples = _final_samples(records) if len(best) else {}
    for kernel in sorted({r.variant.kernel for r in trials}):
        mine = best[best["kernel"] == kernel]
        slowest = mine.loc[mine["chosen_speedup"].idxmin()] if len(mine) else None
        reasons = Counter(
            f"{r.variant.id.removeprefix(PREFIX)}: {fate(r)}: {_reason(r)}"
            for r in trials
            if r.variant.kernel == kernel and r.status != "ok"
        )
        measured = _measured(mine, samples)
        verdicts = Counter(verdict(ours, interval) for ours, interval in measured.intervals)
        gm = geometric_mean_of_ratios(measured.pairs) if measured.pairs else None
        yield {
            "peer": label(kernel, records),
            "cells": len(mine),
            "geometric_mean": geometric_mean(mine["chosen_speedup"]) if len(mine) else None,
            "worst": None if slowest is None else float(slowest["chosen_speedup"]),
            "worst_cell": None if slowest is None else cell_words(slowest),
            "slower": int((mine["chosen_speedup"] < 1).sum()),
            "behind": int(mine["behind"].sum()),
            # By intervals of means, from our side: theirs SLOWER is ours FASTER.
            "mean_ratio": None if gm is None else [round(x, 4) for x in gm],
            "FASTER": verdicts["SLOWER"],
            "TIE": verdicts["TIE"],
            "SLOWER": verdicts["FASTER"],
            "UNCLEAR": verdicts["UNCLEAR"],
            "untimed": dict(_untimed(kernel, trials)),
            "without_times": dict(reasons),
        }


class _Measured(NamedTuple):
    """Our samples and a peer's at the cells that have enough of both; intervals: with our mean."""

    pairs: list[tuple[list[float], list[float]]]
    intervals: list[tuple[float, RatioInterval]]


def _final_samples(records: list[Record]) -> dict[tuple[Any, ...], list[float]]:
    return {
        (*msgspec.structs.astuple(p.contract), p.B, p.H, p.HV, t.variant.id): t.samples_us
        for p, trials in passes(records).items()
        for t in trials
        if t.stage == "final" and t.status == "ok"
    }


def _measured(mine: "pd.DataFrame", samples: dict[tuple[Any, ...], list[float]]) -> _Measured:
    found = _Measured([], [])
    place = [*Contract.__struct_fields__, "B", "H", "HV"]
    columns = mine[[*place, "ours", "variant"]].itertuples(index=False, name=None)
    for *where, ours, theirs in columns:
        a, b = (samples.get((*where, name), []) for name in (ours, theirs))
        if min(len(a), len(b)) >= LEAST_SAMPLES:
            found.pairs.append((a, b))
            interval = ratio_of_means(a, b, ".".join(map(str, (*where, theirs))))
            found.intervals.append((statistics.fmean(a), interval))
    return found


def slower(frame: "pd.DataFrame", records: list[Record]) -> dict[str, list[Any]]:
    """The rows of `rivals` at which a peer is faster than ours by the whole interval of the ratio
    and beyond a tie, by the peer's kernel.
    """
    best, samples = rivals(frame), _final_samples(records)
    found: dict[str, list[Any]] = {}
    # Elsewhere the ratio itself, which the interval is around, is not beyond a tie.
    for _, row in best[best["behind"]].iterrows():
        measured = _measured(row.to_frame().T, samples)
        if any(verdict(ours, interval) == "FASTER" for ours, interval in measured.intervals):
            found.setdefault(row["kernel"], []).append(row)
    return found


def lines(frame: "pd.DataFrame", records: list[Record]) -> Iterator[str]:
    """One line a peer for the summary: the geometric mean, the worst cell, and why it has no time
    at the others.
    """
    for found in compared(frame, records):
        said = []
        if found["cells"]:
            said.append(
                f"{found['geometric_mean']:.3f} times as fast in the geometric mean of"
                f" {counted(found['cells'], 'cell')}, {found['worst']:.3f} at worst"
                f" ({found['worst_cell']});"
                f" slower at {found['slower']}, at {found['behind']} beyond a tie"
            )
            if found["mean_ratio"]:
                ratio_, low, high = found["mean_ratio"]
                said.append(
                    f"by means {ratio_:.3f} ({low:.3f} to {high:.3f}, {CONFIDENCE:.0%} bootstrap"
                    f" interval): ours is FASTER at {found['FASTER']}, TIE at {found['TIE']},"
                    f" SLOWER at {found['SLOWER']}, UNCLEAR at {found['UNCLEAR']}"
                )
        if untimed := found["untimed"]:
            said.append(
                "it "
                + ", ".join(
                    _FATES[name].format(counted(n, "cell")) for name, n in sorted(untimed.items())
                )
            )
        yield f"Against {found['peer']}: {'; '.join(said) or 'no cell has a time of both'}."


_FATES = {
    NOT_INSTALLED: "is not installed ({})",
    NOT_SERVED: "does not serve {}",
    "failed": "failed at {}",
    "crashed": "crashed at {}",
    "timeout": "timed out at {}",
}


def blocks(frame: "pd.DataFrame", records: list[Record]) -> Iterator[Block]:
    """The peers' own section: by kind of contract, those without times, and how each was called."""
    best = rivals(frame)
    if len(best):
        yield Grid("Our choice against each peer", _HEADERS, tuple(_groups(best)), left=2)
    lost = [r for r in _trials(records) if r.status != "ok"]
    if lost:
        yield from _lost(lost)
    forms = {
        r.variant.id: (
            f"`{r.variant.id.removeprefix(PREFIX)}` {r.variant.knobs.get('version', '')}:"
            f" {r.variant.knobs['form']}.{_launched(r)}"
        )
        for r in records
        if isinstance(r, Trial)
        and r.role in ("peer", "partner")
        and r.status == "ok"
        and "form" in r.variant.knobs
    }
    if forms:
        yield Text("How they were called:")
        yield Bullets(tuple(forms[name] for name in sorted(forms)))


def _launched(trial: Trial) -> str:
    """The kernels that one call launches, where the timer could tell."""
    if not isinstance(trial.kernels, tuple):
        return ""
    names = ", ".join(f"`{name[:_NAME_CHARACTERS]}`" for name in trial.kernels)
    return f" {len(trial.kernels)} kernels a call: {names}."


_NAME_CHARACTERS = 60
_HEADERS = ("peer", "contract", "cells", "geomean", "worst", "at T, B x HV", "behind")


def kind(row: Any) -> str:
    """The contract of a row in few letters, with T as 1 or more."""
    unusual = ((row["mode"], "update"), (row["intermediate"], "none"), (row["layout"], "k_last"))
    tokens = "T=1" if row["tokens"] == 1 else "T>1"
    op = row["op"].removesuffix("_decode")
    words = [op, row["state_dtype"], tokens, *(value for value, usual in unusual if value != usual)]
    return " ".join([*words, *([] if row["pool"] else ["in order"])])


def _groups(best: "pd.DataFrame") -> Iterator[tuple[str, ...]]:
    for kernel in names(best):
        groups: dict[str, list[Any]] = {}
        for _, row in best[best["kernel"] == kernel].iterrows():
            groups.setdefault(kind(row), []).append(row)
        for words, rows in groups.items():
            worst = min(rows, key=lambda row: row["chosen_speedup"])
            yield (
                kernel.removeprefix(PREFIX),
                words,
                str(len(rows)),
                ratio(geometric_mean(row["chosen_speedup"] for row in rows)),
                ratio(worst["chosen_speedup"]),
                f"T={worst['tokens']}, {worst['B']} x {worst['HV']}",
                str(sum(row["behind"] for row in rows)),
            )


def _lost(lost: list[Trial]) -> Iterator[Block]:
    """A row for each peer and reason; reasons that differ in numbers alone are one, with the
    first's numbers.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    example: dict[tuple[str, str, str], str] = {}
    for r in lost:
        reason = _reason(r)
        key = (
            r.variant.id.removeprefix(PREFIX),
            fate(r),
            re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", reason)[:200],
        )
        counts[key] += 1
        # The first one's numbers stay readable; a mask alone says nothing.
        example.setdefault(key, reason)
    ordered = sorted(counts, key=lambda key: (key[0], -counts[key], key))
    rows = tuple((key[0], key[1], example[key], str(counts[key])) for key in ordered)
    yield Grid(
        "Peers without a time", ("peer", "why", "reason, of the first", "cells"), rows, left=3
    )
    yield Bullets(tuple(f"`{key[0]}`, {key[1]}: {example[key][:400]}" for key in ordered))
