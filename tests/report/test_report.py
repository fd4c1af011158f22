"""gdntune/report.py and render/: what journals become, in Markdown, CSV and the terminal."""

import io
import re

import msgspec
import pandas as pd
import pytest
import synthetic
from rich.console import Console

from gdntune import kernels
from gdntune.device.arch import Card, target
from gdntune.errors import JournalError, TableError
from gdntune.kernels.spec import Variant
from gdntune.peers.spec import Peer
from gdntune.problem import Contract, Problem
from gdntune.report.document import Document, Grid, Section
from gdntune.report.markdown import markdown
from gdntune.report.report import Report, report
from gdntune.report.terminal import print_document, shade
from gdntune.report.words import geometric_mean, number, ranges
from gdntune.results import judge
from gdntune.results.frame import COLUMNS
from gdntune.results.journal import Build, Cell, Check, Trial

FAILED = (
    Build(
        kernel="recurrent",
        variant="recurrent.tv9",
        object_key="x",
        status="failed",
        reason="tile_v=9 | no\nsuch tile",
    ),
    Build(
        kernel="recurrent",
        variant="recurrent.tv7",
        object_key="y",
        status="failed",
        reason="tile_v=7 | no\nsuch tile",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sweep of 18 cells with two variants that did not compile."""
    header = synthetic.run()
    return synthetic.write(
        tmp_path_factory.mktemp("sweep"), header, synthetic.records(header, extra=FAILED)
    )


@pytest.fixture(scope="module")
def made(folder):
    """Its report."""
    return report([folder])


def terminal(made, **options):
    """What is printed where there is no terminal."""
    out = io.StringIO()
    made.terminal(Console(file=out, width=100), **options)
    return out.getvalue()


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
    assert f"{worst:.3f} at worst" in flat
    assert "7 objects compiled (2 failed)" in flat
    assert "|" not in head.replace("\\|", "")


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
    made = _report_of(header, [*checks, *cells])
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
    made = _report_of(header, [*found, crash, last])
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
    made = _report_of(header, [*checks, *synthetic.cell(problem, header, slow=0.5)])
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
    made = _report_of(header, [*checks, *synthetic.cell(problem, header, slow=0.6)])
    chosen = made.frame[made.frame["chosen"]].iloc[0]
    assert chosen["sol"] > 1
    assert chosen["bound"] == "L2-assisted"
    assert f"{100 * chosen['sol']:.1f} c" in made.markdown()


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
    made = _report_of(header, [*checks, *trials, closing])
    chosen = made.frame[made.frame["chosen"]].iloc[0]
    assert chosen["speedup_over_default"] == pytest.approx(2, rel=0.02)
    assert "Speed-up over the default rule" in made.markdown()


def test_several_runs(folder, tmp_path):
    """Runs that share a config are told apart by policy, and where they choose differently is a
    table.
    """
    header = synthetic.run(policy={"timer": "cupti", "l2": "cold-dirty"})
    other = synthetic.write(tmp_path, header, synthetic.records(header, swap=1))
    made = report([folder, other])
    assert list(dict.fromkeys(made.frame["run"])) == [
        "synthetic, cold-clean",
        "synthetic, cold-dirty",
    ]
    assert "share 18 cells and choose differently at 18" in " ".join(made.markdown().split())


def test_policies_are_compared_cell_by_cell(tmp_path):
    """Two cells with equal work units and other heads are two, in what runs share and where their
    choices differ.
    """
    contract, folders = synthetic.contracts()[0], []
    for l2, favoured in (("cold-clean", 0), ("cold-dirty", 1)):
        header = synthetic.run(policy={"timer": "cupti", "l2": l2})
        found = [Check(contract=contract, variant=v.id, status="ok") for v in synthetic.VARIANTS]
        for B, H, HV in ((8, 16, 64), (64, 2, 8), (8, 64, 64)):
            found += synthetic.cell(Problem(contract, B, H, HV), header, favoured=favoured)
        folders.append(synthetic.write(tmp_path / l2, header, found))
    made = report(folders)
    assert "share 3 cells and choose differently at 3" in " ".join(made.markdown().split())


def test_runs_alike_are_numbered(folder):
    """Two runs of one config and policy have names of their own."""
    assert [s.name for s in report([folder, folder]).sources] == [
        "synthetic, cold-clean (1)",
        "synthetic, cold-clean (2)",
    ]


def test_a_cpu_run(tmp_path):
    """Without a datasheet's peak shares are of the measured one."""
    header = synthetic.run(
        synthetic.cpu(), policy={"timer": "cpu", "l2": "cold-clean"}, peaks={"measured": 20.0}
    )
    made = report([synthetic.write(tmp_path, header, synthetic.records(header, HV=8))])
    assert made.frame["sol"].notna().all()
    assert "20 GB/s (measured)" in made.markdown()


def test_an_unfinished_sweep(tmp_path):
    """A journal that holds a header alone, or checks alone, is reported: no cell, no table, no
    error.
    """
    header = synthetic.run()
    for i, found in enumerate(
        (
            [],
            [
                Check(
                    contract=synthetic.contracts()[0], variant="a", status="failed", reason="wrong"
                )
            ],
        )
    ):
        made = report([synthetic.write(tmp_path / str(i), header, found, with_table=False)])
        assert "0 of 0 cells" in made.markdown()
        assert made.csv().count("\n") == 1
        assert terminal(made)


def test_an_interrupted_sweep_is_said(tmp_path):
    """Fault: a journal that was cut was reported as whole, "N of N cells". Its header says how many
    cells were asked for.
    """
    header = synthetic.run(cells=18)
    found = synthetic.records(header)
    added = synthetic.cell(Problem(synthetic.contracts()[0], 3, 16, 64), header)
    added[-1] = msgspec.structs.replace(added[-1], purpose="bisection")
    closing = [i for i, r in enumerate(found) if isinstance(r, Cell)]
    for n, records, said in (
        (18, found, "18 of 18 cells"),
        (19, [*found, *added], "19 of 19 cells"),
        (5, found[: closing[4] + 1], "5 of 18 cells"),
        # half of the next cell, and a cell that was added beside them
        (5, found[: closing[4] + 3], "5 of 18 cells"),
        (6, [*found[: closing[4] + 1], *added], "6 of 19 cells"),
    ):
        made = _report_of(header, records)
        text = " ".join(made.markdown().split())
        assert said in text and f"<dd>{said.removesuffix(' cells')}</dd>" in made.html(), text
        unfinished = (
            "- The sweep was not finished: 5 of 18 cells are done. The same command goes on with the others."
            in text
        )
        assert unfinished == (n < 18)
        # what an older version wrote says nothing of it
        old = _report_of(msgspec.structs.replace(header, cells=msgspec.UNSET), records)
        assert "was not finished" not in old.markdown()
    bench = synthetic.run(cells=18, software={"table for gdn_decode": "none: the default rule"})
    assert "The bench was not finished: 0 of 18 cells" in " ".join(
        _report_of(bench, []).markdown().split()
    )


def test_a_throttled_cell_is_said(tmp_path):
    """Cells that heat slowed are counted in the summary."""
    header = synthetic.run()
    *rest, closing = synthetic.records(header)
    hot = msgspec.structs.replace(closing, clocks_after={"event_reasons": ["sw_thermal_slowdown"]})
    assert isinstance(hot, Cell)
    assert "1 cells were timed while heat or power" in _report_of(header, [*rest, hot]).markdown()


def test_a_clock_that_moved_is_said(tmp_path):
    """So are those during which the clocks moved, whatever for."""
    header = synthetic.run()
    *rest, closing = synthetic.records(header)
    looks = {
        "clocks_before": {"sm_mhz": 1980, "memory_mhz": 2619},
        "clocks_after": {"sm_mhz": 1620, "memory_mhz": 2619},
    }
    text = _report_of(header, [*rest, msgspec.structs.replace(closing, **looks)]).markdown()
    assert (
        "1 cells were timed while a clock moved by more than 5%" in text
        and "held the clocks down" not in text
    )


def test_peaks_that_disagree_are_said(tmp_path):
    """Datasheet and NVML more than 5% apart are in the environment's section."""
    header = synthetic.run(peaks={"datasheet": 3352.0, "nvml": 2039.0, "measured": 3005.0})
    assert "The peaks disagree" in _report_of(header, synthetic.records(header)).markdown()


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


def _report_of(header, found):
    """The report of records, by way of a folder."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as temporary:
        return report([synthetic.write(Path(temporary), header, found, with_table=False)])


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


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of five contracts, one of them with unusual sizes and one with unusual gates."""
    header = synthetic.run()
    plain = Contract()
    contracts = [
        Contract(K=96, V=192),
        *(plain.replace(tokens=t) for t in (1, 2, 3, 8)),
        plain.replace(state_dtype="fp32"),
        plain.replace(
            mode="frozen", intermediate="indexed", ragged=True, dt_bias_dtype="bf16", tokens=4
        ),
        plain.replace(layout="v_last", gate="log", gate_dtype="fp32", beta="given", pool=False),
    ]
    checks = [
        Check(contract=c, variant=v.id, status="ok") for c in contracts for v in synthetic.VARIANTS
    ]
    cells = [
        r for c in contracts for B in (1, 8) for r in synthetic.cell(Problem(c, B, 16, 64), header)
    ]
    return report(
        [
            synthetic.write(
                tmp_path_factory.mktemp("many"), header, [*checks, *cells], with_table=False
            )
        ]
    )


def test_many_contracts_have_a_table_of_contents(many, made):
    """From four sections on contracts are numbered, usual ones first, and a table says of each what
    it is and how near to the floor.
    """
    text = many.markdown()
    rows = [
        [c.strip() for c in row.split("|")[1:-1]]
        for row in re.findall(r"^\| \d+ +\| gdn .*", text, re.M)
    ]
    assert [row[:5] for row in rows] == [
        ["1", "gdn bf16 update", "", "1-3,8", "8"],
        ["2", "gdn fp32 update", "", "1", "2"],
        ["3", "gdn bf16 frozen indexed", "dt_bias bf16, ragged", "4", "2"],
        ["4", "gdn bf16 update", rows[3][2], "1", "2"],
        ["5", "gdn bf16 update", "K=96, V=192", "1", "2"],
    ]
    assert "V-last, log gate, fp32 gate, beta given, no pool".startswith(
        rows[3][2].removesuffix("...")
    )
    assert re.findall(r"^## (\d)\. ", text, re.M) == ["1", "2", "3", "4", "5"]
    worst = many.frame[many.frame["chosen"] & (many.frame["K"] == 96)]["over_floor"].max()
    assert float(rows[4][6]) == pytest.approx(worst, abs=0.006)
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100
    assert "## Contracts" not in made.markdown() and "## 1." not in made.markdown()


def test_after_a_sweep_of_many_contracts_the_terminal_stays_short(many):
    """Their tables are left to `gdntune report`; the table of contents is shown."""
    short, long = terminal(many), terminal(many, details=True)
    assert "gdn bf16 frozen indexed" in short and "Time, us" not in short
    assert "Time, us" in long
    assert max(map(len, long.splitlines())) <= 100


def test_an_unfinished_contract_has_a_row(many, tmp_path):
    """A contract none of whose cells is timed stands in the table of contents, without numbers."""
    header = synthetic.run()
    checks = [
        Check(
            contract=Contract(state_dtype=s, mode=m), variant="a", status="failed", reason="wrong"
        )
        for s in ("bf16", "fp32")
        for m in ("update", "frozen")
    ]
    text = report([synthetic.write(tmp_path, header, checks, with_table=False)]).markdown()
    assert re.search(r"^\| 1 +\| gdn bf16 update +\| +\| +\| +0 \| +- \| +- \| +- \|$", text, re.M)


def benched(header, found, choice, default="z", peer_trials=()):
    """A sweep's records as a bench's: each cell closes with what was called, and what the default
    rule says.
    """
    made = []
    for r in found:
        if isinstance(r, Cell):
            made += [t(r.problem) for t in peer_trials]
            r = msgspec.structs.replace(r, choice=choice(r.problem), default_variant=default)
        made.append(r)
    return msgspec.structs.replace(header, software={"table for gdn_decode": "t.json"}), made


def test_whose_choice_a_bench_timed():
    """Fault: a bench without a table said "cells have a tuned variant", of times of the default
    rule's choice.
    """
    header, one, other = synthetic.run(), synthetic.VARIANTS[0].id, synthetic.VARIANTS[1].id
    found = synthetic.records(header, batches=(1, 8))
    for default, choice, said in (
        (
            one,
            lambda p: one,
            "12 of 12 cells (a contract at a B, H and HV) have a time of the default rule's choice on NVIDIA",
        ),
        (other, lambda p: one, "have a time of the table's choice on NVIDIA"),
        (
            one,
            lambda p: one if p.B == 1 else other,
            "have a time of the table's choice (at 6 it is the default rule's) on NVIDIA",
        ),
    ):
        made = _report_of(*benched(header, found, choice, default))
        text = " ".join(made.markdown().split())
        assert said in text and "tuned variant" not in text + made.html()


def test_peers_that_are_not_here_and_that_do_not_serve():
    """Fault: both were "failed", and no line said how many cells a peer has no time of, or why."""
    header = synthetic.run()
    lacking = Peer("x", ("no_such_package",), (), "pip install x", ()).absent()

    def lost(name, reason, status="failed"):
        variant = Variant("peer:" + name.partition(".")[0], "peer:" + name, {})
        return lambda p: Trial(
            problem=p, variant=variant, role="peer", stage="final", status=status, reason=reason
        )

    peer_trials = [
        lost("absent", lacking), lost("narrow", "decode: tokens=1, expected 2"), lost("wrong.decode", "check failed"),
        lost("crashing.decode", "exit code -11", "crashed"),
    ]  # fmt: skip
    made = _report_of(
        *benched(
            header,
            synthetic.records(header),
            lambda p: synthetic.VARIANTS[0].id,
            peer_trials=peer_trials,
        )
    )
    text = " ".join(made.markdown().split())
    for said in (
        "- Against absent: it is not installed (18 cells).",
        "- Against narrow: it does not serve 18 cells.",
        "- Against wrong: it failed at 18.",
        "- Against crashing: it crashed at 18.",
        "| absent | not installed | pip install x (no package no_such_package) | 18 |",
        "| narrow | not served | decode: tokens=1, expected 2 | 18 |",
        "| wrong.decode | failed | check failed | 18 |",
    ):
        assert said in text
    found = {p["peer"]: p for p in made.peers()}
    assert found["absent"]["untimed"] == {"not installed": 18} and found["crashing"]["untimed"] == {
        "crashed": 18
    }
    assert found["absent"]["without_times"] == {
        "absent: not installed: pip install x (no package no_such_package)": 18
    }


def test_contracts_that_only_passed_their_check_are_left_out():
    """Fault: an unfinished bench listed contracts with 0 cells. One whose check failed has its row."""
    header = synthetic.run()
    found = [
        r for r in synthetic.records(header) if isinstance(r, Check) or getattr(r, "problem", None)
    ]
    done = [r for r in found if isinstance(r, Check) or r.problem.contract.state_dtype == "bf16"]
    text = _report_of(header, done).markdown()
    assert "bf16 state" in text and "fp32 state" not in text
    wrong = Check(
        contract=Contract(state_dtype="fp32"), variant="a", status="failed", reason="wrong"
    )
    assert "fp32 state" in _report_of(header, [*done, wrong]).markdown()


@pytest.mark.parametrize(
    "command, folder",
    [
        ("gdntune sweep a.yaml --out results/new --device cuda", "results/new"),
        ("gdntune sweep a.yaml --out='my runs/a'", "'my runs/a'"),
        ("gdntune sweep a.yaml --out '/tmp/my runs/a'", "'/tmp/my runs/a'"),
        ("gdntune sweep a.yaml", "results/synthetic"),
        ("gdntune bench a.yaml --peers fla", "results/synthetic-bench"),
        ("", "results/synthetic"),
    ],
)
def test_the_commands_to_reproduce_can_be_run(command, folder):
    """Fault: the last one was `gdntune report RUN... --format md`, which is none."""
    software = {"table for gdn_decode": "t.json"} if "bench" in command else {}
    header = synthetic.run(command=command, software=software)
    made = _report_of(header, synthetic.records(header, batches=(1,)))
    assert f"gdntune report {folder} --format md\n" in made.markdown()
    two = msgspec.structs.replace(header, config="other", command="gdntune sweep b.yaml")
    sources = [*made.sources, *_report_of(two, synthetic.records(two, batches=(1,))).sources]
    assert f"gdntune report {folder} results/other" in Report(sources).markdown()


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


def test_a_peer_that_does_more_is_compared_with_ours_and_the_same_behind_it():
    """Fault: vLLM's op has a norm inside, and its time stood beside ours without one."""
    header = synthetic.run()
    us = {
        p: 10.0 + p.B
        for p in {r.problem for r in synthetic.records(header) if hasattr(r, "problem")}
    }

    def timed(entry, role, slow, **knobs):
        variant = Variant("peer:x", f"peer:x.{entry}", knobs)
        return lambda p: Trial(
            problem=p, variant=variant, role=role, stage="final", status="ok",
            samples_us=[slow * us[p]] * 20, kernels=("a", "b"),
        )  # fmt: skip

    def report(*trials):
        choice = synthetic.VARIANTS[0].id
        return _report_of(
            *benched(header, synthetic.records(header), lambda p: choice, peer_trials=trials)
        )

    op = timed("op", "peer", 12.0, partner="peer:x.ours_then_norm")
    made = report(op, timed("ours_then_norm", "partner", 10.0))
    (found,) = made.peers()
    assert found["geometric_mean"] == pytest.approx(1.2) and found["cells"] == 18
    assert found["mean_ratio"][0] == pytest.approx(1.2) and found["FASTER"] == 18
    rows = made.frame.loc[made.frame["variant"] == "peer:x.op"]
    assert set(rows["beside"]) == {"peer:x.ours_then_norm"}
    # without its partner's time it is compared with nothing
    (found,) = report(op).peers()
    assert found["cells"] == 0


def _text(*made):
    return " ".join(_report_of(*made).markdown().split())


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
    chosen = _report_of(header, made).frame.query("chosen")
    assert set(chosen["floor"]) == {"states in order"}
    assert (chosen["over_floor"] / chosen["over_index_floor"]).round(2).eq(1.25).all()
    assert (chosen["over_bytes_floor"] < chosen["over_floor"]).all()
    text = _text(header, made)
    assert "same state bytes, states in order, same run" in text
    assert "Over the floor by the pool's index, shuffled:" in text
    assert "Over all bytes of the problem at the floor's rate:" in text
    # an older journal has the other floor alone, and says so
    alone = [r for r in made if not (isinstance(r, Trial) and r.variant == synthetic.FLOOR)]
    assert "same state bytes, by the pool's index, same run" in _text(header, alone)


def test_cells_at_the_power_limit_are_marked():
    """Fault: 14 of 60 cells of a published table were timed under a power cap, unmarked."""
    header, limit = synthetic.run(), {"event_reasons": ["sw_power_cap"]}
    found = [
        msgspec.structs.replace(r, clocks_after=limit)
        if isinstance(r, Cell) and r.problem.B == 8
        else r
        for r in synthetic.records(header)
    ]
    made = _report_of(header, found)
    chosen = made.frame.query("chosen")
    assert set(chosen.loc[chosen["power_capped"], "B"]) == {8}
    text = " ".join(made.markdown().split())
    assert "6 cells were timed at the device's power limit" in text and "marked `^`" in text
    eight = [line for line in made.markdown().splitlines() if line.startswith("| 8 x 64")]
    assert eight and all("^" in line for line in eight)


def test_which_samples_and_which_gpu():
    """A report says whether choices are shown by the samples that chose them, how well ratios are
    known, and on which GPU it was.
    """
    card = Card("GPU-ab-1", 700.0, True, 31)
    header = synthetic.run(cards=(card,))
    found = synthetic.records(header)
    text = _text(header, found)
    assert "18 choices are shown by the samples that chose them" in text
    assert "GPU-ab-1, 700 W, ECC on, 31 C at the start" in text
    again = []
    for r in found:
        if isinstance(r, Trial) and r.stage == "final":
            again.append(msgspec.structs.replace(r, stage="evidence"))
        elif isinstance(r, Cell):
            said = "20 final rounds; intervals within 0.5% after 40 samples"
            again.append(msgspec.structs.replace(r, purpose="evidence", stop=said, interval=0.004))
    text = _text(header, [*found, *again])
    assert "18 of 18 choices are shown by samples that were taken after the choice" in text
    assert "as it did at 0 of 18 cells: half the widest is 0.40%" in text
