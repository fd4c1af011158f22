"""Where published benches have another library ahead, and other figures that pages have in
sentences; `published_pages` writes them into the pages.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdntune.report.peers import PREFIX, label, rivals, slower
from gdntune.report.published_figures import (
    AGAIN,
    ALONE,
    APART,
    AS_CALLED,
    BESIDE,
    GPUS,
    HEADLINE,
    PEERS,
    RINGS,
    SEVERAL,
    STEPS,
    Bench,
    benches,
    chosen_of_models,
    kind_words,
    markdown,
    plain,
    stem,
    us,
)
from gdntune.report.words import contract_short

if TYPE_CHECKING:
    import pandas as pd

# What a bench timed, in few words.
WHERE = {
    **{name: words or "alone" for name, words in BESIDE.items()},
    **{name: f"a layer's step, {policy}" for name, policy in STEPS.items()},
    **{name: f"a ring, {policy}" for name, policy in RINGS.items()},
}
# What a short list need not say: each contract's usual bench.
_USUAL = {WHERE[name] for name in (ALONE, AS_CALLED, SEVERAL, *list(STEPS)[:1], *list(RINGS)[:1])}
NOWHERE = "No cell is slower by the whole interval and beyond a tie."


class Behind(NamedTuple):
    """Cells of one contract and HV at which a library is faster, by B.

    cells: how many have times of both, in any bench of the same kind.
    """

    gpu: str
    where: str
    peer: str
    contract: str
    HV: int
    rows: list[Any]
    cells: int


def sentences(results: Path) -> dict[str, Callable[[], str]]:
    """What stands in pages besides tables, by its name."""
    found: dict[str, Callable[[], str]] = {
        "behind": lambda: behind_table(list(behind(results))),
        "behind.README": lambda: behind_short(list(behind(results))),
    }
    for name in WHERE:
        for gpu, bench in benches(results, name).items():
            found[f"measured.{stem(name)}.{gpu}"] = lambda bench=bench: measured(bench)  # type: ignore[misc]
    for gpu in GPUS:
        found[f"floor.{gpu}"] = lambda gpu=gpu: over_floor(chosen_of_models(results, gpu))  # type: ignore[misc]
    return found


def behind(results: Path) -> Iterator[Behind]:
    """The cells of all published benches at which a library is faster than ours by the whole
    interval of the ratio and beyond a tie. Of a cell that was timed again, by the later bench.
    """
    found, timed = list[Behind](), dict[tuple[Any, ...], set[int]]()
    for name, where in WHERE.items():
        later = benches(results, AGAIN[name]) if name in AGAIN else {}
        for gpu, bench in benches(results, name).items():
            again = _places(later[gpu]) if gpu in later else set()
            found += _behind(gpu, where, bench, again)
            for _, row in rivals(bench.rows).iterrows():
                key = (gpu, where, label(row["kernel"], bench.records), *_place(row))
                timed.setdefault(key, set()).add(int(row["B"]))
    for one in found:
        key = (one.gpu, one.where, one.peer, one.contract, one.HV)
        yield one._replace(cells=len(timed[key]))


def _places(bench: Bench) -> set[tuple[str, int, int]]:
    """The contracts of a bench in words, each with its HV and B."""
    chosen = bench.rows[bench.rows["chosen"]]
    return {(*_place(row), int(row["B"])) for _, row in chosen.iterrows()}


def _behind(
    gpu: str, where: str, bench: Bench, again: set[tuple[str, int, int]]
) -> Iterator[Behind]:
    for kernel, found in slower(bench.rows, bench.records).items():
        peer = kernel.removeprefix(PREFIX)
        both = [_place(row) for _, row in bench.of(peer).iterrows()]
        groups: dict[tuple[str, int], list[Any]] = {}
        for row in found:
            if (*_place(row), int(row["B"])) not in again:
                groups.setdefault(_place(row), []).append(row)
        for (contract, HV), rows in groups.items():
            of = sorted(rows, key=lambda row: int(row["B"]))
            yield Behind(
                gpu,
                where,
                label(kernel, bench.records),
                contract,
                HV,
                of,
                both.count((contract, HV)),
            )


def _place(row: Any) -> tuple[str, int]:
    """The contract of a row in words, and its HV."""
    if row["ring"] or row["norm"] != "none" or row["conv"] != "none":
        return kind_words(row).replace(f", HV={row['HV']}", ""), int(row["HV"])
    words = [plain(contract_short(row))]
    words += ["states in order"] * (not row["pool"]) + ["V-last"] * (row["layout"] == "v_last")
    return ", ".join(words), int(row["HV"])


def behind_table(found: Sequence[Behind]) -> str:
    """A row a library, contract and HV: ours and theirs by B, and by how much ours takes longer."""
    if not found:
        return NOWHERE
    rows, before = [], ""
    for one in found:
        who = f"{_named(one.peer)}, {one.gpu}, {one.where}"
        ours = [
            us(
                {
                    **row,
                    "median_us": row["median_us"] / row["chosen_speedup"],
                    "power_capped": False,
                }
            )
            for row in one.rows
        ]
        rows.append(
            [
                "" if who == before else who,
                f"{one.contract}, HV={one.HV}",
                *(
                    ", ".join(words)
                    for words in (
                        [str(row["B"]) for row in one.rows],
                        ours,
                        [us(row) for row in one.rows],
                        [_percent(row) for row in one.rows],
                    )
                ),
            ]
        )
        before = who
    headers = ("ours takes longer than", "contract", "B", "ours, us", "theirs, us", "longer by")
    return markdown(headers, rows)


def behind_short(found: Sequence[Behind]) -> str:
    """The same in a line a library and GPU, the headline one first; without our own kernels."""
    lines: dict[str, dict[str, list[Behind]]] = {}
    for one in sorted(found, key=lambda one: one.gpu != HEADLINE):
        if one.peer.split()[0] not in APART:
            words = re.sub(r",? T=\d+", "", one.contract)
            words += "" if one.where in _USUAL else ", " + _policy(one.where)
            who = f"{_named(one.peer)}, {one.gpu}"
            lines.setdefault(who, {}).setdefault(words, []).append(one)
    said = [
        f"- **Behind {who}**: {'; '.join(map(_short, kinds.items()))}."
        for who, kinds in lines.items()
    ]
    return "\n".join(said) or f"- {NOWHERE}"


def _policy(where: str) -> str:
    """Of a layer's step the policy alone: its contract says the rest."""
    return where.removeprefix("a layer's step, ").removesuffix(", KDA again")


def _short(kind: tuple[str, list[Behind]]) -> str:
    words, found = kind
    rows = sorted((r for one in found for r in one.rows), key=lambda r: -float(r["chosen_speedup"]))
    # of a contract and HV that several benches have, once
    cells = sum({(one.contract, one.HV): one.cells for one in found}.values())
    tokens = ", ".join(str(t) for t in sorted({int(r["tokens"]) for r in rows}))
    return f"{words} (T={tokens}): up to {_percent(rows[-1])}, {len(rows)} of {cells} cells"


def _named(peer: str) -> str:
    """A library as pages call it, with its version."""
    name, _, version = peer.partition(" ")
    words = {**PEERS, **APART}.get(name, name)
    return f"{words} {version.partition('.post')[0]}".strip() if name not in APART else words


def _percent(row: Any) -> str:
    """How much longer ours takes, by medians."""
    more = 1 / float(row["chosen_speedup"]) - 1
    return f"{more:.1%}" if more < 0.1 else f"{more:.0%}"


def measured(bench: Bench) -> str:
    """When, beside whom, and how many cells."""
    dates = sorted({run.run.started[:10] for run in bench.runs})
    peers = [
        _named(f"{peer} {bench.version(peer)}") for peer in (*PEERS, *APART) if len(bench.of(peer))
    ]
    chosen = bench.rows[bench.rows["chosen"]]
    left = sum(run.left for run in bench.runs)
    capped = int(chosen["power_capped"].sum())
    cells = f"{len(chosen)} cells" if not left else f"{len(chosen)} of {len(chosen) + left} cells"
    power = f"{capped or 'none'} of them at the GPU's power limit"
    return f"{' and '.join(dates)}, {', '.join(peers)}: {cells}, {power}"


def over_floor(chosen: "pd.DataFrame") -> str:
    """How far many tokens, and one token at B=1, are from the floor."""

    def over(**fields: Any) -> "pd.Series[float]":
        rows = chosen
        for name, value in fields.items():
            rows = rows[rows[name] == value]
        return rows["over_floor"].dropna()

    most = [
        f"{over(op=f'{op}_decode', tokens=8).max():.1f} ({op.upper()})" for op in ("gdn", "kda")
    ]
    one = over(tokens=1, B=1)
    return (
        f"T=8 takes up to {most[0]} and {most[1]} times the floor, and T=1 at B=1"
        f" {one.min():.2f} to {one.max():.2f} times"
    )
