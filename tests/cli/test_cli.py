"""gdntune/cli.py: every command has help, wrong use is one message and exit code 2, and the main
job runs whole.
"""

import json
from pathlib import Path

import pytest
import synthetic
import typer
import typer.main
from commands import ROOT, config, refused, run

from gdntune import __version__, search
from gdntune.cli.app import app
from gdntune.errors import GdntuneError


def commands(command=None, path=()):
    """Every command of the line and its path, groups included."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


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
        "table show", "table validate", "table diff", "table merge", "table install", "table which", "table export",
        "configs", "config show", "config from-hf",
    }  # fmt: skip
    reference = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in names if f"### `gdntune {name}" not in reference] == []


def test_version():
    """--version prints the version and nothing else."""
    assert run("--version").output == f"{__version__}\n"


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
        (
            ["explain", "--work-units", "8", "--device", "cpu", "--index", "1"],
            "--index 1 with --device cpu: leave --index out",
        ),
        (
            ["explain", "--work-units", "8", "--table", "t.json", "--index", "1"],
            "--index 1 with --table t.json: leave --index out",
        ),
        (
            ["explain", "--work-units", "8", "--accept-rate", "0.5"],
            "--accept-rate with --op gdn_decode: expected --op verify",
        ),
        (["explain", "--work-units", "8", "--layers", "3"], "--layers with --op gdn_decode"),
        (
            ["explain", "--work-units", "8", "--op", "verify", "--dependent-launch"],
            "--dependent-launch with --op verify: leave it out",
        ),
        (["report", "/nowhere"], "expected a sweep's folder"),
        (["compile", "quickstart", "--arch", "sm_1"], "sm_90a"),
        (
            ["compile", "quickstart", "--arch", "cpu", "--no-dependent-launch"],
            "--no-dependent-launch without --table or --bench",
        ),
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


def test_a_file_that_is_no_config(tmp_path):
    """Faults: an empty file was called `$`, and of a folder its own name was proposed."""
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert refused(run("sweep", tmp_path / "empty.yaml"), "empty.yaml: it is empty", "config show")
    (tmp_path / "own.yaml").mkdir()
    result = run("sweep", tmp_path / "own.yaml")
    assert refused(result, "own.yaml: Is a directory") and "did you mean" not in result.stderr


def test_help_shows_patterns():
    """Fault: help is Markdown, so the asterisks of a pattern were taken for emphasis."""
    assert "*.tv8.*" in run("replay", "--help").output
    assert "verify-*" in run("sweep", "--help").output


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


@pytest.mark.parametrize("command", ["sweep", "bench"])
def test_sizes_instead_of_the_configs(monkeypatch, command):
    """Fault: a bench took no --batch, --tokens and --heads, which a sweep does."""
    seen = []

    def stop(wanted, *_, **__):
        seen.append(wanted)
        raise GdntuneError("seen")

    module = {"sweep": "gdntune.search.sweep", "bench": "gdntune.tuning.bench.bench"}[command]
    monkeypatch.setattr(module, stop)
    sizes = ("--batch", "2,3", "--tokens", "1", "--heads", "1,2")
    assert "seen" in run(command, "quickstart", "--device", "cpu", *sizes).stderr
    problems = seen[0].all_problems()
    assert {(p.B, p.contract.tokens, p.H, p.HV) for p in problems} == {(2, 1, 1, 2), (3, 1, 1, 2)}


def test_doctor():
    """The doctor's findings, in words and as JSON; the exit code says whether a sweep can run."""
    result = run("doctor", "--json")
    findings = json.loads(result.stdout)
    assert result.exit_code == int(any(f["status"] == "hinders" for f in findings))
    words = run("doctor")
    assert words.exit_code == result.exit_code
    assert all(f["name"] in words.stdout for f in findings)
