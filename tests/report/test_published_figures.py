"""gdntune/report/published_figures.py: README and docs/results.md say what the journals say."""

import lzma
from pathlib import Path

import msgspec
import pytest
import synthetic

from gdntune.kernels.spec import Variant
from gdntune.report import published_figures
from gdntune.report.peers import slower
from gdntune.report.published_figures import tables
from gdntune.results.frame import frame
from gdntune.results.records import Cell, Trial
from gdntune.results.samples import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    """The tables, made anew from the published journals."""
    return list(tables(ROOT / "docs" / "results"))


def rows(text):
    """A table's rows by their cells: how a page lays them out does not matter."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()
    ]


def test_figures_of_the_documents(made):
    """Every table is in its document, cell by cell: `python -m gdntune.report.published_figures`
    prints what has to stand there.
    """
    *full, short = made
    for name, parts in (("docs/results.md", full), ("README.md", [short])):
        page = rows((ROOT / name).read_text())
        for part in parts:
            header, _, *body = rows(part)
            assert header in page, f"{name} has no table with {header}"
            start = page.index(header) + 2
            assert page[start : start + len(body)] == body
            assert len(page[start + len(body)]) == 1, f"{name}: more rows than were made"


def bench(version, **slow):
    """A bench's journal: at each cell a library's time over ours by its name, and its version."""
    header = synthetic.run(software={"table for gdn_decode": "t.json"})
    found = []
    for r in synthetic.records(header, batches=(1,)):
        if isinstance(r, Cell):
            r = msgspec.structs.replace(r, choice=synthetic.VARIANTS[0].id)
            mine = next(
                t for t in reversed(found)
                if isinstance(t, Trial) and t.variant.id == r.choice and t.stage == "final"
            )  # fmt: skip
            for peer, factor in slow.items():
                variant = Variant(f"peer:{peer}", f"peer:{peer}.decode", {"version": version})
                samples = [factor * us for us in mine.samples_us]
                found.append(
                    msgspec.structs.replace(mine, variant=variant, role="peer", samples_us=samples)
                )
        found.append(r)
    return header, found


def published(tmp_path, version, **slow):
    """The same as a published file, loaded."""
    folder = synthetic.write(tmp_path / version, *bench(version, **slow), with_table=False)
    runs = load([folder])
    return published_figures._Bench(runs, frame(runs))


def test_libraries_have_their_versions(tmp_path):
    """Columns name the version where the GPUs' differ, and a library without times has none."""
    one = published(tmp_path, "0.7.2.post1", flashinfer=1.5)
    other = published(tmp_path, "0.7.4", flashinfer=1.2, vllm=0.9)
    lines = published_figures.beside_others({"H100": one, "H200": other}, "alone").splitlines()
    assert lines[0] == "| alone | FlashInfer 0.7.2, H100 | 0.7.4, H200 | vLLM, H200 |"
    assert lines[2] == "| GDN T=1, bf16 state | 1.50 (1.50) | 1.20 (1.20) | 0.90 (**0.90**) |"
    same = published_figures.beside_others({"H100": one, "H200": one}).splitlines()
    assert same[0] == "|  | FlashInfer, H100 | H200 |"


def test_where_others_are_faster(tmp_path):
    """The cells at which the whole interval is on a library's side and beyond a tie, for the
    limits.
    """
    found = published(tmp_path, "0.33.0", vllm=0.9, sglang=1.1, fla=0.995)
    rows = slower(found.rows, found.runs[0].records)
    assert set(rows) == {"peer:vllm"} and len(rows["peer:vllm"]) == 6


def test_a_bench_in_two_journals(tmp_path):
    """The cells that a published journal lacked stand in one of their own, timed later and perhaps
    on another card: the figures are of both.
    """
    for name, slow in (("bench-peers", 1.5), ("bench-peers.rest", 0.9), ("bench-peers.other", 9.0)):
        folder = synthetic.write(tmp_path / name, *bench("1", vllm=slow), with_table=False)
        data = (folder / "journal.jsonl").read_bytes()
        (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(data))
    paths = published_figures._journals(tmp_path, "bench-peers.jsonl.xz")
    assert [path.name for path in paths] == ["bench-peers.jsonl.xz", "bench-peers.rest.jsonl.xz"]
    found = published_figures._Bench(load(paths), frame(load(paths)))
    line = published_figures.beside_others({"H200": found}).splitlines()[2]
    assert line == "| GDN T=1, bf16 state | 1.16 (**0.90**) |"
    assert published_figures._journals(tmp_path / "none", "bench-peers.jsonl.xz") == []


def test_steps_and_rings_by_batch(tmp_path):
    """Of each contract ours and every library, a column a batch; what is faster than ours beyond a
    tie is bold.
    """
    plain = published(tmp_path, "1", flashinfer=0.9, apart=1.5)
    rings = plain._replace(rows=plain.rows.assign(ring=16, ring_dtype="bf16"))
    lines = published_figures.by_batch(rings, "H200, alone").splitlines()
    assert lines[0] == "| H200, alone |  | B=1 |"
    first, ours = lines[2].split(" | ")[:2]
    assert first == "| GDN T=1, bf16 state, u in bf16" and ours == "gdntune"
    mine, theirs, apart = (line.split(" | ")[2].strip("* |") for line in lines[2:5])
    assert lines[3].startswith("|  | FlashInfer | **") and "ours, apart" in lines[4]
    assert float(theirs) < float(mine) < float(apart)
    steps = plain._replace(rows=plain.rows.assign(conv="silu", conv_window="shifted"))
    assert "| GDN step, windows shifted, T=1, bf16 state, HV=64 | gdntune |" in (
        published_figures.by_batch(steps, "")
    )
