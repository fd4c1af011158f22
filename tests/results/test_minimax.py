"""gdntune/results/minimax.py: one table of several cards, least worst regret."""

import json

import msgspec
import pytest
import synthetic
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.errors import JournalError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results import table
from gdntune.results.journal import FILE, encode
from gdntune.results.records import Cell, Check, Trial
from gdntune.results.minimax import minimax

RUN = synthetic.run(kernels={"recurrent": "f1"}, regret=0.01)
CONTRACT = Contract()


def card(folder, header=RUN, only=(), **cells):
    """A journal whose cells, `b8=...` by their work units, have final samples with these means."""
    found = [Check(contract=CONTRACT, variant=name, status="ok") for name in "abc"]
    for units, means in cells.items():
        problem = Problem(CONTRACT, int(units[1:]), 1, 1)
        for stage in ("screen", "final"):
            for name, us in means.items():
                if stage == "final" and only and name not in only:
                    continue
                variant = Variant("recurrent", name, {"tile_v": ord(name)})
                found.append(Trial(problem=problem, variant=variant, stage=stage, status="ok", samples_us=[us] * 20))
        found.append(Cell(problem=problem, status="ok"))
    folder.mkdir()
    (folder / FILE).write_bytes(b"".join(map(encode, (header, *found))))
    return folder


def chosen(found):
    return [(i.first, i.last, i.variant) for i in found.table.rules[0].intervals]


def test_the_least_worst_regret(tmp_path):
    """Fault: a table of one card chose what took up to 4.5% longer on another of its model. What
    loses 1% on both is better than what loses nothing on one and 10% on the other.
    """
    one = card(tmp_path / "one", b8={"a": 100.0, "b": 102.0, "c": 115.0})
    two = card(tmp_path / "two", b8={"a": 110.0, "b": 102.0, "c": 100.0})
    found = minimax([one, two])
    assert chosen(found) == [(1, None, "b")]
    (evidence,) = found.table.rules[0].intervals[0].evidence
    assert evidence.regret == pytest.approx(0.02) and found.table.evidence.regret_max == 0.02
    assert len(found.table.evidence.sources) == 2
    assert minimax([one]).table.rules[0].intervals[0].variant == "a"


def test_cells_of_one_card_alone(tmp_path):
    """They have its own choice, and that is said; a variant that a card never timed is none."""
    one = card(tmp_path / "one", b8={"a": 100.0, "b": 105.0}, b4096={"a": 500.0, "b": 400.0})
    two = card(tmp_path / "two", b8={"b": 102.0, "c": 90.0})
    found = minimax([one, two])
    assert [variant for *_, variant in chosen(found)] == ["b"]
    assert "1 cell was timed on one card alone" in found.notes


def test_a_screen_judges_where_there_are_no_final_samples(tmp_path):
    """A leader of one card that the other halved away early is judged by its first samples there."""
    one = card(tmp_path / "one", b8={"a": 100.0, "b": 101.5})
    two = card(tmp_path / "two", b8={"a": 130.0, "b": 100.0}, only=("b",))
    assert chosen(minimax([one, two])) == [(1, None, "b")]


def test_what_does_not_belong_together(tmp_path):
    """Another device, policy or code of a kernel is refused by name."""
    one = card(tmp_path / "one", b8={"a": 1.0})
    others = {
        "H200": msgspec.structs.replace(RUN, device=msgspec.structs.replace(RUN.device, name="H200")),
        "policy": msgspec.structs.replace(RUN, policy={"timer": "cupti", "l2": "cold-dirty"}),
        "recurrent": msgspec.structs.replace(RUN, kernels={"recurrent": "f2"}),
    }
    for said, header in others.items():
        with pytest.raises(JournalError, match=said):
            minimax([one, card(tmp_path / said, header, b8={"a": 1.0})])


def test_the_command(tmp_path):
    """`gdntune replay A B --minimax`: one valid table; several journals without it are refused."""
    one = card(tmp_path / "one", b8={"a": 100.0, "b": 101.0})
    two = card(tmp_path / "two", b8={"a": 110.0, "b": 100.0})
    run, out = CliRunner().invoke, tmp_path / "t.json"
    got = run(app, ["replay", str(one), str(two), "--minimax", "--out", str(out)])
    assert got.exit_code == 0, got.output
    assert "2 journals" in got.stdout and table.load(out).rules[0].at(8).variant == "b"
    refused = run(app, ["replay", str(one), str(two)])
    assert refused.exit_code == 2 and "--minimax" in refused.output
    assert json.loads(out.read_text())["evidence"]["sources"]
