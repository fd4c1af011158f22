"""gdntune/cli.py: every command has help, wrong use is one message and exit code 2, and the main
job runs whole.
"""

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import synthetic
import typer
import typer.main
import yaml
from typer.testing import CliRunner

from gdntune import __version__, kernels, search
from gdntune.cli import common as cli_common
from gdntune.cli.app import app
from gdntune.cli.progress import Lines
from gdntune.device import arch
from gdntune.device import cupti as cupti_records
from gdntune.device.arch import target
from gdntune.errors import ToolMissing
from gdntune.objects import build
from gdntune.problem import Contract
from gdntune.report.report import report
from gdntune.results import table
from gdntune.results.journal import Check, Trial

ROOT = Path(__file__).parents[2]
TINY = {
    "name": "tiny",
    "device": "cpu",
    "model": {"H": 2, "HV": 4, "K": 128, "V": 128},
    "batch": [1, 8],
    "contracts": [{"op": "gdn_decode", "state_dtype": "fp32"}],
    "policy": {"timer": "auto", "l2": "warm"},
    "search": {"screen_rounds": 2, "keep": 2, "final_rounds": 5, "max_cell_seconds": 2},
}


def commands(command=None, path=()):
    """Every command of the line and its path, groups included."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def run(*arguments, **options):
    """The command line, in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


def spawn(*arguments, **environment):
    """The command line in a process of its own, by this Python's path, with no environment
    activated.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "gdntune", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=120,
    )


def config(folder, **changes):
    """A file of the tiny config with some keys changed."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A made-up sweep's folder."""
    header = synthetic.run()
    return synthetic.write(tmp_path_factory.mktemp("sweep"), header, synthetic.records(header))


def refused(result, *parts):
    """Whether a run ended with one message that says all `parts`, without a traceback, and exit
    code 2.
    """
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    # a sweep says its size before
    assert re.search("^gdntune: ", result.stderr, re.MULTILINE)
    for part in parts:
        assert part in result.stderr
    return True


# -- help


@pytest.mark.parametrize(
    "path", [path for path, _ in commands()], ids=lambda p: " ".join(p) or "gdntune"
)
def test_every_command_has_help(path):
    """Each command says what it does, and each of its options and arguments what it is for."""
    command = dict(commands())[path]
    assert command.help, path
    assert [p.name for p in command.params if not getattr(p, "help", None)] == []
    shown = run(*path, "--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.output


def test_commands():
    """The commands are those that the design names, and each stands in docs/reference.md."""
    names = {
        " ".join(path)
        for path, command in commands()
        if path and not getattr(command, "commands", None)
    }
    assert names == {
        "sweep", "bench", "compile", "report", "explain", "doctor", "replay", "judge", "compare", "expect",
        "table show", "table validate", "table diff", "table merge", "table install", "table which",
        "configs", "config show", "config from-hf",
    }  # fmt: skip
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in names if f"### `gdntune {name}" not in reference] == []


def test_version():
    """--version prints the version and nothing else."""
    assert run("--version").output == f"{__version__}\n"


# -- wrong use


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"batchs": [1]}, ["$ has the unknown key `batchs`", "did you mean `batch`"]),
        ({"batch": "many"}, ["$.batch", "many", "a list"]),
        ({"tokens": [0]}, ["$.tokens[0]", "is 0"]),
        ({"model": {"H": 4, "HV": 6}}, ["$.model.HV", "not a multiple of H=4"]),
        ({"device": "tpu"}, ["$.device", "auto, cpu, cuda"]),
    ],
    ids=["unknown key", "wrong type", "T=0", "HV not a multiple of H", "unknown device"],
)
@pytest.mark.parametrize("command", ["sweep", "compile"])
def test_malformed_config(tmp_path, monkeypatch, command, changes, parts):
    """A malformed config is one message with file, path, value and what is expected; nothing is
    written.
    """
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, **changes)
    extra = ("--arch", "cpu") if command == "compile" else ()
    assert refused(run(command, path, *extra), str(path), *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("command", ["sweep", "bench", "compile"])
def test_knobs_that_no_variant_has(tmp_path, monkeypatch, command):
    """Fault: kernels, knobs and values that are not there were found by no command but `sweep`,
    values by none.
    """
    monkeypatch.chdir(tmp_path)
    extra = ("--arch", "cpu") if command == "compile" else ("--device", "cpu")
    for wanted, said in (
        (
            {"recurrent": {"lanes": [7]}},
            "$.kernels.recurrent.lanes lists 7, which no legal variant has",
        ),
        (
            {"cpu_recurrent": {"tile_v": [16, 24]}},
            "tile_v lists 24, which no legal variant has at the contracts: expected one of 16, 32",
        ),
        ({"cpu_recurent": {}}, "unknown key `cpu_recurent` (did you mean `cpu_recurrent`?)"),
    ):
        assert refused(run(command, config(tmp_path, kernels=wanted), *extra), said)
    # the values of a part that is left out count: they are of the same file
    parts = [{"name": "one"}, {"name": "four", "tokens": [4]}]
    path = config(
        tmp_path, kernels={"recurrent": {"heads": [True]}, "cpu_recurrent": {}}, parts=parts
    )
    monkeypatch.setattr(search, "sweep", lambda *_, **__: 1 / 0)
    assert isinstance(
        run("sweep", path, "--part", "four", "--device", "cpu").exception, ZeroDivisionError
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("name", ["nothing.yaml", "nothing", "configs"])
def test_config_that_is_not_there(tmp_path, monkeypatch, name):
    """A config that is no file is refused with what is expected."""
    monkeypatch.chdir(tmp_path)
    assert refused(run("sweep", name), name, "expected" if name != "nothing.yaml" else "")


@pytest.mark.parametrize("name", ["quickstart", "qwen3.5-397b-a17b"])
def test_shipped_configs_go_by_name(monkeypatch, name):
    """`gdntune sweep quickstart` is the shipped config, wherever one stands; a name may have a dot."""
    seen = {}
    monkeypatch.setattr(
        search,
        "sweep",
        lambda config, folder, **_: seen.update(name=config.name, folder=folder) or 1 / 0,
    )
    assert isinstance(run("sweep", name, "--device", "cpu").exception, ZeroDivisionError)
    assert seen == {"name": name, "folder": Path("results") / name}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"schema": "gdntune.table/2"}'],
    ids=["empty", "torn", "list", "version"],
)
def test_malformed_table(tmp_path, content):
    """A malformed table: `table validate` finds it, the others refuse it."""
    path = tmp_path / "t.json"
    path.write_text(content)
    assert refused(run("table", "show", path), str(path))
    assert refused(run("explain", "--table", path, "--work-units", 8), str(path))
    found = run("table", "validate", path)
    assert (found.exit_code, found.stderr) == (1, "")
    assert found.stdout.startswith(str(path))


def test_malformed_journal(tmp_path):
    """A journal with a broken line is refused with the line's number."""
    header = synthetic.run()
    folder = synthetic.write(tmp_path, header, synthetic.records(header))
    lines = (folder / "journal.jsonl").read_text().splitlines()
    (folder / "journal.jsonl").write_text(
        "\n".join([*lines[:3], '{"kind": "trial"', *lines[3:], ""])
    )
    assert refused(run("report", folder), "line 4")


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["explain", "--B", "4"], "--work-units N, or --B and --HV"),
        (["explain", "--work-units", "8", "--B", "4"], "give one or the other"),
        (["explain", "--work-units", "0", "--device", "cpu"], "expected an integer from 1"),
        (["explain", "--work-units", "8", "--tokens", "99"], "expected 1 to"),
        (["explain", "--work-units", "8", "--gate", "softplus"], "expected one of raw, log"),
        (["report", "/nowhere"], "expected a sweep's folder"),
        (["compile", "quickstart", "--arch", "sm_1"], "sm_90a"),
        (["replay", "/nowhere"], "expected a sweep's folder"),
        (["judge", "/nowhere"], "expected a sweep's folder"),
        (["judge", "a", "b", "--share", "0.25"], "expected TABLE JOURNAL, JOURNAL alone"),
        (["judge", "a", "--share", "0.25", "--hold-out", "every-second"], "give one or the other"),
        (["compare", "/nowhere", "/nowhere"], "expected a sweep's folder"),
        (["table", "diff", "/nowhere", "/nowhere"], "/nowhere"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_arguments(arguments, part):
    """What does not fit together is refused with what is expected."""
    assert refused(run(*arguments), part)


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep"],
        ["nothing"],
        ["sweep", "quickstart", "--l2", "hot"],
        ["compile", "quickstart"],
        ["sweep", "quickstart", "--jobs", "0"],
    ],
)
def test_wrong_options(arguments):
    """An unknown command, a missing argument and a value that is not accepted exit with 2."""
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["sweep", "bench", "compile"])
def test_a_config_of_a_near_name(command):
    """Fault: a shipped config's name with a letter missing was refused without saying which was
    meant.
    """
    extra = ("--arch", "cpu") if command == "compile" else ()
    assert refused(
        run(command, "quickstar", *extra),
        "quickstar: no such file or named config (did you mean `quickstart`?)",
    )


def test_cuda_that_is_not_there(monkeypatch, tmp_path):
    """A config for CUDA on a machine without it says what is missing and what to do."""
    monkeypatch.setattr(arch, "cuda_fault", lambda index=0: "no CUDA device: torch finds none")
    assert refused(
        run("sweep", config(tmp_path, device="cuda"), "--out", tmp_path / "out"),
        "no CUDA device: torch finds none, or use the CPU (device: cpu in a config, --device cpu on the command line)",
    )
    assert not (tmp_path / "out").exists()


def test_a_timer_that_the_device_cannot_have(tmp_path):
    """CUPTI on a CPU is refused before anything is written."""
    result = spawn("sweep", config(tmp_path), "--timer", "cupti", "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert "expected one of auto, cpu" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "journal.jsonl").exists()


def test_missing_cupti_permission(monkeypatch, tmp_path):
    """Where CUPTI refuses, `--timer cupti` is one message with the remedy; `auto` times by events
    and says so.
    """
    fault = "CUPTI cannot be used (INSUFFICIENT_PRIVILEGES); load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    device = target("sm_90a")
    monkeypatch.setattr(arch, "detect", lambda kind="auto", index=0: device)
    monkeypatch.setattr(cupti_records, "fault", lambda: fault)
    header = synthetic.run(policy={"timer": "events", "l2": "cold-clean"})

    def sweep(config, folder, *, device, policy, **_):
        _, note = policy.resolve(device)
        found = synthetic.records(header)
        synthetic.write(folder, header, found)
        return search.Outcome(table.load(folder / "table.json"), header, found, [note])

    monkeypatch.setattr(search, "sweep", sweep)
    assert refused(
        run("sweep", "quickstart", "--timer", "cupti", "--out", tmp_path / "a"),
        "NVreg_Restrict",
        "--timer events",
    )
    assert not (tmp_path / "a").exists()
    result = run("sweep", "quickstart", "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "timed by CUDA events" in result.stdout
    assert "NVreg_RestrictProfilingToAdminUsers=0" in result.stdout


def test_a_tool_that_is_missing(monkeypatch, tmp_path):
    """What a sweep finds missing on its way is one message too."""

    def sweep(*_, **__):
        raise ToolMissing("no g++: apt install g++")

    monkeypatch.setattr(search, "sweep", sweep)
    assert refused(
        run("sweep", "quickstart", "--device", "cpu", "--out", tmp_path), "apt install g++"
    )


def test_interrupted(monkeypatch, tmp_path):
    """Ctrl-C is no traceback, and says that the sweep can go on."""

    def sweep(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "sweep", sweep)
    result = run("sweep", "quickstart", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 130
    # Fault: it stood behind the ^C and the bar
    assert "\ngdntune: interrupted; what was journalled stays" in result.stderr


# -- what commands print


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
    default = kernels.default(Contract(op="kda_decode", gate="log"), 32, target("sm_90a"))
    said = json.loads(run("explain", *words, "--json").stdout)
    assert (said["match"], said["variant"], said["kernel"]) == ("none", default.id, default.kernel)
    text = run("explain", *words).stdout
    assert f"variant: {default.id}\n" in text
    assert "no rule for op=kda_decode" in text and "the kernel's default is used" in text


def test_doctor():
    """The doctor's findings, in words and as JSON; the exit code says whether a sweep can run."""
    result = run("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == int(any(f["status"] == "hinders" for f in findings))
    words = run("doctor")
    assert words.exit_code == result.exit_code
    assert all(f["name"] in words.stdout for f in findings)


def test_progress_without_a_terminal(capsys):
    """A stage is one line when it has ended, an empty one none."""
    lines = Lines()
    lines.start("compile", 2)
    lines.step()
    lines.step()
    lines.end()
    lines.start("check", 0)
    lines.end()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("compile: 2 of 2 in ")
    assert captured.err.count("\n") == 1


# -- the main job


def test_sweep_end_to_end(tmp_path):
    """A tiny sweep on this CPU's real kernels, by `python -m gdntune`, unactivated and with nothing
    but the system's compiler on PATH.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("g++", "gcc", "as", "ld", "cc1plus", "collect2", "cp"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    out = tmp_path / "out"
    result = spawn("sweep", config(tmp_path), "--out", out, "--json", PATH=str(tools))
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["chosen"], said["cells"]) == (2, 2)
    assert sorted(p.name for p in out.iterdir() if p.suffix in (".json", ".jsonl", ".md", ".csv", ".html")) == [
        "journal.jsonl", "report.csv", "report.html", "report.md", "table.json",
    ]  # fmt: skip
    assert "compile: " in result.stderr
    frame = pd.read_csv(out / "report.csv")
    assert set(frame[frame["chosen"]]["verified"]) == {"ok"}
    assert "2 of 2 cells" in " ".join((out / "report.md").read_text().split())
    validated = run("table", "validate", out / "table.json").stdout
    assert validated.startswith(f"{out / 'table.json'}: valid")
    # Again: nothing is left to do, once no cell is marked by what else this machine did.
    journal = out / "journal.jsonl"
    quiet = re.sub(rb'"reason":"noisy: [^"]*"', b'"reason":""', journal.read_bytes())
    journal.write_bytes(quiet)
    assert spawn("sweep", config(tmp_path), "--out", out).returncode == 0
    assert journal.read_bytes() == quiet
    assert run("replay", out, "-o", tmp_path / "again.json").exit_code == 0
    assert (tmp_path / "again.json").read_bytes() == (out / "table.json").read_bytes()
    made = report([out])
    assert (out / "report.md").read_text() == made.markdown()
    assert (out / "report.csv").read_text() == made.csv()


PARTS = {
    "kernels": {"cpu_recurrent": {"tile_v": [32], "ilp": [2], "vec": [8]}},
    "parts": [
        {"name": "one", "batch": [1]},
        {"name": "two", "contracts": [{"state_dtype": "bf16"}]},
    ],
}


def test_a_file_where_a_folder_is_wanted(folder, tmp_path, monkeypatch):
    """Fault: a bundle's place that is a file was found after compiling, and called `File exists`."""
    monkeypatch.setattr(build, "compile_objects", lambda *_, **__: pytest.fail("compiled"))
    path = tmp_path / "file"
    path.write_text("x")
    words = ("compile", config(tmp_path), "--arch", "cpu", "--bundle")
    assert refused(run(*words, path), f"--bundle {path}: it is a file, and a folder is wanted")
    assert refused(
        run(*words, path / "below"),
        f"--bundle {path / 'below'}: {path} is a file, and a folder is wanted",
    )
    said = run("report", folder, "--format", "kernel-tuner", "--out", path)
    assert refused(said, f"--out {path}: cannot be written: it is a file, and a folder is wanted")


def test_compile_parts(tmp_path):
    """`--part` compiles what those parts need; each part's cells and objects, and the bundle's
    size, are told.
    """
    path = config(tmp_path, **PARTS)
    bundle = tmp_path / "bundle"
    said = json.loads(
        run("compile", path, "--arch", "cpu", "--part", "t*", "--bundle", bundle, "--json").stdout
    )
    assert said["config"] == "tiny.t"
    assert said["parts"] == [
        {"name": "two", "contracts": 1, "cells": 2, "objects": said["objects"]}
    ]
    assert said["bundle_bytes"] == sum(p.stat().st_size for p in bundle.iterdir())
    assert {m["spec"]["facts"]["state_dtype"] for m in said["manifests"]} == {"bf16"}
    text = run("compile", path, "--arch", "cpu", "--part", "two", "--bundle", bundle).stdout
    assert f"part two: 1 contracts, 2 cells, {said['objects']} objects\n" in text
    assert text.endswith(f"bundle: {bundle}, {said['bundle_bytes']:,} bytes\n")


@pytest.mark.parametrize("command", ["sweep", "bench", "compile"])
def test_no_such_part(tmp_path, monkeypatch, command):
    """A part that is not there is refused with those that are, before anything is written."""
    monkeypatch.chdir(tmp_path)
    extra = ("--arch", "cpu") if command == "compile" else ()
    path = config(tmp_path, **PARTS)
    assert refused(
        run(command, path, "--part", "tow", *extra),
        "tiny has no part 'tow' (did you mean `two`?)",
        "one, two",
    )
    assert refused(
        run(command, config(tmp_path), "--part", "two", *extra),
        "tiny has no part 'two': it has no parts",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


def test_no_compiler(tmp_path):
    """Without g++ a sweep says so in one message that names the package, with exit code 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    result = spawn(
        "sweep",
        config(tmp_path),
        "--out",
        out,
        PATH=str(empty),
        GDNTUNE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 2, result.stderr
    assert "g++" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (out / "table.json").exists()


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    """Fault: a bundle or page in a place that cannot be written ended in a traceback; a closed pipe
    is no such place.
    """
    (tmp_path / "file").write_text("x")
    command = cli_common.refusing(lambda path: (path / "page.md").write_text("x"))
    with pytest.raises(typer.Exit) as ended:
        command(tmp_path / "file")
    assert ended.value.exit_code == 2
    assert (
        str(tmp_path / "file" / "page.md") in (said := capsys.readouterr().err)
        and "name a place" in said
    )

    def closed():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cli_common.refusing(closed)()
