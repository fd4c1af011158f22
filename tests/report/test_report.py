"""gdntune/report.py and render/: what journals become, in Markdown, CSV and the terminal."""

import io
import re

import msgspec
import pandas as pd
import pytest
import synthetic
from reported import report_of, terminal, text_of
from rich.console import Console

from gdntune import kernels
from gdntune.device.arch import target
from gdntune.errors import JournalError, TableError, counted
from gdntune.kernels.spec import Variant
from gdntune.problem import Problem
from gdntune.report.document import Document, Grid, Section
from gdntune.report.markdown import markdown
from gdntune.report.report import report
from gdntune.report.terminal import print_document, shade
from gdntune.report.words import geometric_mean, number, ranges
from gdntune.results import judge
from gdntune.results.frame import COLUMNS
from gdntune.results.records import Cell, Check, Trial


def test_one_row_a_cell_and_implementation(made):
    """Each variant of each cell has one row, its last stage's, beside one of the floor."""
    f = made.frame
    assert list(f.columns) == list(COLUMNS)
    assert len(f) == 18 * 5
    assert not f.duplicated(["op", "tokens", "state_dtype", "work_units", "variant"]).any()
    assert f.groupby("stage").size().to_dict() == {"final": 18 * 3, "screen": 18 * 2}


def test_numbers_follow_from_the_samples(made):
    """Bandwidth, share of the peak and time over the floor agree with the row's own time and bytes."""
    f = made.frame[made.frame["role"] == "decode"]
    assert f["bandwidth_gb_s"].to_numpy() == pytest.approx(
        (f["bytes_moved"] / f["median_us"] / 1e3).to_numpy(), abs=0.06
    )
    assert f["sol"].to_numpy() == pytest.approx(
        (f["bytes_moved"] / f["median_us"] / 3352e3).to_numpy(), abs=1e-4
    )
    assert f["over_floor"].to_numpy() == pytest.approx(
        (f["median_us"] / f["floor_us"]).to_numpy(), abs=1e-4
    )
    assert (f["over_floor"] >= 1).all()


def test_the_table_chooses(made, folder):
    """`chosen` marks one verified variant a cell: the one that the sweep's table names."""
    chosen = made.frame[made.frame["chosen"]]
    assert len(chosen) == 18
    assert set(chosen["verified"]) == {"ok"}
    assert set(chosen[chosen["B"] == 64]["variant"]) == {synthetic.VARIANTS[2].id}
    assert set(chosen[chosen["B"] < 64]["variant"]) == {synthetic.VARIANTS[0].id}


def test_a_foreign_table_is_not_believed(folder, tmp_path):
    """A table.json of another journal is passed over, and that is said."""
    header = synthetic.run()
    other = synthetic.write(tmp_path / "a", header, synthetic.records(header, swap=1))
    (other / "table.json").write_bytes((folder / "table.json").read_bytes())
    made = report([other])
    assert set(made.frame[made.frame["chosen"]]["variant"]) == {
        synthetic.VARIANTS[1].id,
        synthetic.VARIANTS[3].id,
    }
    assert "not of this journal" in made.markdown()


def test_a_malformed_table_is_refused(folder, tmp_path):
    """A table.json that is none is an error, not a silence."""
    header = synthetic.run()
    other = synthetic.write(tmp_path, header, synthetic.records(header))
    (other / "table.json").write_text("{}")
    with pytest.raises(TableError, match="table.json"):
        report([other])


def test_csv_round_trip(made):
    """pandas reads the CSV back with the same dtypes and values, and there is no index column."""
    back = pd.read_csv(io.StringIO(made.csv()))
    pd.testing.assert_frame_equal(back, made.frame, check_exact=False, rtol=1e-12)
    assert (back.dtypes == made.frame.dtypes).all()
    assert made.csv().startswith("run,device,")


def test_same_journal_same_bytes(folder, made):
    """A second report of the same journal is the same to the byte, in every form."""
    again = report([folder])
    assert again.markdown() == made.markdown()
    assert again.csv() == made.csv()
    assert terminal(again, details=True) == terminal(made, details=True)


def test_markdown_begins_with_plain_words(made):
    """The summary says how many cells, the time over the floor, and what failed, before any table."""
    head = made.markdown().partition("\n## ")[0]
    flat = " ".join(head.split())
    assert "18 of 18 cells" in flat
    worst = made.frame[made.frame["chosen"]]["over_floor"].max()
    assert f"{worst:.3f} times at worst" in flat
    assert "7 objects compiled (2 failed)" in flat
    assert "|" not in head.replace("\\|", "")


def test_what_ids_say(made):
    """Each part of the choices' ids has its knob's name and meaning, and no other knob has a line."""
    said = made.markdown().partition("## What variants' ids say\n")[2].partition("\n## ")[0]
    assert "`recurrent`, `tv` (tile_v): rows of V a thread block owns" in said
    assert "`recurrent`, `ilp` (ilp): rows a thread has in flight" in said
    assert said.count("`recurrent`, ") == 2


def test_markdown_tables_are_narrow_and_whole(made):
    """Every table line has at most 100 columns, its table's number of cells, and a header line."""
    tables = re.findall(r"(?:^\|.*\|\n)+", made.markdown(), re.M)
    assert len(tables) > 8
    for t in tables:
        lines = t.splitlines()
        assert max(map(len, lines)) <= 100
        assert re.fullmatch(r"\|( -+:? \|)+", lines[1])
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_sixteen_tokens_are_two_tables():
    """A table of B x T with T=1..16 is split so that it stays narrow."""
    header = synthetic.run()
    cells = [
        r
        for t in range(1, 17)
        for r in synthetic.cell(
            Problem(synthetic.contracts((t,), ("bf16",))[0], 512, 16, 64), header
        )
    ]
    checks = [
        Check(contract=synthetic.contracts((t,), ("bf16",))[0], variant=v.id, status="ok")
        for t in range(1, 17)
        for v in synthetic.VARIANTS
    ]
    made = report_of(header, [*checks, *cells])
    grids = [
        b
        for s in made.document.sections
        for b in s.blocks
        if isinstance(b, Grid) and b.caption.startswith("Time, us")
    ]
    assert [len(g.headers) for g in grids] == [10, 10]
    assert max(map(len, re.findall(r"^\|.*", made.markdown(), re.M))) <= 100


def test_long_cells_are_cut():
    """A reason of a thousand letters does not widen a table."""
    grid = Grid("", ("what", "reason"), (("build", "x" * 1000), ("check", "a word and " * 100)))
    assert grid.fitted().rows[1][1].startswith("a word and a word")
    assert grid.fitted().rows[0][1].endswith("x...")
    assert all(len(row[0]) + len(row[1]) + 7 <= 100 for row in grid.fitted().rows)


def test_one_is_said_in_the_singular():
    """Fault: `1 cells are noisy`, `1 rules, 1 intervals`."""
    assert [counted(n, "cell is", "cells are") for n in (0, 1, 2)] == [
        "0 cells are",
        "1 cell is",
        "2 cells are",
    ]
    header, contract = synthetic.run(), synthetic.contracts()[0]
    checks = [Check(contract=contract, variant=v.id, status="ok") for v in synthetic.VARIANTS]
    *trials, closing = synthetic.cell(Problem(contract, 1, 16, 64), header)
    noisy = msgspec.structs.replace(closing, reason="noisy: the load is 8")
    made = report_of(header, [*checks, *trials, noisy])
    text = " ".join(made.markdown().split())
    assert "1 cell is noisy: its times cannot be believed" in text
    assert "1 choice has the times by which the sweep chose it, which flatters it" in text


def test_pages_need_no_first_looks(h100):
    """A page is made of few of a sweep's rows; it says the same with all of them."""
    _, run, records = h100
    few = [r for r in records if isinstance(r, Check | Trial | Cell)]
    few = [
        r for r in few if (r.contract if isinstance(r, Check) else r.problem.contract).tokens == 2
    ]
    lean, full = report_of(run, few), report_of(run, few)
    assert len(full.frame) > 2 * len(lean._shown)
    assert lean.markdown() == full.markdown()
    assert lean.values() == full.values()


def test_failures_are_counted_by_reason(made):
    """Two failures that differ in a number are one line with a count of 2; a bar in a reason does
    not end its cell.
    """
    text = made.markdown()
    assert re.search(r"^\| build, failed \| tile_v=9 \\\| no such tile +\| +2 \|$", text, re.M)
    assert "`recurrent.tv9`" in text


def test_failed_trials_stay_rows(tmp_path):
    """A variant that crashed has a row with its reason and no time, and is not chosen."""
    header = synthetic.run()
    found = synthetic.records(header)
    last = found.pop()
    crash = Trial(
        problem=last.problem,
        variant=synthetic.VARIANTS[2],
        stage="screen",
        status="crashed",
        reason="exit code -11",
    )
    made = report_of(header, [*found, crash, last])
    row = made.frame[made.frame["status"] == "crashed"].iloc[0]
    assert (row["reason"], row["samples"], row["chosen"]) == ("exit code -11", 0, False)
    assert pd.isna(row["median_us"])


def test_times_beyond_the_dram_are_refused():
    """Under cold-dirty a share above 100% is no result: the row says so, no such cell is chosen,
    and the summary counts it.
    """
    header = synthetic.run(policy={"timer": "cupti", "l2": "cold-dirty"})
    problem = Problem(synthetic.contracts()[0], 512, 16, 64)
    checks = [
        Check(contract=problem.contract, variant=v.id, status="ok") for v in synthetic.VARIANTS
    ]
    made = report_of(header, [*checks, *synthetic.cell(problem, header, slow=0.5)])
    assert set(made.frame[made.frame["role"] == "decode"]["status"]) == {"impossible"}
    assert not made.frame["chosen"].any()
    assert "times were refused" in made.markdown()


def test_times_beyond_the_dram_are_labelled():
    """Under cold-clean a small working set may exceed 100% honestly: it is labelled L2-assisted."""
    header = synthetic.run()
    problem = Problem(synthetic.contracts()[0], 16, 16, 64)
    checks = [
        Check(contract=problem.contract, variant=v.id, status="ok") for v in synthetic.VARIANTS
    ]
    made = report_of(header, [*checks, *synthetic.cell(problem, header, slow=0.6)])
    chosen = made.frame[made.frame["chosen"]].iloc[0]
    assert chosen["sol"] > 1
    assert chosen["bound"] == "L2-assisted"
    assert f"{100 * chosen['sol']:.1f} c" in made.markdown()
    # Fault: the terminal, where no page explains it, did not say what the letter stands for.
    assert "c: L2-assisted." in terminal(made) and "l: latency-bound." not in terminal(made)


def test_the_default_rule_is_compared():
    """Where the default rule's variant was timed, the speed-up over it is in the frame and in a
    table of its own.
    """
    header = synthetic.run()
    problem = Problem(synthetic.contracts()[0], 8, 16, 64)
    default = kernels.default(problem.contract, problem.work_units, header.device)
    checks = [
        Check(contract=problem.contract, variant=v.id, status="ok")
        for v in (*synthetic.VARIANTS, default)
    ]
    *trials, closing = synthetic.cell(problem, header)
    best = min(sum(t.samples_us) / len(t.samples_us) for t in trials if t.role == "decode")
    trials.append(
        Trial(
            problem=problem, variant=default, stage="final", status="ok", samples_us=[2 * best] * 20
        )
    )
    made = report_of(header, [*checks, *trials, closing])
    chosen = made.frame[made.frame["chosen"]].iloc[0]
    assert chosen["speedup_over_default"] == pytest.approx(2, rel=0.02)
    assert "Speed-up over the default rule" in made.markdown()


def test_terminal(made):
    """The terminal has the same tables; colours stand for shares of the peak, and details are left
    out unless asked for.
    """
    short = terminal(made)
    assert "18 of 18 cells" in short
    assert "Environment" not in short
    assert "Environment" in terminal(made, details=True)
    assert max(map(len, short.splitlines())) <= 100
    out = io.StringIO()
    made.terminal(Console(file=out, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in out.getvalue()
    # the colours' legend only where there are colours
    legend = "below 50%"
    assert legend in out.getvalue() and legend not in terminal(made, details=True)
    plain = io.StringIO()
    made.terminal(
        Console(file=plain, width=100, force_terminal=True, color_system="standard", no_color=True)
    )
    assert legend not in plain.getvalue()


def test_shades():
    """The nearer to the peak, the greener."""
    assert [shade(s) for s in (1.02, 0.85, 0.8, 0.6, 0.1, None)] == [
        "green",
        "green",
        "yellow",
        "dark_orange",
        "red",
        "",
    ]


def test_nothing_to_report(tmp_path):
    """No folder, or one without a journal, is refused with what is expected."""
    with pytest.raises(JournalError, match="one or more folders"):
        report([])
    with pytest.raises(JournalError, match="expected a sweep's folder"):
        report([tmp_path])


def test_numbers():
    """Times have four digits at most; a geometric mean of reciprocals is 1."""
    assert [number(x) for x in (3.14159, 99.994, 123.45, 12345.6, float("nan"))] == [
        "3.14",
        "99.99",
        "123.5",
        "12346",
        "-",
    ]
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1)


def test_markdown_is_utf8_text(made):
    """The document ends with a newline and has no trailing blanks, so that editors leave it as it
    is.
    """
    text = markdown(made.document)
    assert text.endswith("\n")
    assert not text.endswith("\n\n\n")
    assert not re.search(r"[ \t]$", text, re.M)
    assert target("sm_90a").name in text


def test_the_default_rule_is_the_journals(tmp_path, made):
    """Fault: a change of the default rule changed the report of a journal that was measured before
    it.
    """
    header = synthetic.run()
    found = synthetic.records(header)
    cells = [r for r in found if isinstance(r, Cell)]
    other = next(
        r.variant.id
        for r in found
        if isinstance(r, Trial) and r.problem == cells[0].problem and r.stage == "final"
    )
    noted = [
        msgspec.structs.replace(r, default_variant=other) if isinstance(r, Cell) else r
        for r in found
    ]
    frame = report([synthetic.write(tmp_path / "noted", header, noted)]).frame
    assert set(frame.loc[frame["default_mean_us"].notna(), "variant"]) >= {other}
    default = frame[frame["variant"] == other]
    assert (default["speedup_over_default"].dropna() == 1.0).all() and default[
        "speedup_over_default"
    ].notna().any()


def test_ranges():
    """Runs of three and more by their ends."""
    assert [ranges(x) for x in ([], [5], [2, 1], [1, 2, 3, 8], [2, 4, 8])] == [
        "",
        "5",
        "1,2",
        "1-3,8",
        "2,4,8",
    ]


def test_csv_dtypes(made):
    """Each column is read back as what the module says it is, empty ones too, and no text is empty."""
    back = pd.read_csv(io.StringIO(made.csv()))
    kinds = {"int": "int64", "float": "float64", "bool": "bool"}
    for name, kind in COLUMNS.items():
        assert str(back[name].dtype) == kinds.get(kind, str(made.frame[name].dtype)), name
        assert kind == "float" or back[name].notna().all(), name
    assert "Unnamed: 0" not in back.columns


def test_choices_with_another_regret(folder):
    """`regret` gives the choices of a replay with it, whatever table lies in the folder, and the
    report says so.
    """
    wide = report([folder], regret=0.2)
    assert wide.sources[0].table.rules == judge.replay(folder, regret=0.2).table.rules
    assert wide.sources[0].table.rules != report([folder]).sources[0].table.rules
    assert "The choices are those of `gdntune replay --regret 0.2`." in " ".join(
        wide.markdown().split()
    )


@pytest.mark.parametrize("width", [20, 60, 80, 100])
def test_nothing_is_cut_in_the_terminal(width):
    """Fault: at 80 columns numbers were cut to their first digit, and long ids until rows meant
    nothing. Words go on in the next line.
    """
    name = "recurrent.tv64.ilp4.vec8.ln8.th128.early.spread.heads"
    grid = Grid("", ("variant", "us", "regret %"), ((name, "389.123", "12.34"),), left=1)
    out = io.StringIO()
    print_document(Document("d", (Section("s", (grid,)),)), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert any("389.123" in line and "12.34" in line for line in lines)
    folded = "".join(
        line.split("  ")[0].strip()
        for line in lines[lines.index(next(x for x in lines if "389.123" in x)) :]
    )
    assert folded == name and "..." not in out.getvalue() and "…" not in out.getvalue()


def test_floors_are_named():
    """Fault: the floor by the pool's index hid 2 to 5% at B=256. States in order are the headline's;
    the pool's index and all bytes of the problem stand beside them, each by its name.
    """
    header = synthetic.run()
    found = synthetic.records(header, batches=(64,))
    index = Variant("stream", "stream.t4096.ilp4.idx", {"indexed": True})
    made = []
    for r in found:
        if isinstance(r, Trial) and r.role == "floor":
            slower = [1.25 * us for us in r.samples_us]
            made.append(msgspec.structs.replace(r, variant=index, samples_us=slower))
        made.append(r)
    chosen = report_of(header, made).frame.query("chosen")
    assert set(chosen["floor"]) == {"states in order"}
    assert (chosen["over_floor"] / chosen["over_index_floor"]).round(2).eq(1.25).all()
    assert (chosen["over_bytes_floor"] < chosen["over_floor"]).all()
    text = text_of(header, made)
    assert "same state bytes, states in order, timed in the same run" in text
    assert "Over a floor that takes the states by the pool's index, shuffled:" in text
    assert (
        "Over the time that all bytes of the problem (inputs and output too) take at the floor's rate:"
        in text
    )
    # an older journal has the other floor alone, and says so
    alone = [r for r in made if not (isinstance(r, Trial) and r.variant == synthetic.FLOOR)]
    assert "same state bytes, by the pool's index, timed in the same run" in text_of(header, alone)
