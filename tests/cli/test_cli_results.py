"""Commands on what a sweep left: report, table, replay, judge, compare, explain."""

import json
import lzma

import pytest
import synthetic
from commands import config, refused, run

from gdntune import kernels
from gdntune.device.arch import target
from gdntune.problem import Contract
from gdntune.report.report import report
from gdntune.results import table
from gdntune.results.records import Check, Trial


def test_report_forms(folder, tmp_path):
    """Markdown and CSV to standard output or a file, the terminal's tables by default."""
    made = report([folder])
    assert run("report", folder, "--format", "md").stdout == made.markdown()
    assert run("report", folder, "--format", "csv").stdout == made.csv()
    assert "18 of 18 cells" in run("report", folder).stdout
    for name, text in (("r.md", made.markdown()), ("r.csv", made.csv())):
        assert run("report", folder, "--out", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_text() == text
    assert run("report", folder, "--out", tmp_path / "r.txt", "--format", "csv").exit_code == 0
    assert refused(run("report", folder, "--out", tmp_path / "r.pdf"), "a file of md, csv or html")


def test_report_as_a_page(folder, tmp_path, monkeypatch):
    """HTML goes into the sweep's folder, or where --out says; never into the terminal. Of a journal
    that lies elsewhere it goes into the current folder.
    """
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("journal.jsonl", "table.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    page = report([copy]).html()
    done = run("report", copy, "--format", "html")
    assert done.stdout.strip() == str(copy / "report.html")
    assert (copy / "report.html").read_text(encoding="utf-8") == page
    assert run("report", copy, "--out", tmp_path / "r.html").exit_code == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == page
    (copy / "journal.jsonl").rename(tmp_path / "one.jsonl")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run("report", tmp_path / "one.jsonl", "--format", "html")
    assert (tmp_path / "here" / "one.html").exists() and not (tmp_path / "one.html").exists()


def test_report_against(folder):
    """Published figures stand in Markdown and the terminal; a CSV and an unknown name are refused."""
    name = "published:flashinfer-pr-3127"
    for options in (("--format", "md"), ()):
        assert (
            "NVIDIA B200, cold-dirty" in run("report", folder, "--against", name, *options).stdout
        )
    assert refused(
        run("report", folder, "--against", name, "--format", "csv"),
        "expected md, html or the terminal",
    )
    assert refused(run("report", folder, "--against", "flashinfer"), f"expected one of {name}")


def test_report_into_no_folder(folder):
    """An --out that cannot be written is one message."""
    assert refused(run("report", folder, "--out", "/proc/none/r.md"), "cannot be written")


def test_table_show(folder):
    """A table's rules, intervals and evidence; as JSON the table itself."""
    path = folder / "table.json"
    text = run("table", "show", path).stdout
    assert "T=1: gdn_decode, bf16 state" in text
    assert "1453 on" in text
    assert "STALE: recurrent" in text
    words = " ".join(text.split())
    assert "x floor: that time over the floor's" in words
    assert "`recurrent`, `tv` (tile_v): " in words or "recurrent, tv (tile_v): " in words
    assert "ithout dependent launch" not in words
    assert table.validate(run("table", "show", path, "--json").stdout.encode()) == table.load(path)


def test_table_validate(folder, tmp_path):
    """Valid tables exit with 0; one wrong one among them with 1; a missing file is wrong use."""
    good, bad = folder / "table.json", tmp_path / "bad.json"
    bad.write_text(good.read_text().replace('"from": 1453', '"from": 1454', 1))
    assert run("table", "validate", good).exit_code == 0
    result = run("table", "validate", good, bad, "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert (first["fault"], first["stale"]) == (None, ["recurrent"])
    assert "leaves a gap" in second["fault"]
    assert run("table", "validate", tmp_path / "none.json").exit_code == 2


def test_table_validate_reads_ids(folder, tmp_path):
    """Fault: a table whose ids say tv33 and whose knobs say 32 was valid. The refusal names both."""
    bad = tmp_path / "bad.json"
    bad.write_text(
        (folder / "table.json").read_text().replace("recurrent.tv32.", "recurrent.tv33.")
    )
    result = run("table", "validate", bad)
    assert result.exit_code == 1
    assert (
        "$.variants['recurrent.tv33." in result.stdout
        and "knobs are those of recurrent.tv32." in result.stdout
    )
    assert refused(
        run("explain", "--table", bad, "--work-units", 8), "knobs are those of recurrent.tv32."
    )


def test_a_file_that_is_no_run(tmp_path):
    """Fault: a CSV and a config given to `report` were journals with a line to cut out."""
    trace = tmp_path / "trace.csv"
    trace.write_text("batch,tokens\n1,1\n")
    for path in (trace, config(tmp_path)):
        assert refused(
            run("report", path),
            f"{path} is no journal",
            "expected a sweep's folder, its journal.jsonl",
        )


def test_tables_without_a_terminal(folder, tmp_path):
    """Fault: in a pipe ids were broken inside words, so that neither grep nor copying found them."""
    name = synthetic.VARIANTS[0].id
    long = f"{name}.vec8.ln16.th256.early.spread.heads.fence.sp2.run2.rg64"
    path, other = tmp_path / "t.json", tmp_path / "other"
    path.write_text((folder / "table.json").read_text().replace(f'"{name}"', f'"{long}"'))
    shown = run("table", "show", path).stdout.splitlines()
    evidence = [
        e
        for r in table.load(path).rules
        for i in r.intervals
        if i.variant == long
        for e in i.evidence
    ]
    assert len(evidence) == sum(long in line for line in shown) > 0
    header = synthetic.run()
    swapped = synthetic.write(other, header, synthetic.records(header, swap=1)) / "table.json"
    lines = run("table", "diff", path, swapped).stdout.splitlines()
    spans = [line for line in lines if line.startswith(synthetic.contracts()[1].key())]
    assert spans and all(line.split()[-1].isdecimal() or line.split()[-1] == "on" for line in spans)
    assert any(long in line for line in spans)
    judged = run("judge", folder, "--share", 0.5).stdout
    assert "each cell's winner from all samples but those judged by " in judged
    compared = run("compare", folder, other, "--cells").stdout
    assert f"{name} -> " in compared and max(map(len, compared.splitlines())) > 100


def test_replay(folder, tmp_path):
    """The table anew, in a line, as JSON or to a file."""
    out = tmp_path / "t.json"
    result = run("replay", folder, "--out", out)
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "synthetic, 2026-11-28T00:00:00+00:00: 6 rules, 12 intervals, 2 variants; regret"
    )
    assert table.validate(run("replay", folder, "--json").stdout.encode()) == table.load(out)
    assert refused(
        run("replay", folder, "--without-variants", "x"), "'x' fits none of the 4 variants"
    )


def test_judge(folder, tmp_path):
    """A table on its own journal loses nothing; on another what the limit says; the exit code is 1
    above it.
    """
    path = folder / "table.json"
    said = json.loads(run("judge", path, folder, "--json").stdout)
    assert (said["table"]["cells"], said["table"]["regret_max"]) == (18, 0)
    header = synthetic.run()
    other = synthetic.write(tmp_path, header, synthetic.records(header, swap=1))
    assert run("judge", path, other).exit_code == 0
    above = run("judge", path, other, "--limit", 0.03, "--mean-limit", 0.01, "--cells")
    assert above.exit_code == 1
    assert "18 cells are above the limit of 3.00%" in above.stderr
    assert "the mean regret is above the limit of 1.00%" in above.stderr
    assert "All cells" in above.stdout
    assert run("judge", path, other, "--limit", 0.5).exit_code == 0
    held = json.loads(run("judge", folder, "--hold-out", "every-second", "--json").stdout)
    assert held["table"]["cells"] == 6
    cost = json.loads(run("judge", folder, "--share", 0.5, "--json").stdout)
    assert cost["drawn"] <= cost["samples"] / 2
    assert "Successive halving would have drawn" in run("judge", folder, "--share", 0.5).stdout


def test_compare(folder, tmp_path):
    """A journal is the same as itself; a slower one is found, with exit code 1."""
    assert "18 TIE" in run("compare", folder, folder).stdout
    header = synthetic.run()
    slow = [
        r
        for p in {r.problem for r in synthetic.records(header) if isinstance(r, Trial)}
        for r in synthetic.cell(p, header, slow=1.1)
    ]
    checks = [r for r in synthetic.records(header) if isinstance(r, Check)]
    other = synthetic.write(tmp_path, header, [*checks, *slow], with_table=False)
    result = run("compare", folder, other, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["counts"] == {
        "FASTER": 0,
        "SLOWER": 18,
        "TIE": 0,
        "UNCLEAR": 0,
    }


@pytest.mark.parametrize(
    "command",
    [["report"], ["replay"], ["judge", "TABLE"], ["judge"], ["compare", "FOLDER"]],
    ids=" ".join,
)
def test_a_table_is_no_journal(folder, tmp_path, command):
    """Fault: a table where a journal is wanted was called a broken one, to be restored. It says
    which file to give.
    """
    path = folder / "table.json"
    words = [{"TABLE": path, "FOLDER": folder}.get(word, word) for word in command]
    assert refused(
        run(*words, path),
        f"{path} is a table, a journal is wanted: give {folder / 'journal.jsonl'}",
    )
    alone = tmp_path / "t.json"
    alone.write_bytes(path.read_bytes())
    assert refused(
        run(*words, alone),
        "is a table, a journal is wanted: give that of its sweep; `gdntune table show",
    )


def test_a_journal_is_no_table(folder, tmp_path):
    """Where a table is wanted, a journal and a folder are called what they are, and the way to a
    table is said.
    """
    path, packed = folder / "journal.jsonl", tmp_path / "j.jsonl.xz"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    for journal in (path, packed):
        assert refused(
            run("judge", journal, folder),
            f"is a journal, a table is wanted: `gdntune replay {journal} -o table.json`",
        )
    assert refused(
        run("judge", folder, folder),
        f"{folder} is a folder, a table is wanted: give the file, {folder / 'table.json'}",
    )


def test_nothing_to_report(tmp_path):
    """Fault: a run without a cell was reported in odd words. It is one message; where something
    failed, that is reported.
    """
    header = synthetic.run(peaks={})
    checks = [r for r in synthetic.records(header) if isinstance(r, Check)]
    for name, found in (("header", []), ("checks", checks)):
        empty = synthetic.write(tmp_path / name, header, found, with_table=False)
        for form in ("terminal", "md", "csv"):
            assert refused(
                run("report", empty, "--format", form),
                f"{empty}: no cell was timed yet",
                f"it is resumed: {header.command}",
            )
    (empty / "journal.jsonl").write_bytes(b"")
    assert refused(run("report", empty), "holds no whole line")
    wrong = Check(contract=checks[0].contract, variant="a", status="failed", reason="off by one")
    text = run(
        "report", synthetic.write(tmp_path / "wrong", header, [*checks, wrong], with_table=False)
    ).stdout
    assert "off by one" in text


def test_table_diff_and_merge(folder, tmp_path):
    """Equal tables exit with 0, others with 1; a merge of two ops has the rules of both; a conflict
    is refused.
    """
    path, both, other = folder / "table.json", tmp_path / "both.json", tmp_path / "other"
    assert run("table", "diff", path, path).exit_code == 0
    header = synthetic.run()
    conflicting = synthetic.write(other, header, synthetic.records(header, swap=1)) / "table.json"
    result = run("table", "diff", path, conflicting)
    assert (result.exit_code, "12 spans" in result.stdout) == (1, True)
    assert (
        json.loads(run("table", "diff", path, conflicting, "--json").stdout)["choices"][0]["first"]
        == 1
    )
    assert refused(run("table", "merge", path, conflicting, "--out", both), "--prefer first")
    assert not both.exists()
    assert run("table", "merge", path, conflicting, "-o", both, "--prefer", "second").exit_code == 0
    assert table.load(both).rules == table.load(conflicting).rules


def test_explain_a_table(folder):
    """A given table's choice and its reason, in words and as JSON."""
    path = folder / "table.json"
    said = json.loads(
        run(
            "explain", "--table", path, "--B", 8, "--HV", 64, "--state-dtype", "fp32", "--json"
        ).stdout
    )
    assert (said["variant"], said["match"], said["work_units"]) == (
        synthetic.VARIANTS[0].id,
        "exact",
        512,
    )
    assert said["table"] == str(path)
    text = run("explain", "--table", path, "--work-units", 5000, "--tokens", 3).stdout
    assert synthetic.VARIANTS[2].id in text
    assert "nearest rule, which differs in tokens" in text


def test_explain_a_table_without_a_rule(folder):
    """Fault: where a given table has no rule for an op, the default was said to be used, and not
    which variant that is.
    """
    path = folder / "table.json"
    words = ("--B", 4, "--HV", 8, "--op", "kda_decode", "--table", path)
    contract = Contract(op="kda_decode", gate="softplus")  # the gate that --help names
    default = kernels.default(contract, 32, target("sm_90a"))
    said = json.loads(run("explain", *words, "--json").stdout)
    assert said["contract"] == contract.key()
    assert (said["match"], said["variant"], said["kernel"]) == ("none", default.id, default.kernel)
    text = run("explain", *words).stdout
    assert f"variant: {default.id}\n" in text
    assert "no rule for op=kda_decode" in text and "the kernel's default is used" in text
