"""The runtime's choice of table, row and function."""

import dataclasses
import re

import dependent
import msgspec
import pytest

import gdntune
from gdntune import kernels
from gdntune.device import arch, gpus
from gdntune.errors import TableError, ToolMissing, UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.kernels.wy_block_config import Knobs
from gdntune.problem import Contract, Problem
from gdntune.results import table
from gdntune.results.table import Interval, Origin, Rule, Table, TableVariant
from gdntune.runtime import dispatch
from gdntune.runtime.dispatch import Runtime
from gdntune.runtime.explain import explanation

CONTRACT = Contract(state_dtype="fp32")


def a_table(device, contract=CONTRACT, kernel="cpu_recurrent", at=100, fingerprint=None):
    """A table of one rule: the first variant below `at` work units, the last from there on."""
    variants = kernels.get(kernel).variants(contract, device)
    first, last = variants[0], variants[-1]
    origin = Origin("0", "test", "0", "2026-01-01T00:00:00+00:00", 2, 2, {}, 0.0, 0.0)
    return Table(
        schema="gdntune.table/1",
        device=device,
        software={},
        kernels={kernel: fingerprint or kernels.fingerprints(device.kind)[kernel]},
        policy={"timer": "cpu", "l2": "cold-clean"},
        evidence=origin,
        variants={v.id: TableVariant(v.kernel, v.knobs) for v in (first, last)},
        rules=(Rule(contract, (Interval(1, at - 1, first.id), Interval(at, None, last.id))),),
    )


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Folders for the user's and the shipped tables, both empty."""
    monkeypatch.setattr(dispatch, "user_tables", lambda: tmp_path / "user")
    monkeypatch.setattr(dispatch, "shipped_tables", lambda: tmp_path / "shipped")
    monkeypatch.delenv("GDNTUNE_TABLE", raising=False)
    dispatch.warn_once.cache_clear()
    return tmp_path


def device():
    """The CPU at hand."""
    return arch.detect("cpu")


def test_without_a_table_the_default_rule_speaks(places):
    """Any work units resolve, and name the source of the choice."""
    bound = Runtime(device()).bind(CONTRACT)
    assert bound.choice(1).first == 1 and "default" in bound.choice(10**6).why


def test_order_of_tables(places, monkeypatch):
    """Given, then GDNTUNE_TABLE, then the user's, then the shipped one of this device."""
    own = f"{device().slug}/gdn_decode.json"
    for folder, at in (("shipped", 10), ("user", 20), ("env", 30), ("given", 40)):
        table.save(a_table(device(), at=at), places / folder / own)

    def boundary():
        return Runtime(device()).bind(CONTRACT).choices[1].first

    assert boundary() == 20
    (places / "user" / own).unlink()
    assert boundary() == 10
    monkeypatch.setenv("GDNTUNE_TABLE", str(places / "env" / own))
    assert boundary() == 30
    runtime = Runtime(device())
    runtime.use(places / "given" / own)
    assert runtime.bind(CONTRACT).choices[1].first == 40


def test_the_nearest_device_serves_with_a_warning(places, caplog):
    """A GPU without a table takes that of the GPU most like it, and says so once."""
    for target in ("sm_90a", "sm_100a"):
        d = arch.target(target)
        table.save(
            a_table(d, Contract(), "recurrent"), places / "shipped" / d.slug / "gdn_decode.json"
        )
    like_h100 = msgspec.structs.replace(arch.target("sm_90a"), name="NVIDIA H200", peak_gb_s=4800.0)
    for _ in range(2):
        assert "h100" in Runtime(like_h100).bind(Contract()).choice(5).why
    assert sum("nearest" in r.message for r in caplog.records) == 1


def test_a_choice_that_would_spill_elsewhere_is_another_there(places):
    """Fault: on a B200 an H200's choice for KDA at T=8 kept 72 bytes a thread in local memory, more
    than a sweep accepts; without its cap on registers it keeps none.
    """
    contract = Contract("kda_decode", 8, gate="softplus")
    hopper, blackwell = arch.target("sm_90a"), arch.target("sm_100a")
    capped = Knobs(32, 4, registers=128)
    found = a_table(hopper, contract, "wy_block")
    last = list(found.variants)[-1]
    variants = {**found.variants, last: TableVariant("wy_block", dataclasses.asdict(capped))}
    path = places / "shipped" / hopper.slug / "kda_decode.json"
    path.parent.mkdir(parents=True)
    id = kernels.get("wy_block").variant(capped).id
    path.write_text(
        msgspec.json.encode(msgspec.structs.replace(found, variants=variants))
        .decode()
        .replace(f'"{last}"', f'"{id}"')
    )
    chosen = [Runtime(d).bind(contract).choices[-1].variant.id for d in (hopper, blackwell)]
    assert chosen == ["wy_block.rw32.wp4.rg128", "wy_block.rw32.wp4"]


def test_a_stale_table_says_so(places, caplog):
    """A table measured with another version of the kernel is used with a warning."""
    path = places / "user" / device().slug / "gdn_decode.json"
    table.save(a_table(device(), fingerprint="another"), path)
    assert "user" in Runtime(device()).bind(CONTRACT).choice(1).why
    assert any("stale" in r.message for r in caplog.records)


def test_a_rule_that_cannot_serve_is_passed_over(places, caplog):
    """A table from a stranger can be wrong, not dangerous: an illegal variant leads to the default
    rule, with a warning.
    """
    good = a_table(device())
    kernel = kernels.get("cpu_recurrent")
    first, last = (
        kernel.variant(kernel.setting({**v.knobs, "vec": 3})) for v in good.variants.values()
    )
    path = places / "user" / device().slug / "gdn_decode.json"
    wrong = {v.id: TableVariant(v.kernel, v.knobs) for v in (first, last)}
    rule = Rule(CONTRACT, (Interval(1, 99, first.id), Interval(100, None, last.id)))
    table.save(msgspec.structs.replace(good, variants=wrong, rules=(rule,)), path)
    assert "default" in Runtime(device()).bind(CONTRACT).choice(1).why
    assert any("cannot serve" in r.message for r in caplog.records)


def test_ids_that_contradict_their_knobs_are_refused(places):
    """Fault: a table whose ids say tv33 and whose knobs say 32 was as good as any other."""
    path = places / "given.json"
    table.save(a_table(device()), path)
    Runtime(device()).use(path)
    text = path.read_text()
    tv = next(
        part for part in next(iter(table.load(path).variants)).split(".") if part.startswith("tv")
    )
    path.write_text(text.replace(f".{tv}.", ".tv33."))
    with pytest.raises(
        TableError,
        match=rf"given.json: \$.variants\['.*tv33.*'\].knobs are those of cpu_recurrent.*{tv}",
    ):
        Runtime(device()).use(path)


@pytest.mark.parametrize(
    "name, knobs, of",
    [
        ("recurrent.tv32.ilp2", {"tile_v": 32, "ilp": 2}, None),
        ("recurrent.tv32.ilp2.early", {"tile_v": 32, "ilp": 2, "early": True, "split": 1}, None),
        ("recurrent.tv32.ilp2", {"tile_v": 32, "ilp": 2, "split": 2}, None),
        ("recurrent.any", {"tile_v": 32, "of_another_version": 1}, None),
        ("peer:other.any", {"tile_v": 32}, None),
        ("recurrent.tv33.ilp2", {"tile_v": 32, "ilp": 2}, "recurrent.tv32.ilp2"),
        ("recurrent.tv32", {"tile_v": 32, "ilp": 2}, "recurrent.tv32.ilp2"),
        ("recurrent.tv2.ilp32", {"tile_v": 32, "ilp": 2}, "recurrent.tv32.ilp2"),
        (
            "recurrent.tv32.ilp2.early",
            {"tile_v": 32, "ilp": 2, "early": False},
            "recurrent.tv32.ilp2",
        ),
        ("wy.tv32.ilp2", {"tile_v": 32, "ilp": 2}, "recurrent.tv32.ilp2"),
    ],
)
def test_what_ids_say(name, knobs, of):
    """An id says each knob that has no default, and nothing that is not so; knobs and kernels of
    other versions are let be.
    """
    variant = Variant("peer:other" if name.startswith("peer") else "recurrent", name, knobs)
    if of is None:
        kernels.check_names([variant], "t.json")
        return
    with pytest.raises(
        TableError, match=re.escape(f"t.json: $.variants[{name!r}].knobs are those of {of}: ")
    ):
        kernels.check_names([variant], "t.json")


def test_a_malformed_table_is_refused(places):
    """load_table of something that is no table raises, and names the file."""
    (places / "x.json").write_text("{}")
    with pytest.raises(TableError, match=r"x\.json"):
        gdntune.load_table(places / "x.json")


def test_bound_functions_follow_the_intervals(places):
    """Below the boundary one function, from there on the other; both are loaded by load_all."""
    path = places / "user" / device().slug / "gdn_decode.json"
    table.save(a_table(device()), path)
    bound = Runtime(device()).bind(CONTRACT)
    bound.load_all()
    assert bound.at(1) is bound.at(99)
    assert bound.at(100) is bound.at(10**9)
    assert bound.at(99) is not bound.at(100)
    assert bound.choice(99).variant != bound.choice(100).variant


def test_batch_invariant_is_one_variant(places):
    """With batch_invariant one variant serves every size."""
    table.save(a_table(device()), places / "user" / device().slug / "gdn_decode.json")
    assert len(Runtime(device()).bind(CONTRACT, batch_invariant=True).choices) == 1


def test_plan_and_prepare(places):
    """plan loads one cell's function, prepare all of a contract's."""
    bound = gdntune.plan(Problem(CONTRACT, 2, 2, 4), device="cpu")
    assert callable(bound.bound.at(8)) and "gdn_decode" in repr(bound) + repr(bound.bound)
    assert all(f is not None for f in gdntune.prepare(CONTRACT, device="cpu")._functions)


def test_without_cuda_the_api_speaks_its_own_words(places, monkeypatch):
    """Fault: a GPU's table on a host without CUDA, and plan and prepare without device=, were
    answered in a config's words.
    """
    monkeypatch.setattr(arch, "cuda_fault", lambda index=0: "no CUDA device: none")
    monkeypatch.setattr(dispatch, "runtime", dispatch.runtime.__wrapped__)
    path = places / "given.json"
    table.save(a_table(arch.target("sm_90a"), Contract(), "recurrent"), path)
    with pytest.raises(ToolMissing) as e:
        gdntune.load_table(path)
    assert str(e.value) == (
        f"{path} was measured on NVIDIA H100 80GB HBM3, of kind cuda: no CUDA device: none, or give a table of kind cpu; "
        "`gdntune sweep` makes one"
    )
    calls = (
        lambda: gdntune.plan(Problem(CONTRACT, 2, 2, 4)),
        lambda: gdntune.prepare(CONTRACT),
        lambda: gdntune.load_table(path, "cuda"),
    )
    for call in calls:
        with pytest.raises(
            ToolMissing, match="^device='cuda': no CUDA device: none, or give device='cpu'$"
        ):
            call()


def test_a_table_of_another_kind_of_device_is_refused(places, monkeypatch):
    """Fault: a GPU's table given on a CPU was called stale, and each of its choices was a warning."""
    path = places / "given.json"
    table.save(a_table(arch.target("sm_90a"), Contract(), "recurrent"), path)
    with pytest.raises(
        UnsupportedProblem, match="of kind cuda: expected on .* a table of kind cpu"
    ):
        Runtime(device()).use(path)
    monkeypatch.setenv("GDNTUNE_TABLE", str(path))
    with pytest.raises(UnsupportedProblem, match="of kind cuda"):
        Runtime(device()).bind(CONTRACT)


def test_explain_says_what_a_call_gets(places):
    """gdntune.explain names the variant that the runtime would call."""
    said = gdntune.explain(CONTRACT, 64, "cpu")
    assert said["variant"] == dispatch.runtime("cpu").bind(CONTRACT).choice(64).variant.id
    assert said["contract"] == CONTRACT.key() and said["reason"]


def test_dependent_launch_is_the_callers(places):
    """Off by default, also where a table chose it; on, a table's form or `first`, which owes
    nothing, but where a rule was made in a chain, which had the forms to choose from; a kernel
    without the knob stays as it is.
    """
    h200, contract = gpus.named("h200"), Contract()
    kernel = kernels.get("recurrent")
    made = a_table(h200, contract, "recurrent")
    first, last = made.variants.values()
    chosen = kernel.setting({**last.knobs, "pdl": "first"})
    variant = kernel.variant(chosen)
    (rule,) = made.rules
    intervals = (rule.intervals[0], msgspec.structs.replace(rule.intervals[1], variant=variant.id))
    made = msgspec.structs.replace(
        made,
        variants={
            kernel.variant(kernel.setting(first.knobs)).id: first,
            variant.id: TableVariant("recurrent", variant.knobs),
        },
        rules=(msgspec.structs.replace(rule, intervals=intervals),),
    )
    table.save(made, places / "shipped" / h200.slug / "gdn_decode.json")
    runtime = Runtime(h200)

    def launch(c=contract, **options):
        return {
            asked: [
                x.variant.knobs.get("pdl", "none")
                for x in runtime.bind(c, dependent_launch=asked, **options).choices
            ]
            for asked in (None, False, True)
        }

    chosen = {None: ["none", "first"], False: ["none", "none"]}
    assert launch() == {**chosen, True: ["first", "first"]}
    # a rule's own policy counts, not its table's; so for a neighbour, and for one size for all
    chain = msgspec.structs.replace(made.rules[0], policy={"timer": "graph", "l2": "chain"})
    swapped = msgspec.structs.replace(
        chain, intervals=tuple(
            msgspec.structs.replace(i, variant=j.variant)
            for i, j in zip(chain.intervals, reversed(chain.intervals), strict=True)
        )
    )  # fmt: skip
    for rule, at_all in ((chain, "first"), (swapped, "none")):
        path = places / "chain.json"
        table.save(msgspec.structs.replace(made, rules=(rule,)), path)
        runtime.use(path)
        its = ["none", "first"] if rule is chain else ["first", "none"]
        kept = {None: its, False: ["none", "none"], True: its}
        assert launch() == launch(contract.replace(pool=False)) == kept
        assert launch(batch_invariant=True)[True] == [at_all]
    # one from before its kernel had the knob was not chosen among the forms
    old = {k: v for k, v in first.knobs.items() if k != "pdl"}
    older = msgspec.structs.replace(
        made,
        variants={n: TableVariant("recurrent", old) if v == first else v
                  for n, v in made.variants.items()},
        rules=(chain,),
    )  # fmt: skip
    table.save(older, path)
    runtime.use(path)
    assert launch()[True] == ["first", "first"]
    # where no rule is near, the default rule chose: at three steps of sizes
    assert launch(contract.replace(K=64, V=64, state_dtype="fp32"))[True] == ["first"] * 3
    on_cpu = Runtime(device())
    plain, allowed = (
        [c.variant for c in on_cpu.bind(CONTRACT, dependent_launch=asked).choices]
        for asked in (False, True)
    )
    assert plain == allowed


def test_calls_without_dependent_launch_have_their_own_choice(tmp_path):
    """What the table chose for them; where it chose nothing, the other form of what it names."""
    made = dependent.write(tmp_path / "apart.json")
    runtime = Runtime(made.device)
    runtime.use(made.path)

    def called(allowed, **options):
        choices = runtime.bind(made_contract, dependent_launch=allowed, **options).choices
        return [(c.first, c.variant) for c in choices]

    made_contract = dependent.CONTRACT
    both = [(1, made.early[0]), (64, made.early[1])]
    assert called(True) == called(None) == both and called(False) == [(1, made.alone)]
    assert called(False, batch_invariant=True) == [(1, made.alone)]
    assert called(True, batch_invariant=True) == [(1, made.early[1])]
    (choice,) = runtime.choices(made_contract, False)
    assert choice.why.endswith(", its choice for calls without dependent launch")
    assert runtime.choices(made_contract) == runtime.choices(made_contract, True)
    # a neighbour's rule serves in the same way
    (near,) = runtime.choices(made_contract.replace(pool=False), False)
    assert near.variant == made.alone
    bare = dependent.write(tmp_path / "bare.json", with_alone=False)
    runtime.use(bare.path)
    assert called(False) == [(1, bare.plain[0]), (64, bare.plain[1])] and called(True) == both
    assert runtime.choices(made_contract, False)[0].why.endswith(
        f"; the choice is {bare.early[0].id}, called in its form without dependent launch"
    )


def test_explained_is_what_a_call_gets(tmp_path):
    """Without dependent launch by default, with what others get where that differs; of a table
    without such a choice it is said that the times are another form's.
    """
    made = dependent.write(tmp_path / "apart.json")
    contract = dependent.CONTRACT
    said = explanation(contract, 8, made.path)
    assert (said["variant"], said["dependent_launch"]) == (made.alone.id, False)
    assert said["evidence"]["mean_us"] == 8.1 and "calls without dependent launch" in said["reason"]
    assert (
        said["otherwise"]["variant"] == made.early[0].id and "7.8 us" in said["otherwise"]["reason"]
    )
    other = explanation(contract, 8, made.path, dependent_launch=True)
    assert other["variant"] == made.early[0].id and other["otherwise"]["variant"] == made.alone.id
    bare = dependent.write(tmp_path / "bare.json", with_alone=False)
    said = explanation(contract, 100, bare.path)
    assert said["variant"] == bare.plain[1].id and said["knobs"]["pdl"] == "none"
    assert said["reason"].endswith(
        f"; the choice is {bare.early[1].id}, called in its form without dependent launch"
    )
    on_cpu = gdntune.explain(CONTRACT, 64, "cpu")
    assert on_cpu["otherwise"] is None and on_cpu["dependent_launch"] is False


def test_explained_is_a_choice_that_a_chain_made_without_dependent_launch(tmp_path, monkeypatch):
    """Calls that allow it get what was chosen, by a table that is given and by the one in use;
    of a sweep that tries no such forms they get `first`.
    """
    made = dependent.write(tmp_path / "early.json")
    contract = dependent.CONTRACT
    found = table.load(made.path)
    plain = made.alone
    rule = Rule(contract, found.rules[0].alone)
    for l2, called, why in (
        ("chain", plain.id, "in a chain, where that was tried too"),
        ("cold-clean", f"{plain.id}.pdlfirst", "called in its form with dependent launch"),
    ):
        path = tmp_path / f"{l2}.json"
        own = msgspec.structs.replace(rule, policy={"timer": "graph", "l2": l2})
        table.save(msgspec.structs.replace(found, rules=(own,)), path)
        runtime = Runtime(made.device)
        runtime.use(path)
        monkeypatch.setattr(dispatch, "runtime", lambda kind, index, found=runtime: found)
        monkeypatch.setattr(arch, "detect", lambda kind, index: made.device)
        for said in (
            explanation(contract, 64, path, dependent_launch=True),
            explanation(contract, 64, dependent_launch=True),
        ):
            assert said["variant"] == called and said["reason"].endswith(why)
            other = said["otherwise"]
            assert other is None if l2 == "chain" else other["variant"] == plain.id
        assert runtime.bind(contract, dependent_launch=True).choice(64).variant.id == called


def test_explained_is_the_default_rule_where_no_rule_is_near(tmp_path, monkeypatch):
    """Also by the table in use, for both kinds of call, where the table's own rules are a chain's."""
    made = dependent.write(tmp_path / "apart.json")
    runtime = Runtime(made.device)
    runtime.use(made.path)
    monkeypatch.setattr(dispatch, "runtime", lambda kind, index: runtime)
    monkeypatch.setattr(arch, "detect", lambda kind, index: made.device)
    far = dependent.CONTRACT.replace(K=64, V=64)
    plain = kernels.default(far, 64, made.device)
    for said in (explanation(far, 64), explanation(far, 64, made.path)):
        assert (said["match"], said["variant"]) == ("none", plain.id)
        assert said["reason"].startswith("no rule for op=gdn_decode, K=64")
        assert said["otherwise"]["knobs"] == {**plain.knobs, "pdl": "first"}
