"""gdntune/report/published_*.py: README and docs say what the journals say."""

import lzma
from pathlib import Path

import msgspec
import synthetic

from gdntune.kernels.spec import Variant
from gdntune.report import published_behind, published_figures, published_pages
from gdntune.report.peers import slower
from gdntune.results.records import Cell, Trial

ROOT = Path(__file__).parents[2]


def test_pages_say_what_journals_say():
    """Every made part of README and docs is as the published journals have it, and all are shown:
    `python -m gdntune.report.published_pages` says the same.
    """
    found = published_pages.stale(ROOT, published_pages.parts(ROOT / "docs" / "results"))
    assert [str(one) for one in found] == []


def pages(root, text):
    """A checkout whose pages but the first say nothing."""
    (root / "docs").mkdir(parents=True)
    for page in published_pages.PAGES:
        (root / page).write_text("")
    (root / published_pages.PAGES[0]).write_text(text)
    return root


PAGE = """Ours is <!--made:by-->3%<!--end--> faster; <!--made:gone-->x<!--end-->.

<!--made:table-->

| a |
| 1 |
| 9 |

<!--end-->
"""
MADE = {"by": lambda: "4%", "table": lambda: "| a |\n| 2 |", "new": lambda: "7"}


def test_what_is_no_longer_borne_is_said(tmp_path):
    """A figure in a sentence, a table's rows, a mark of nothing, and a part that no page shows."""
    found = [str(one) for one in published_pages.stale(pages(tmp_path, PAGE), MADE)]
    assert found == [
        "README.md: by: the journals say otherwise\n  - 3%\n  + 4%",
        "README.md: gone: no such part; remove its mark, or publish its journal",
        "README.md: table: the journals say otherwise\n  - | 1 |\n  + | 2 |\n  - | 9 |",
        "no page has <!--made:new-->: put it, and <!--end-->, in docs/results.md",
    ]


def test_a_mark_within_a_sentence_begins_no_line(tmp_path):
    """Fault: Markdown takes such a line for HTML, and shows its links as they are written."""
    text = "Ours is\n<!--made:by-->4%<!--end--> faster, [see](x.md).\n"
    (found,) = published_pages.stale(pages(tmp_path, text), {"by": lambda: "4%"})
    assert str(found).startswith("README.md: by: its mark begins a line")
    (tmp_path / "README.md").write_text(text.replace(" is\n", " is "))
    assert list(published_pages.stale(tmp_path, {"by": lambda: "4%"})) == []


def test_contents_of_a_page():
    """Headings of the second level as links; code has none, and what is no letter has no place in
    an anchor.
    """
    text = (
        "# A\n<!--made:contents--><!--end-->\n## H200's `x_y`, 2026-11-29\n```\n## no\n```\n### b\n"
    )
    made = "- [H200's `x_y`, 2026-11-29](#h200s-x_y-2026-11-29)"
    assert published_pages.contents(text) == made
    assert f"<!--made:contents-->{made}<!--end-->" in published_pages.rewritten(text, {})


def test_pages_are_written_anew(tmp_path, monkeypatch, capsys):
    """--write puts the journals' figures in place and nothing else; what is left is said, with 1."""
    root = pages(tmp_path, PAGE)
    monkeypatch.setattr(published_pages, "parts", lambda results: MADE)
    assert published_pages.main(["--write"], root) == 1
    wanted = PAGE.replace("3%", "4%").replace("| 1 |\n| 9 |", "| 2 |")
    assert (root / "README.md").read_text() == wanted
    printed = capsys.readouterr().out
    assert printed.startswith("README.md: written\n") and "by:" not in printed
    (root / "README.md").write_text(
        wanted.replace("<!--made:gone-->x<!--end-->", "<!--made:new-->7<!--end-->")
    )
    assert published_pages.main([], root) == 0
    assert published_pages.main(["--wirte"], root) == 2


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
    return published_figures.Bench((folder,))


def with_rows(plain, **columns):
    """A bench whose cells are of other contracts."""

    class Other(published_figures.Bench):
        rows = plain.rows.assign(**columns)

    return Other(plain.paths)


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
    rows = slower(found.rows, found.records)
    assert set(rows) == {"peer:vllm"} and len(rows["peer:vllm"]) == 6


def test_a_bench_in_two_journals(tmp_path):
    """The cells that a published journal lacked stand in one of their own, timed later and perhaps
    on another card: the figures are of both.
    """
    for name, slow in (("bench-peers", 1.5), ("bench-peers.rest", 0.9), ("bench-peers.other", 9.0)):
        folder = synthetic.write(tmp_path / name, *bench("1", vllm=slow), with_table=False)
        data = (folder / "journal.jsonl").read_bytes()
        (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(data))
    paths = published_figures.journals(tmp_path, "bench-peers.jsonl.xz")
    assert [path.name for path in paths] == ["bench-peers.jsonl.xz", "bench-peers.rest.jsonl.xz"]
    found = published_figures.Bench(tuple(paths))
    line = published_figures.beside_others({"H200": found}).splitlines()[2]
    assert line == "| GDN T=1, bf16 state | 1.16 (**0.90**) |"
    assert published_figures.journals(tmp_path / "none", "bench-peers.jsonl.xz") == []


def test_steps_and_rings_by_batch(tmp_path):
    """Of each contract ours and every library, a column a batch; what is faster than ours beyond a
    tie is bold.
    """
    plain = published(tmp_path, "1", flashinfer=0.9, apart=1.5)
    rings = with_rows(plain, ring=16, ring_dtype="bf16")
    lines = published_figures.by_batch(rings, "H200, alone").splitlines()
    assert lines[0] == "| H200, alone |  | B=1 |"
    first, ours = lines[2].split(" | ")[:2]
    assert first == "| GDN T=1, bf16 state, u in bf16" and ours == "gdntune"
    mine, theirs, apart = (line.split(" | ")[2].strip("* |") for line in lines[2:5])
    assert lines[3].startswith("|  | FlashInfer | **") and "ours, apart" in lines[4]
    assert float(theirs) < float(mine) < float(apart)
    steps = with_rows(plain, conv="silu", conv_window="shifted")
    assert "| GDN step, windows shifted, T=1, bf16 state, HV=64 | gdntune |" in (
        published_figures.by_batch(steps, "")
    )


def test_where_others_are_ahead_in_words(tmp_path):
    """By library, contract and HV: both times and by how much; the short list has no kernel of
    ours, and a bench of another policy is named. Fault: it left out where the GPU that is not the
    headline's is behind, and which version it is behind of.
    """
    found = published(tmp_path, "0.33.0", vllm=0.8, apart=0.9, fla=1.1)
    (one, *_), apart = (
        [x for x in published_behind._behind("H200", "in a chain of layers", found, set()) if x.peer.startswith(peer)]
        for peer in ("vllm", "apart")
    )  # fmt: skip
    # what was timed again is not called behind by the earlier bench
    again = published_behind._places(found)
    assert not list(published_behind._behind("H200", "in a chain of layers", found, again))
    # but at other batch sizes of a contract it is: fault, one bench of two sizes hid all others'
    elsewhere = {(contract, HV, B + 1) for contract, HV, B in again}
    still = published_behind._behind("H200", "in a chain of layers", found, elsewhere)
    assert one.contract in [x.contract for x in still]
    assert (one.contract, one.cells, len(one.rows)) == ("GDN T=1 bf16", 1, 1)
    head, _, line, second = published_behind.behind_table([one, one]).splitlines()
    assert head.startswith("| ours takes longer than | contract | B |")
    assert line.startswith(
        f"| vLLM 0.33.0, H200, in a chain of layers | GDN T=1 bf16, HV={one.HV} | 1 |"
    )
    assert line.endswith("| 25% |") and second.startswith("|  | GDN T=1 bf16")
    assert published_behind.behind_short([one, *apart]) == (
        "- **Behind vLLM 0.33.0, H200**: GDN bf16, in a chain of layers (T=1):"
        " up to 25%, 1 of 1 cells."
    )
    both = published_behind.behind_short([one._replace(gpu="H100", peer="fla 0.6.0"), one])
    assert [line.split("**")[1] for line in both.splitlines()] == [
        "Behind vLLM 0.33.0, H200",
        "Behind fla 0.6.0, H100",
    ]
    assert published_behind.behind_short(apart) == f"- {published_behind.NOWHERE}"
    assert published_behind.behind_table([]) == published_behind.NOWHERE
    assert published_behind.measured(found).endswith(
        "vLLM 0.33.0, fla 0.33.0, ours, apart: 6 cells, none of them at the GPU's power limit"
    )
