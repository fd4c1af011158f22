"""gdntune/cells.py: the cells that a sweep adds, on times made up from formulas whose crossovers
are known.
"""

import itertools
import math

import msgspec
import pytest
import synthetic
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gdntune.errors import ConfigError
from gdntune.kernels.spec import Variant
from gdntune.problem import Problem, problem_fault
from gdntune.results import derive
from gdntune.results.records import Cell, Check, Trial
from gdntune.tuning import cells, config

RUN = synthetic.run(keeps_default=True, regret=0.01)
BASE = {
    "name": "small",
    "model": {"H": 2, "HV": 8},
    "batch": [1, 4, 16, 64, 256],
    "shards": [1, 2],
    "contracts": [{"op": "gdn_decode"}],
}


def read(search=None, **changes):
    """The small config with effort of its own."""
    return config.parse(yaml.safe_dump({**BASE, **changes, "search": search or {}}))


def timed(problem, us, purpose=None, status="ok", pdl=None):
    """A closed cell with final samples of each variant, means by name; pdl: the knob by name."""
    trials = [
        Trial(
            problem=problem,
            variant=Variant("recurrent", name, {"pdl": pdl[name]} if pdl else {}),
            stage=stage,
            status="ok",
            samples_us=[t] * 4,
        )
        for stage in ("screen", "final")
        for name, t in us.items()
    ]
    fields = {"purpose": purpose} if purpose else {}
    return [*(trials if status == "ok" else []), Cell(problem=problem, status=status, **fields)]


def swept(c, us, names="abc"):
    """A sweep of a config where variants take `us(work_units)`: its records, with what bisection
    added.
    """
    records = [
        Check(contract=k, variant=name, status="ok") for k in c.all_contracts() for name in names
    ]
    for p in c.problems():
        records += timed(p, us(p.work_units))
    for _ in range(100):
        more = cells.crossovers(c, records, RUN)
        if not more:
            return records
        assert len(set(more)) == len(more)
        for p in more:
            records += timed(p, us(p.work_units), "bisection")
    raise AssertionError("bisection does not end")


def boundaries(records):
    """The last work units of each interval but the last, of the only rule."""
    (rule,) = derive.derive(records, RUN).rules
    return [i.last for i in rule.intervals[:-1]]


def crossing(*points):
    """Times of `a`, `b`, ... where each is the fastest between its two points, 10% in front at
    least a factor of two away.
    """
    edges = [1, *points, 1 << 30]

    def us(w):
        found = {}
        for name, (low, high) in zip("abcdef", itertools.pairwise(edges), strict=False):
            away = max(math.log2(low / w), math.log2(w / high), -1.0)
            found[name] = 100 * w * (1 + 0.1 * max(away, -0.5))
        return found

    return us


def test_off_by_default():
    """An old config asks for nothing more, and its hash is what it was."""
    c = read()
    assert cells.crossovers(c, swept(c, crossing(100)), RUN) == []
    assert cells.held_out(c, []) == []
    assert c.sha256 == read({"bisect": None, "extra_cells": 16, "held_out": 0}).sha256
    assert (
        len(
            {
                c.sha256,
                read({"bisect": 1.1}).sha256,
                read({"held_out": 1}).sha256,
                read({"extra_cells": 3}).sha256,
            }
        )
        == 4
    )


@settings(max_examples=40, deadline=None)
@given(st.floats(5.0, 2000.0), st.sampled_from([1.1, 1.3, 2.0]))
def test_a_crossover_is_found_within_the_ratio(truth, ratio):
    """The boundary is within the ratio of the true crossover, or no legal problem lies between; few
    cells suffice.
    """
    c = read({"bisect": ratio, "extra_cells": 16})
    records = swept(c, crossing(truth))
    added = derive.marked(records, "bisection")
    assert all(problem_fault(p) is None and (p.H, p.HV) in {(2, 8), (1, 4)} for p in added)
    assert len(added) <= math.ceil(math.log2(math.log(4) / math.log(ratio))) + 1
    units = sorted(p.work_units for p in derive.passes(records))
    for last in boundaries(records):
        low, high = max(w for w in units if w <= last), min(w for w in units if w > last)
        assert high <= ratio * low or high - low <= 4
        # a tie moves the boundary by as much as times within 1% do
        assert low / 1.15 <= truth <= high * 1.15


def test_several_crossovers_and_what_is_between():
    """Each crossover gets cells of its own, and none is put where neighbours agree."""
    c = read({"bisect": 1.1, "extra_cells": 32})
    records = swept(c, crossing(40, 900))
    added = [p.work_units for p in derive.marked(records, "bisection")]
    assert all(32 < w < 64 or 512 < w < 1024 for w in added), added
    assert any(w < 64 for w in added) and any(w > 512 for w in added)
    first, second = boundaries(records)
    assert 36 <= first <= 44 and 810 <= second <= 990


def test_a_third_variant_between_two():
    """All variants are timed at a bisection's cell, so one that wins only between two cells is
    found.
    """
    c = read({"bisect": 1.1}, batch=[4, 64], shards=[1])

    def us(w):
        return {"a": 100 + abs(w - 30), "b": 100 + abs(w - 500), "c": 50 + abs(w - 128)}

    assert "c" not in derive.derive(swept(read(batch=[4, 64], shards=[1]), us), RUN).variants
    (rule,) = derive.derive(swept(c, us), RUN).rules
    assert rule.at(128).variant == "c"


def test_ties_are_no_crossover():
    """Choices that lose no more than a tie at each other's cells are left as they are; where one
    loses more, they are not.
    """
    c = read({"bisect": 1.1}, batch=[4, 64], shards=[1])
    low, high = sorted(c.problems())
    checks = [Check(contract=low.contract, variant=name, status="ok") for name in "ab"]
    # each is left out of the other's final samples, but not of the screen
    tie = [*checks, *timed(low, {"a": 10.0, "b": 10.02}), *timed(high, {"a": 20.02, "b": 20.0})]
    assert cells.crossovers(c, tie, RUN) == []
    one = [*checks, *timed(low, {"a": 10.0, "b": 11.0}), *timed(high, {"a": 22.0, "b": 20.0})]
    assert [p.work_units for p in cells.crossovers(c, one, RUN)] == [128]
    unknown = [*checks, *timed(low, {"a": 10.0}), *timed(high, {"b": 20.0})]
    assert [p.work_units for p in cells.crossovers(c, unknown, RUN)] == [128]


def test_where_calls_without_dependent_launch_change_is_a_crossover():
    """Of neighbours that agree but for those calls; by what each loses among what they may take,
    where that is more than a tie. An older journal's rules have no such choice.
    """
    c = read({"bisect": 1.1}, batch=[4, 64], shards=[1])
    low, high = sorted(c.problems())
    alone = msgspec.structs.replace(RUN, alone=True)
    checks = [Check(contract=low.contract, variant=n, status="ok") for n in "eab"]

    def asked(a, b, run=alone):
        """With times of `a` and `b` at the low cell and the high one; `e` starts early and leads."""
        records = [*checks]
        for p, us in ((low, (10.0, *a)), (high, (20.0, *b))):
            records += timed(
                p, dict(zip("eab", us, strict=True)), pdl={"e": "first", "a": "none", "b": "none"}
            )
        return [p.work_units for p in cells.crossovers(c, records, run)]

    assert asked((12.0, 14.0), (28.0, 24.0)) == [128]
    assert asked((12.0, 14.0), (24.0, 28.0)) == []
    assert asked((12.0, 12.03), (24.06, 24.0)) == []
    assert asked((12.0, 14.0), (28.0, 24.0), RUN) == []


def test_the_number_of_cells_is_bounded():
    """Where extra_cells do not suffice, the crossover that loses most comes first; the bound is a
    contract's.
    """
    c = read({"bisect": 1.01, "extra_cells": 3}, tokens=[1, 2])
    records = swept(c, crossing(40, 900))
    added = derive.marked(records, "bisection")
    assert [sum(p.contract.tokens == t for p in added) for t in (1, 2)] == [3, 3]
    c = read({"bisect": 1.1, "extra_cells": 1}, shards=[1])

    def us(w):
        return {
            "a": 1.0 * w,
            "b": w * (1.05 if w < 16 else 0.9 if w < 600 else 2.0),
            "c": w * (3.0 if w < 600 else 0.5),
        }

    (one,) = derive.marked(swept(c, us), "bisection")
    assert 512 < one.work_units < 2048


def test_a_failed_cell_closes_its_gap():
    """Where the cell between two could not be timed, the sweep does not try one beside it for ever."""
    c = read({"bisect": 1.1}, batch=[4, 64], shards=[1])
    records = [Check(contract=c.all_contracts()[0], variant=name, status="ok") for name in "ab"]
    for p in c.problems():
        records += timed(p, crossing(100)(p.work_units))
    (p,) = cells.crossovers(c, records, RUN)
    assert cells.crossovers(c, [*records, *timed(p, {}, "bisection", "failed")], RUN) == []


def test_no_cell_has_a_choice():
    """Nothing to bisect where nothing was timed."""
    c = read({"bisect": 1.1})
    assert cells.crossovers(c, [Cell(problem=p, status="failed") for p in c.problems()], RUN) == []


def test_held_out_by_number():
    """Spread over the logarithm of work units, between the extremes, at no cell that has a part in
    choosing; resumed, the same.
    """
    c = read({"bisect": 1.1, "held_out": 5}, tokens=[1, 2])
    records = swept(c, crossing(40, 900))
    wanted = cells.held_out(c, records)
    assert len(wanted) == 10
    used = {(p.contract, p.work_units) for p in derive.passes(records)}
    assert not used & {(p.contract, p.work_units) for p in wanted}
    for contract in c.all_contracts():
        units = [p.work_units for p in wanted if p.contract == contract]
        ideal = [4 * 512 ** ((i + 0.5) / 5) for i in range(5)]
        # a step of four work units is much where they are few
        assert all(1 / 1.7 < w / i < 1.7 for w, i in zip(units, ideal, strict=True))
    for n in range(len(wanted)):
        later = records + [
            r for p in wanted[:n] for r in timed(p, crossing(40, 900)(p.work_units), "held-out")
        ]
        assert cells.crossovers(c, later, RUN) == []
        assert cells.held_out(c, later) == wanted


def test_held_out_where_there_is_no_room():
    """Fewer legal problems between the cells than asked for: those, and no more."""
    c = read({"held_out": 50}, batch=[1, 2, 4], shards=[1])
    assert [p.work_units for p in cells.held_out(c, [])] == [24]
    c = read({"held_out": 3}, batch=[1], shards=[1])
    assert cells.held_out(c, []) == []


def test_held_out_by_list():
    """A batch of a shard, of all contracts or those of a T."""
    c = read({"held_out": [{"batch": 24}, {"batch": 3, "shards": 2, "tokens": 2}]}, tokens=[1, 2])
    found = [(p.contract.tokens, p.B, p.H, p.HV) for p in cells.held_out(c, [])]
    assert found == [(1, 24, 2, 8), (2, 3, 1, 4), (2, 24, 2, 8)]


def test_listed_cells_are_not_bisected_at():
    """A cell that is held out is not taken for bisection, which comes before it."""
    c = read({"bisect": 1.1, "held_out": [{"batch": 16}]}, batch=[4, 64], shards=[1])
    records = swept(c, crossing(130))
    assert Problem(c.all_contracts()[0], 16, 2, 8) not in derive.marked(records, "bisection")
    assert derive.marked(records, "bisection")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"batch": 16},
            r"held_out\[0\]: batch=16 with HV=8 is 128 work units .* where the config has a cell",
        ),
        (
            {"batch": 3, "tokens": 7},
            r"held_out\[0\]: no contract is held out at batch=3, shards=1, tokens=7: expected tokens of 1 ",
        ),
        (
            {"batch": 3, "shards": 3},
            r"no contract is held out at batch=3, shards=3: .*shards that divide H",
        ),
    ],
    ids=["tuned", "tokens", "shards"],
)
def test_wrong_held_out_cells_are_refused(entry, message):
    """A held-out cell that is tuned, or that no contract has, says which and what is expected."""
    with pytest.raises(ConfigError, match=message):
        cells.held_out(read({"held_out": [entry]}), [])


@pytest.mark.parametrize(
    "search",
    [
        {"bisect": 1.0},
        {"bisect": 0},
        {"held_out": -1},
        {"held_out": [{"tokens": 1}]},
        {"extra_cells": 0},
    ],
)
def test_wrong_values_are_refused(search):
    """Values that mean nothing are a ConfigError at load."""
    with pytest.raises(ConfigError, match="search"):
        read(search)


def test_parts_have_their_own_heads():
    """Of a config with parts, a contract's extra cells have the heads of the parts that it is of."""
    parts = [
        {"name": "gdn", "model": {"H": 2, "HV": 8}, "contracts": [{"op": "gdn_decode"}]},
        {
            "name": "kda",
            "model": {"H": 3, "HV": 3},
            "contracts": [{"op": "kda_decode", "gate": "softplus"}],
        },
    ]
    c = config.parse(
        yaml.safe_dump(
            {
                "name": "two",
                "batch": [1, 16],
                "parts": parts,
                "search": {"bisect": 1.1, "held_out": 4},
            }
        )
    )
    records = swept(c, crossing(20))
    found = [*derive.marked(records, "bisection"), *cells.held_out(c, records)]
    assert {(p.contract.op, p.H, p.HV) for p in found} == {
        ("gdn_decode", 2, 8),
        ("kda_decode", 3, 3),
    }


def test_what_is_timed_again():
    """A choice, the best two by the samples that chose, and the default's; not where the choice has
    fresh samples, nor at held-out cells. Noisy fresh samples are taken anew.
    """
    problems = read().problems()[:3]
    names = ("a", "b", "c", "d")
    found = [Check(contract=problems[0].contract, variant=n, status="ok") for n in names]
    for p in problems[:2]:
        *trials, closed = timed(p, {"a": 10.05, "b": 10.0, "c": 10.02, "d": 12.0})
        found += [*trials, msgspec.structs.replace(closed, default_variant="d")]
    found += timed(problems[2], {"a": 10.0}, "held-out")
    table = derive.derive(found, RUN)
    asked = cells.again(found, table)
    assert list(asked) == list(problems[:2])
    choice = table.rules[0].at(problems[0].work_units).variant
    assert asked[problems[0]].variants == tuple(dict.fromkeys((choice, "b", "c", "d")))
    fresh = [
        msgspec.structs.replace(r, stage="evidence")
        for r in timed(problems[0], {choice: 10.3})
        if isinstance(r, Trial) and r.stage == "final"
    ]
    found += [*fresh, Cell(problem=problems[0], status="ok", purpose="evidence", choice=choice)]
    assert list(cells.again(found, table)) == [problems[1]]
    assert list(cells.again(found, table, {problems[0]})) == list(problems[:2])


def test_both_choices_are_timed_again():
    """That of calls without dependent launch too, with the best that it was chosen among; done
    where both have fresh samples.
    """
    problem = read().problems()[0]
    times = {"a": 10.0, "b": 10.2, "e": 10.3, "c": 12.0, "d": 12.2, "f": 12.4, "g": 15.0}

    def of(us, **why):
        trials = [
            Trial(
                problem=problem,
                variant=Variant("recurrent", n, {"pdl": "first" if n in "abe" else "none"}),
                stage="evidence" if why else "final",
                status="ok",
                samples_us=[t] * 4,
            )
            for n, t in us.items()
        ]
        return [*trials, Cell(problem=problem, status="ok", **why)]

    checks = [Check(contract=problem.contract, variant=n, status="ok") for n in times]
    found = [*checks, *of(times)]
    alone = msgspec.structs.replace(RUN, alone=True)
    table = derive.derive(found, alone)
    assert cells.again(found, table)[problem].variants == ("a", "c", "b", "d")
    assert cells.again(found, derive.derive(found, RUN))[problem].variants == ("a", "b")
    for fresh, left in (("ab", True), ("ac", False)):
        more = [*found, *of({n: times[n] for n in fresh}, purpose="evidence", choice="a")]
        assert bool(cells.again(more, table)) is left
        assert not cells.again(more, derive.derive(found, RUN))
