"""The tables of README and docs/results.md, from published journals:
`python -m gdntune.report.published_figures` in a checkout prints them, and a test compares.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdntune.report.peers import PREFIX, rivals
from gdntune.report.words import geometric_mean
from gdntune.results.frame import frame
from gdntune.results.samples import load

if TYPE_CHECKING:
    import pandas as pd

GPUS = {"H100": "nvidia-h100-80gb-hbm3", "H200": "nvidia-h200"}
MODELS = ("qwen3.5-397b-a17b", "kimi-linear-48b-a3b")
PEERS = {"flashinfer": "FlashInfer", "sglang": "SGLang", "fla": "fla"}
# What a choice may lose in the shipped tables, as tables/README.md says; journals have the sweeps'.
REGRET = 0.005
BATCHES = (1, 16, 64, 256, 512)
TOKENS = (1, 4, 8)
# What the rows of `times` have in common: the shipped configs' usual contract.
_USUAL: dict[str, Any] = {
    "mode": "update",
    "intermediate": "none",
    "layout": "k_last",
    "pool": True,
    "accepted": False,
    "ragged": False,
}


class _Group(NamedTuple):
    """A row of the table of peers: its words, and what its cells' contracts have."""

    words: str
    fields: dict[str, Any]
    tokens: Sequence[int] = (1,)


def _group(words: str, op: str, state: str, tokens: Sequence[int] = (1,), **fields: Any) -> _Group:
    return _Group(words, {"op": op, "state_dtype": state, **_USUAL, **fields}, tokens)


_SEVERAL = tuple(range(2, 9))
_GDN, _KDA = "gdn_decode", "kda_decode"
_DENSE = {"mode": "frozen", "intermediate": "dense"}
GROUPS = (
    _group("GDN T=1, bf16 state", _GDN, "bf16"),
    _group("GDN T=1, fp32 state", _GDN, "fp32"),
    _group("GDN T=1, bf16, states in order", _GDN, "bf16", pool=False),
    _group("GDN T=1, fp32, states in order", _GDN, "fp32", pool=False),
    _group("GDN T=1, fp32, states in order, V-last", _GDN, "fp32", pool=False, layout="v_last"),
    _group("GDN T=2 to 8, bf16, final state", _GDN, "bf16", _SEVERAL),
    _group("GDN T=2 to 8, fp32, final state", _GDN, "fp32", _SEVERAL),
    _group("GDN T=2, 4, 8, fp32, final state, states in order", _GDN, "fp32", _SEVERAL, pool=False),
    _group("GDN T=2 to 8, bf16, intermediate states", _GDN, "bf16", _SEVERAL, **_DENSE),
    _group("GDN T=2 to 8, fp32, intermediate states", _GDN, "fp32", _SEVERAL, **_DENSE),
    _group("GDN T=4 and 8, bf16, outputs alone", _GDN, "bf16", _SEVERAL, mode="frozen"),
    _group("KDA T=1, bf16 state", _KDA, "bf16"),
    _group("KDA T=1, fp32 state", _KDA, "fp32"),
    _group("KDA T=1, bf16, states in order", _KDA, "bf16", pool=False),
    _group("KDA T=1, fp32, states in order", _KDA, "fp32", pool=False),
    _group(
        "KDA T=4, bf16, a slot a token",
        _KDA,
        "bf16",
        _SEVERAL,
        mode=None,
        intermediate="slots",
        accepted=None,
    ),
)

# Words, op, state, HV, and the batches shown.
README_ROWS = (
    ("GDN, bf16 state", _GDN, "bf16", 64, (1, 64, 512)),
    ("GDN, fp32 state", _GDN, "fp32", 64, (64, 512)),
    ("KDA, bf16 state", _KDA, "bf16", 32, (64,)),
)


def tables(results: Path) -> Iterator[str]:
    """Each table in Markdown: the times on each GPU, ours beside other libraries', and README's.

    results: the folder of published journals, docs/results.
    """
    for gpu, folder in GPUS.items():
        paths = [results / folder / f"{model}.jsonl.xz" for model in MODELS]
        yield times(gpu, frame(load(paths, REGRET)))
    peers = {
        gpu: frame(load([results / folder / "bench-peers.jsonl.xz"]))
        for gpu, folder in GPUS.items()
    }
    yield beside_others(peers)
    yield readme(peers["H100"])


def times(gpu: str, found: "pd.DataFrame") -> str:
    """Medians of the tables' choices, with their time over the floor."""
    chosen = _where(found[found["chosen"]], _USUAL)
    cells = {
        (c["op"], c["state_dtype"], c["tokens"], c["B"], c["HV"]): c
        for c in chosen.to_dict("records")
    }
    rows = []
    for op, HV in ((_GDN, 64), (_KDA, 32)):
        for state in ("bf16", "fp32"):
            for t in TOKENS:
                row = [cells.get((op, state, t, B, HV)) for B in BATCHES]
                words = f"{op.removesuffix('_decode').upper()}, {state} state, T={t}"
                rows.append([words, *("" if c is None else _time(c) for c in row)])
    return _markdown([gpu, *(f"B={B}" for B in BATCHES)], rows)


def _time(cell: dict[Any, Any]) -> str:
    return f"{cell['median_us']:.4g} ({cell['over_floor']:.2f})"


def beside_others(found: "dict[str, pd.DataFrame]") -> str:
    """How many times as fast ours is, by medians: geometric mean and worst cell, a column a library
    and GPU.
    """
    best = {gpu: rivals(its) for gpu, its in found.items()}
    headers, columns = [""], []
    for peer, words in PEERS.items():
        for gpu, its in best.items():
            headers.append(f"{words}, {gpu}" if gpu == next(iter(best)) else gpu)
            columns.append(its[its["kernel"] == f"{PREFIX}{peer}"])
    rows = [[g.words, *(_over(_of_group(its, g)) for its in columns)] for g in GROUPS]
    return _markdown(headers, rows)


def readme(found: "pd.DataFrame") -> str:
    """Medians at T=1 beside two libraries, states in a pool; bold: theirs is the smaller one."""
    chosen = _where(found[found["chosen"] & (found["tokens"] == 1)], _USUAL)
    ours = {(c["op"], c["state_dtype"], c["B"], c["HV"]): c for c in chosen.to_dict("records")}
    best = _where(rivals(found), {**_USUAL, "tokens": 1})
    theirs = {
        (c["kernel"].removeprefix(PREFIX), c["op"], c["state_dtype"], c["B"], c["HV"]): c
        for c in best.to_dict("records")
    }
    rows, before = [], ""
    for words, op, state, HV, batches in README_ROWS:
        for B in batches:
            mine = ours[op, state, B, HV]
            shown = [
                _beside(mine, theirs[peer, op, state, B, HV]) for peer in ("flashinfer", "sglang")
            ]
            first = "" if words == before else words
            rows.append([first, str(B), _us(mine), f"{mine['over_floor']:.2f}", *shown])
            before = words
    headers = ("T=1", "B", "gdntune", "over the floor", "FlashInfer 0.7.2", "SGLang 0.5.10")
    return _markdown(headers, rows)


def _us(cell: dict[Any, Any]) -> str:
    us = cell["median_us"]
    return f"{us:.2f}" if us < 10 else f"{us:.1f}"


def _beside(mine: dict[Any, Any], theirs: dict[Any, Any]) -> str:
    faster = theirs["median_us"] < mine["median_us"]
    return f"**{_us(theirs)}**" if faster else _us(theirs)


def _of_group(found: "pd.DataFrame", group: _Group) -> "pd.DataFrame":
    return _where(found[found["tokens"].isin(group.tokens)], group.fields)


def _where(found: "pd.DataFrame", fields: dict[str, Any]) -> "pd.DataFrame":
    """The rows that have these values; None: any."""
    for name, value in fields.items():
        if value is not None:
            found = found[found[name] == value]
    return found


def _over(rows: "pd.DataFrame") -> str:
    """Geometric mean and worst; bold where ours is behind beyond a tie."""
    if not len(rows):
        return ""
    worst = min(rows.to_dict("records"), key=lambda row: row["chosen_speedup"])
    value = worst["chosen_speedup"]
    # Near 1 the third digit says which side of it.
    said = f"{value:.3f}" if 0.985 <= value < 1.01 else f"{value:.2f}"
    shown = f"**{said}**" if worst["behind"] else said
    return f"{geometric_mean(rows['chosen_speedup']):.2f} ({shown})"


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = f"| --- |{' ---: |' * (len(headers) - 1)}"
    return "\n".join([line(headers), rule, *map(line, rows)])


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables(Path(__file__).parents[2] / "docs" / "results")) + "\n")
