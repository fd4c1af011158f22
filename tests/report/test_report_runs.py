"""What a report says of several runs, of one that was not finished, and of one that was disturbed."""

import math
import re

import dependent
import msgspec
import pytest
import synthetic
from reported import report_of, terminal, text_of

from gdntune.device.arch import Card
from gdntune.problem import Contract, Problem
from gdntune.report.markdown import markdown
from gdntune.report.report import Report, report
from gdntune.report.tables import table_document
from gdntune.results.records import LAUNCH, Cell, Check, Trial


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
        made = report_of(header, records)
        text = " ".join(made.markdown().split())
        assert said in text and f"<dd>{said.removesuffix(' cells')}</dd>" in made.html(), text
        unfinished = (
            "- The sweep was not finished: 5 of 18 cells are done. The same command goes on with the others."
            in text
        )
        assert unfinished == (n < 18)
        # what an older version wrote says nothing of it
        old = report_of(msgspec.structs.replace(header, cells=msgspec.UNSET), records)
        assert "was not finished" not in old.markdown()
    bench = synthetic.run(cells=18, software={"table for gdn_decode": "none: the default rule"})
    assert "The bench was not finished: 0 of 18 cells" in " ".join(
        report_of(bench, []).markdown().split()
    )


def test_a_throttled_cell_is_said(tmp_path):
    """Cells that heat slowed are counted in the summary."""
    header = synthetic.run()
    *rest, closing = synthetic.records(header)
    hot = msgspec.structs.replace(closing, clocks_after={"event_reasons": ["sw_thermal_slowdown"]})
    assert isinstance(hot, Cell)
    assert "1 cell was timed while heat or power" in report_of(header, [*rest, hot]).markdown()


def test_a_clock_that_moved_is_said(tmp_path):
    """So are those during which the clocks moved, whatever for."""
    header = synthetic.run()
    *rest, closing = synthetic.records(header)
    looks = {
        "clocks_before": {"sm_mhz": 1980, "memory_mhz": 2619},
        "clocks_after": {"sm_mhz": 1620, "memory_mhz": 2619},
    }
    text = report_of(header, [*rest, msgspec.structs.replace(closing, **looks)]).markdown()
    assert (
        "1 cell was timed while a clock moved by more than 5%" in text
        and "held the clocks down" not in text
    )


def test_peaks_that_disagree_are_said(tmp_path):
    """Datasheet and NVML more than 5% apart are in the environment's section."""
    header = synthetic.run(peaks={"datasheet": 3352.0, "nvml": 2039.0, "measured": 3005.0})
    assert "The peaks disagree" in report_of(header, synthetic.records(header)).markdown()


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


def test_contracts_that_only_passed_their_check_are_left_out():
    """Fault: an unfinished bench listed contracts with 0 cells. One whose check failed has its row."""
    header = synthetic.run()
    found = [
        r for r in synthetic.records(header) if isinstance(r, Check) or getattr(r, "problem", None)
    ]
    done = [r for r in found if isinstance(r, Check) or r.problem.contract.state_dtype == "bf16"]
    text = report_of(header, done).markdown()
    assert "bf16 state" in text and "fp32 state" not in text
    wrong = Check(
        contract=Contract(state_dtype="fp32"), variant="a", status="failed", reason="wrong"
    )
    assert "fp32 state" in report_of(header, [*done, wrong]).markdown()


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
    made = report_of(header, synthetic.records(header, batches=(1,)))
    assert f"gdntune report {folder} --format md\n" in made.markdown()
    two = msgspec.structs.replace(header, config="other", command="gdntune sweep b.yaml")
    sources = [*made.sources, *report_of(two, synthetic.records(two, batches=(1,))).sources]
    assert f"gdntune report {folder} results/other" in Report(sources).markdown()


def test_cells_at_the_power_limit_are_marked():
    """Fault: 14 of 60 cells of a published table were timed under a power cap, unmarked."""
    header, limit = synthetic.run(), {"event_reasons": ["sw_power_cap"]}
    found = [
        msgspec.structs.replace(r, clocks_after=limit)
        if isinstance(r, Cell) and r.problem.B == 8
        else r
        for r in synthetic.records(header)
    ]
    made = report_of(header, found)
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
    text = text_of(header, found)
    assert "18 choices have the times by which the sweep chose them" in text
    assert "GPU-ab-1, 700 W, ECC on, 31 C at the start" in text
    again = []
    for r in found:
        if isinstance(r, Trial) and r.stage == "final":
            again.append(msgspec.structs.replace(r, stage="evidence"))
        elif isinstance(r, Cell):
            said = "20 final rounds; intervals within 0.5% after 40 samples"
            again.append(msgspec.structs.replace(r, purpose="evidence", stop=said, interval=0.004))
    text = text_of(header, [*found, *again])
    assert "The times of 18 of 18 choices were taken anew after the choice" in text
    assert "as at 0 of 18 cells. The widest interval is +-0.40%" in text


def test_what_calls_without_dependent_launch_take(tmp_path):
    """A table a rule, and in a line what dependent launch gains; nothing where no choice was made
    apart.
    """
    made = report([synthetic.write(tmp_path / "chain", dependent.RUN, dependent.swept())])
    text = made.markdown()
    said = " ".join(text.split())
    gain = math.sqrt(8.1 / 7.8 * 24.1 / 18)
    assert f"{gain:.3f} times as fast as those without in the geometric mean of 2 cells" in said
    assert f"{24.1 / 18:.3f} at best (T=1, 64 work units)" in said
    assert "## Calls without dependent launch" in text
    letter = re.search(r"^- ([A-Z]): `d`$", text, re.M)[1]
    assert re.search(rf"\| 1 +\| {letter} +\| +8 \| +8.10 \| +0.0 \| +1.04 \|", text), text
    shown = markdown(table_document(made.sources[0].table, "t"))
    assert shown.count("| d ") == 2 and shown.count("Calls without dependent launch") == 2
    assert "without dependent launch, which is the default, take the intervals under" in shown
    older = msgspec.structs.replace(dependent.RUN, alone=msgspec.UNSET)
    bare = report([synthetic.write(tmp_path / "older", older, dependent.swept())])
    assert "ithout dependent launch" not in bare.markdown()


def test_which_calls_a_bench_timed(tmp_path):
    """Those that a call gets without dependent launch, or what the table chose with it."""
    for launch, name, said in (
        (
            {LAUNCH: "not allowed"},
            "d",
            "Ours is what calls get where dependent launch is not allowed.",
        ),
        ({}, "a", "Ours uses dependent launch where the table chose it."),
        ({}, "d", None),
    ):
        software = {**dependent.RUN.software, "table for gdn_decode": "t.json", **launch}
        header = synthetic.run(software=software)
        found = [
            msgspec.structs.replace(r, choice=name) if isinstance(r, Cell) else r
            for r in dependent.swept()
        ]
        folder = synthetic.write(tmp_path / f"{name}{len(launch)}", header, found)
        text = report([folder]).markdown()
        assert said in text if said else "dependent launch" not in text.split("## ")[1]
