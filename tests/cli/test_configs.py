"""`gdntune configs`, `config`, `sweep --dry-run` and its overrides, `table install` and `which`."""

import json
import re
import sys
from pathlib import Path

import platformdirs
import pytest
from typer.core import TyperOption
from typer.main import get_command
from typer.testing import CliRunner

from gdntune import search
from gdntune.cli.app import app
from gdntune.cli.common import busy, target_of
from gdntune.cli.configs import configs_
from gdntune.cli.doctor import put_to_use
from gdntune.cli.install import table_which
from gdntune.device import gpus
from gdntune.errors import UnknownName

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tables" / "nvidia-h100-80gb-hbm3"


def run(*arguments):
    """The command line, in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_configs_and_show(tmp_path):
    """Every name that is listed can be shown, and what is shown can be swept."""
    rows = json.loads(run("configs", "--json").stdout)
    names = [row["name"] for row in rows]
    assert {"quickstart", "kimi-k3", "qwen3.5-4b", "qwen3.8-27b"} <= set(names)
    for name in ("quickstart", "kimi-k3"):
        out = tmp_path / f"{name}.yaml"
        assert run("config", "show", name, "-o", out).exit_code == 0
        shown = run("sweep", out, "--dry-run", "--device", "cpu", "--batch", "1")
        assert shown.exit_code == 0 and " cells of " in shown.stdout


def test_from_hf(tmp_path):
    """A config.json becomes a config; another model's is refused."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"linear_num_key_heads": 16, "linear_num_value_heads": 48}))
    made = run("config", "from-hf", file, "--name", "mine")
    assert made.exit_code == 0 and "model: {H: 16, HV: 48, K: 128, V: 128}" in made.stdout
    file.write_text(json.dumps({"linear_num_key_heads": 16, "linear_key_head_dim": 80}))
    assert run("config", "from-hf", file).exit_code == 2
    file.write_text("{}")
    assert run("config", "from-hf", file).exit_code == 2


def test_dry_run_writes_nothing(tmp_path, monkeypatch):
    """--dry-run says cells, variants, objects and minutes, and sweeps nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "sweep", lambda *_, **__: 1 / 0)
    said = run("sweep", "quickstart", "--dry-run", "--device", "cpu", "--json", "--batch", "1,4")
    found = json.loads(said.stdout)
    assert found["config"] == "quickstart.b1-4" and found["cells"] == 8
    assert 0 < found["minutes"] < 60 and found["missing"] <= found["objects"]
    assert list(tmp_path.iterdir()) == []


def test_arch_is_a_gpus_name_too(tmp_path):
    """`--arch` takes a GPU's name wherever it takes an arch; a sweep takes it with --dry-run
    alone. A slice of a card is not the card.
    """
    asked = ("quickstart", "--batch", "1", "--json")
    h20 = json.loads(run("sweep", *asked, "--dry-run", "--arch", "h20").stdout)["device"]
    assert (h20["name"], h20["arch"], h20["sm_count"]) == ("NVIDIA H20", "sm_90a", 78)
    assert target_of("H100 PCIe").peak_gb_s == 2039.0 and target_of("sm_100a").sm_count == 148
    timed = run("sweep", *asked, "--arch", "h20", "--out", tmp_path / "x")
    assert timed.exit_code == 2 and "add --dry-run" in timed.stderr
    with pytest.raises(UnknownName, match="no arch is called 'sm_91'"):
        target_of("sm_91")
    with pytest.raises(UnknownName, match="no GPU is known as 'H100 MIG 1g.10gb'"):
        target_of("H100 MIG 1g.10gb")


@pytest.mark.parametrize(
    "option, said",
    [
        (("--batch", "0"), "--batch '0': expected whole numbers"),
        (("--batch", "1,1"), "each once"),
        (("--tokens", "x"), "--tokens 'x'"),
        (("--heads", "3,4"), "HV a multiple of H"),
        (("--heads", "4"), "expected H,HV"),
        (("--batch", str(2**63)), "whole numbers from 1 to 2147483647"),
        (("--batch", "9" * 5000), "whole numbers from 1 to 2147483647"),
        (("--tokens", "17"), "whole numbers from 1 to 16"),
        (("--heads", f"4,{2**40}"), "whole numbers from 1 to 2147483647"),
    ],
)
def test_refused_overrides(option, said):
    """A wrong override is one message and exit code 2. Fault: sizes of 64 bits and more were taken,
    and 17 tokens, which no kernel has.
    """
    result = run("sweep", "quickstart", "--dry-run", "--device", "cpu", *option)
    assert result.exit_code == 2 and said in result.stderr


def test_install(tmp_path, monkeypatch):
    """A table goes where the runtime looks, for each of its ops; one that was there is kept."""
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda _: str(tmp_path / "data"))
    source = TABLES / "gdn_decode.json"
    target = tmp_path / "data" / "tables" / TABLES.name / "gdn_decode.json"
    assert run("table", "install", source).exit_code == 0
    assert target.read_bytes() == source.read_bytes()
    again = run("table", "install", source)
    assert again.exit_code == 0 and target.with_name("gdn_decode.json.before").exists()
    (tmp_path / "empty").mkdir()
    refused = run("table", "install", tmp_path / "empty")
    assert refused.exit_code == 2 and "has no table.json" in refused.stderr


def test_which(tmp_path, monkeypatch):
    """A GPU's own table is named plainly; one of another memory class with a warning."""
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda _: str(tmp_path))
    own = run("table", "which", "--gpu", "NVIDIA H100 80GB HBM3").stdout
    assert "shipped for NVIDIA H100 80GB HBM3\n" in own and "GDDR" not in own
    other = json.loads(run("table", "which", "--gpu", "l40s", "--json").stdout)
    assert "which has HBM and not GDDR" in str(other["tables"][0]["warnings"])
    assert run("table", "which", "--gpu", "h100").exit_code == 2


def test_gpus_by_name():
    """Each is found by its whole name, and has a datasheet's bandwidth."""
    for name in gpus.GPUS:
        found = gpus.named(name)
        assert found.name == name and found.peak_gb_s
    assert gpus.named("H20").sm_count == 78
    with pytest.raises(UnknownName, match="no GPU is known as 'h100' .it may be NVIDIA H100 PCIe"):
        gpus.named("h100")


def test_help_reflows():
    """Fault: lines of a docstring that were wrapped at 100 columns were wrapped again at 80."""
    shown = CliRunner().invoke(app, ["sweep", "--help"], env={"COLUMNS": "80"}).output
    text = [line.strip() for line in shown.split("Arguments")[0].splitlines()]
    words = [line for line in text if line and not line.startswith("Usage")]
    assert words and all(len(line) > 50 for line in words[:1] + words[2:3]), words


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_lines_hang(monkeypatch, capsys, is_terminal):
    """Fault: warnings of `table which` and descriptions of `configs` ran over the edge of a terminal
    and went on at its first column. Piped, a line stays one.
    """
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    configs_(as_json=False)
    table_which(gpu="L40S", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert ("qwen3.5-397b-a17b    Qwen3.5-397B-A17B, gated delta rule decode, T=1 to 8") in lines
    if is_terminal:
        assert max(len(line) for line in lines if "/" not in line) <= 80
        assert " " * 21 + "them" in lines
    else:
        assert sum(line.startswith("    WARNING: ") for line in lines) == 6 and " them" not in lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sign_of_life(monkeypatch, capsys, is_terminal):
    """Fault: `gdntune report` of a long journal printed nothing for as long as it took."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with busy("reading"):
        pass
    shown = capsys.readouterr()
    assert shown.out == "" and ("reading" in shown.err) == is_terminal


def commands(command, path=()):
    """Every command of the program with its path."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


def test_help_of_every_command():
    """Flags show no type, a choice is not broken, and no line is longer than the terminal. Fault:
    `--help <bool>` stood in every page, and `<auto|cupti|events|cpu|grap` over `h>`.
    """
    found = dict(commands(get_command(app)))
    assert len(found) > 20
    for path, command in found.items():
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
        assert "<bool>" not in shown and max(map(len, shown.splitlines())) <= 80, path
        for param in command.params:
            for choice in param.type_descriptor.choices or ():
                assert re.search(rf"(?<![\w-]){re.escape(str(choice))}(?![\w-])", shown), (
                    path,
                    choice,
                )


def test_help_with_an_older_typer(monkeypatch):
    """Every command, not help alone, ended with a traceback where typer lacks `display_type_rich`."""
    for owner in TyperOption.__mro__:
        if "display_type_rich" in vars(owner):
            monkeypatch.delattr(owner, "display_type_rich")
    command = get_command(app).commands["sweep"]
    with command.make_context("sweep", ["quickstart"], resilient_parsing=True) as ctx:
        by_name = {p.name: p.metavar for p in command.get_params(ctx)}
    assert by_name["dry_run"] == "" and by_name["timer"] is None


def test_install_on_a_full_disk(tmp_path, monkeypatch):
    """Fault: a full disk left half a copy of the table that was there, and an error without a path."""
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda _: str(tmp_path / "data"))
    source = TABLES / "gdn_decode.json"
    target = tmp_path / "data" / "tables" / TABLES.name / "gdn_decode.json"
    assert run("table", "install", source).exit_code == 0
    before = target.with_name("gdn_decode.json.before")
    before.symlink_to("/dev/full")
    refused = run("table", "install", source)
    assert refused.exit_code == 2 and before.is_symlink()
    assert f"gdntune: {before}: No space left" in refused.stderr
    assert target.read_bytes() == source.read_bytes()


def test_install_without_a_home(tmp_path, monkeypatch):
    """Fault: a user without a home was told that /dev/null/tables is not a directory; one whose home
    cannot be written, no variable to set.
    """

    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    source = TABLES / "gdn_decode.json"
    (tmp_path / "file").touch()
    for data, said in (
        (homeless, "gdntune: this user has no home folder: set GDNTUNE_TABLE="),
        (lambda _: str(tmp_path / "file"), "Not a directory"),
    ):
        monkeypatch.setattr(platformdirs, "user_data_dir", data)
        refused = run("table", "install", source)
        assert refused.exit_code == 2 and said in refused.stderr
        assert f"GDNTUNE_TABLE={source}" in refused.stderr
    monkeypatch.setattr(platformdirs, "user_data_dir", homeless)
    words = put_to_use("t.json")
    assert words.startswith("set GDNTUNE_TABLE=t.json, or call")
