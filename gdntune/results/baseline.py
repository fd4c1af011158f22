"""What every time of a report is compared with, by a name: the default rule, a run, a peer or one
of its entries, a variant.
"""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdntune.errors import UnknownName, listed
from gdntune.problem import Contract

if TYPE_CHECKING:
    import pandas as pd

PEER = "peer:"
CELL = [*Contract.__struct_fields__, "B", "H", "HV"]
# A variant's id is long; the message lists the nearest.
_NEAR = 3


class Baseline(NamedTuple):
    """A baseline as asked for. label: as tables say it. shown: whether a report has its tables
    anyway.
    """

    name: str
    label: str
    shown: bool


def add_baseline(
    frame: "pd.DataFrame", runs: Sequence[str], name: str
) -> tuple["pd.DataFrame", Baseline]:
    """The frame with the columns `baseline`, `baseline_us` and `speedup_over_baseline`, and what
    the baseline is.

    Cells are compared where contract, B, H and HV agree: within a run, but for a run as baseline,
    whose choices count. Speed-ups are of medians, of the last stage that each reached; those over
    the default rule of means, as in `speedup_over_default`. Raises UnknownName for what is not in
    the frame.
    """
    found = _found(frame, runs, name)
    made = frame.copy()
    made["baseline"] = found.label
    if name == "default":
        made["baseline_us"] = frame["default_mean_us"]
        made["speedup_over_baseline"] = frame["speedup_over_default"]
        return made, found
    key, theirs = ["run", *CELL], frame[(frame["status"] == "ok") & frame["median_us"].notna()]
    if name in runs:
        # Across runs: another run has its own cells, so the run is no part of the key.
        key, theirs = CELL, theirs[(theirs["run"] == name) & theirs["chosen"]]
    elif f"{PEER}{name}" in set(frame["kernel"]):
        theirs = theirs[theirs["kernel"] == f"{PEER}{name}"]
    else:
        theirs = theirs[theirs["variant"].isin([name, f"{PEER}{name}"])]
    # The best of a peer's entries, as someone who uses that library would call.
    best = theirs.groupby(key, sort=False)["median_us"].min()
    cells = list(frame[key].itertuples(index=False, name=None))
    times = best.to_dict()
    made["baseline_us"] = [float(times.get(cell, float("nan"))) for cell in cells]
    # A floor computes nothing, and a partner does more than the contract asks.
    comparable = ~frame["role"].isin(["floor", "partner"]) & (frame["status"] == "ok")
    made["speedup_over_baseline"] = (
        (made["baseline_us"] / frame["median_us"]).where(comparable).round(4)
    )
    return made, found


def _found(frame: "pd.DataFrame", runs: Sequence[str], name: str) -> Baseline:
    """What a name names, in the order of this module's first line."""
    peers = [k.removeprefix(PEER) for k in sorted(set(frame["kernel"])) if k.startswith(PEER)]
    variants = sorted({v.removeprefix(PEER) for v in frame["variant"]} - set(peers))
    if name == "default":
        return Baseline(name, "the default rule", True)
    if name in runs:
        return Baseline(name, f"the choices of {name}", False)
    if name in peers:
        return Baseline(name, name, True)
    if name in variants:
        return Baseline(name, name, False)
    near = difflib.get_close_matches(name, [*runs, *peers, *variants], _NEAR, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    others = (
        f"{len(variants)} variants and entries of peers by their ids" if variants else "no variants"
    )
    raise UnknownName(
        f"baseline {name!r}: nothing here is called so; expected default, the runs"
        f" {listed(runs)}, {f'the peers {listed(peers)}' if peers else 'no peers'}, {others}{hint}"
    )
