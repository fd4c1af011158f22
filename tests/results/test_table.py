"""gdntune/table.py: what a table may say, what it answers, how it is saved."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdntune.device.arch import target
from gdntune.errors import TableError, UnsupportedProblem
from gdntune.kernels import fingerprint
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, without_defaults
from gdntune import files
from gdntune.results import table
from gdntune.results.table import Table

SCHEMA = Path(__file__).parents[2] / "docs" / "table.schema.json"


def contract(**changes):
    """A contract as a table holds it."""
    return msgspec.to_builtins(Contract(**changes))


def evidence(work_units, time_us=4.0):
    """What was measured at a cell."""
    return {
        "work_units": work_units,
        "time_us": time_us,
        "mean_us": time_us + 0.125,
        "q1_us": time_us - 0.5,
        "q3_us": time_us + 0.5,
        "samples": 200,
        "regret": 0.002,
        "floor_us": 3.5,
        "sol": 0.8,
        "runner_up": "recurrent.tv8",
        "runner_up_us": 4.5,
        "status": "DRAM-bound",
    }


VALID = {
    "schema": "gdntune.table/1",
    "device": msgspec.to_builtins(target("sm_90a")),
    "software": {"torch": "2.13.0"},
    "kernels": {"recurrent": "f1"},
    "policy": {"timer": "cupti", "l2": "cold-clean"},
    "evidence": {
        "journal_sha256": "c0ffee",
        "config": "small",
        "config_sha256": "c0ffee",
        "started": "2026-11-28T00:00:00+00:00",
        "cells": 3,
        "trials": 30,
        "failures": {"build": 1},
        "regret_max": 0.002,
        "regret_mean": 0.001,
    },
    "variants": {
        "recurrent.tv16": {"kernel": "recurrent", "knobs": {"tile_v": 16, "wide": True, "order": "early"}},
        "recurrent.tv32": {"kernel": "recurrent", "knobs": {"tile_v": 32}},
    },
    "rules": [
        {
            "when": contract(),
            "intervals": [
                {"from": 1, "to": 90, "variant": "recurrent.tv16", "evidence": [evidence(8), evidence(64)]},
                {"from": 91, "to": None, "variant": "recurrent.tv32", "evidence": [evidence(128)]},
            ],
        },
        {"when": contract(tokens=4), "intervals": [{"from": 1, "to": None, "variant": "recurrent.tv32"}]},
    ],
}


def changed(*path_and_value):
    """The valid table with the value at a path replaced; a path ending in `...` takes the key
    before it out.
    """
    *path, last, value = path_and_value
    raw = copy.deepcopy(VALID)
    place = raw
    for step in path:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return raw


def read(raw):
    """A table from plain values."""
    return table.validate(json.dumps(raw).encode(), "t.json")


def refused(raw):
    """Why a table of plain values is refused."""
    with pytest.raises(TableError) as e:
        read(raw)
    return str(e.value)


FIRST = ("rules", 0, "intervals", 0)
SECOND = ("rules", 0, "intervals", 1)
REFUSED = {
    "schema": (changed("schema", "gdntune.table"), "$.schema is 'gdntune.table'", "gdntune.table/1"),
    "newer": (changed("schema", "gdntune.table/2"), "gdntune.table/2 was written by a newer gdntune", "pip install -U gdntune"),
    "work units beyond 64 bits": (changed(*SECOND, "from", 2**63), "$.rules[0].intervals[1].from is 9223372036854775808", "<= 9223372036854775807"),
    "missing key": (changed("kernels", ...), "$ lacks the key `kernels`", "schema, device"),
    "unknown key": (changed("rule", []), "$ has the unknown key `rule` (did you mean `rules`?)", "schema, device"),
    "unknown contract key": (changed("rules", 0, "when", "B", 1), "$.rules[0].when has the unknown key `B`", "op, tokens"),
    "type": (changed(*FIRST, "from", "1"), "$.rules[0].intervals[0].from is '1'", "an integer"),
    "boolean": (changed(*FIRST, "from", True), "$.rules[0].intervals[0].from is True", "an integer"),
    "from 0": (changed(*FIRST, "from", 0), "$.rules[0].intervals[0].from is 0", ">= 1"),
    "not from 1": (changed(*FIRST, "from", 2), "$.rules[0].intervals[0].from is 2", "starts at 1"),
    "gap": (changed(*SECOND, "from", 92), "$.rules[0].intervals[1].from is 92 and leaves a gap", "expected 91"),
    "overlap": (changed(*SECOND, "from", 90), "$.rules[0].intervals[1].from is 90 and overlaps", "expected 91"),
    "ends": (changed(*SECOND, "to", 5000), "$.rules[0].intervals[1].to is 5000", "expected null"),
    "no end inside": (changed(*FIRST, "to", None), "$.rules[0].intervals[0].to is null", "only the last"),
    "backwards": (changed(*SECOND[:3], [{"from": 1, "to": 9, "variant": "recurrent.tv16"}, {"from": 10, "to": 9, "variant": "recurrent.tv16"}, {"from": 10, "to": None, "variant": "recurrent.tv16"}]), "$.rules[0].intervals[1].to is 9", "from 10"),
    "no intervals": (changed(*FIRST[:3], []), "$.rules[0].intervals is []", "length >= 1"),
    "no rules": (changed("rules", []), "$.rules is []", "length >= 1"),
    "variant": (changed(*FIRST, "variant", "recurrent.tv61"), "$.rules[0].intervals[0].variant is 'recurrent.tv61'", "recurrent.tv16, recurrent.tv32"),
    "kernel": (changed("variants", "recurrent.tv16", "kernel", "x"), "$.variants['recurrent.tv16'].kernel is 'x'", "recurrent"),
    "knob": (changed("variants", "recurrent.tv16", "knobs", "tile_v", 1.5), "$.variants['recurrent.tv16'].knobs.tile_v is 1.5", "an integer"),
    "illegal contract": (changed("rules", 0, "when", "K", 100), "$.rules[0].when is no legal contract: K=100", "64, 96, 128, 256"),
    "enum": (changed("rules", 0, "when", "op", "gdn_decod"), "$.rules[0].when.op is 'gdn_decod' (did you mean `gdn_decode`?)", "gdn_decode, kda_decode"),
    "repeated rule": (changed("rules", 1, "when", contract()), "$.rules[1].when is that of $.rules[0] again", "one rule"),
    "negative time": (changed(*FIRST, "evidence", 0, "time_us", -1.0), "$.rules[0].intervals[0].evidence[0].time_us is -1.0", "> 0.0"),
    "zero floor": (changed(*FIRST, "evidence", 0, "floor_us", 0), "$.rules[0].intervals[0].evidence[0].floor_us is 0", "> 0.0"),
    "median outside": (changed(*FIRST, "evidence", 0, "time_us", 9.0), "$.rules[0].intervals[0].evidence[0].time_us is 9.0", "q1_us=3.5 and q3_us=4.5"),
    "evidence outside": (changed(*FIRST, "evidence", 1, "work_units", 91), "$.rules[0].intervals[0].evidence[1].work_units is 91", "1 to 90"),
    "evidence unordered": (changed(*FIRST, "evidence", 1, "work_units", 8), "$.rules[0].intervals[0].evidence[1].work_units is 8", "rising"),
    "status": (changed(*FIRST, "evidence", 0, "status", "fast"), "$.rules[0].intervals[0].evidence[0].status is 'fast'", "latency-bound, L2-assisted"),
}  # fmt: skip


@pytest.mark.parametrize("raw, where, accepted", REFUSED.values(), ids=REFUSED)
def test_refused(raw, where, accepted):
    """A wrong table is told the file, the JSON path, the value and what is expected."""
    message = refused(raw)
    assert message.startswith(f"t.json: {where}")
    assert accepted in message


def test_a_newer_version_is_named():
    """Fault: a table of a newer schema was `accepted are gdntune.table/1`, which names no remedy."""
    raw = changed("schema", "gdntune.table/2")
    raw["software"]["gdntune"] = "9.1"
    assert "written by gdntune 9.1; gdntune " in refused(raw)


def test_a_newer_versions_key_names_it():
    """Fault: a key that a later version writes was an unknown key, and not why it is there."""
    raw = changed("rule", [])
    raw["software"]["gdntune"] = "9.1"
    assert "the unknown key `rule`" in refused(raw)
    assert "; gdntune 9.1 wrote it, and this is gdntune " in refused(raw)
    raw["software"]["gdntune"] = "0.0.9"
    assert "wrote it" not in refused(raw)
    raw["software"]["gdntune"] = "0.0.9, 9.1"  # merged
    assert "; gdntune 0.0.9, 9.1 wrote it" in refused(raw)


def test_an_empty_list_of_names_is_said():
    """Fault: `accepted are the keys of $.kernels: `, and nothing."""
    assert "the keys of $.kernels: none" in refused(changed("kernels", {}))


def test_json_that_decoders_disagree_on():
    """Fault: a key that stood twice loaded, by its last value; NaN had a byte's offset alone."""
    text = json.dumps(VALID)
    twice = text.replace('"intervals": [{"from": 1,', '"intervals": [{"from": 9, "from": 1,', 1)
    with pytest.raises(TableError, match=r"t: \$\.rules\[0\]\.intervals\[0\] has the key `from` twice"):
        table.validate(twice.encode(), "t")
    with pytest.raises(TableError, match=r"t: \$ has the key `schema` twice"):
        table.validate(b'{"schema": 1,' + text[1:].encode(), "t")
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        odd = re.sub(r'"time_us": [\d.]+', f'"time_us": {number}', text, count=1)
        with pytest.raises(TableError, match=r"\$\.rules\[0\]\.intervals\[0\]\.evidence\[0\]\.time_us is -?(nan|inf): expected"):
            table.validate(odd.encode(), "t")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[" * 100000, b"1e999", b"null", b'"\xff"', b'{"schema": NaN}', b"1" * 5000], ids=repr
)
def test_other_bytes_are_refused(data):
    """No bytes bring up anything but a TableError that names the file."""
    with pytest.raises(TableError, match=r"^t\.json: "):
        table.validate(data, "t.json")


def test_what_is_accepted_instead_of_yaml():
    """Fault: of a table's YAML it was said alone that it is no JSON."""
    with pytest.raises(TableError, match="not JSON: .*; expected a JSON file that `gdntune sweep` wrote"):
        table.validate(b"# a config\nname: tiny\n", "tiny.yaml")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([2, "kda_decode", "recurrent.tv32"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["from", "op", "x"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def places(raw):
    """Every (container, key) in a JSON value."""
    found = []
    for key in list(raw) if isinstance(raw, dict) else range(len(raw)):
        found.append((raw, key))
        if isinstance(raw[key], dict | list):
            found += places(raw[key])
    return found


@settings(max_examples=300)
@given(st.data())
def test_mutations_give_a_table_or_a_table_error(data):
    """A valid table with values replaced, taken out or put in is a table that answers every
    question, or a TableError.
    """
    raw = copy.deepcopy(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(raw)))
        action = data.draw(st.sampled_from(["replace", "remove", "insert"]))
        if action == "remove":
            del container[key]
        elif action == "insert" and isinstance(container, list):
            container.insert(key, data.draw(junk))
        else:
            container[key] = data.draw(junk)
    try:
        t = read(raw)
    except TableError:
        return
    for work_units in (1, 90, 91, 10**9):
        for rule in t.rules:
            assert t.find(rule.when, work_units)[1].variant in t.variants
            t.explain(rule.when, work_units)


@settings(max_examples=200)
@given(st.integers(0, 3000), st.binary(max_size=3), st.integers(0, 5))
def test_damaged_bytes_give_a_table_or_a_table_error(at, junk, cut):
    """Bytes replaced anywhere in a table's file: a table or a TableError."""
    data = json.dumps(VALID).encode()
    try:
        table.validate(data[:at] + junk + data[at + cut :], "t.json")
    except TableError:
        return


def test_find_is_inclusive_at_both_ends():
    """Every number of work units has its interval; below 1 there are none."""
    t = read(VALID)
    names = {w: t.find(Contract(), w)[1].variant[-2:] for w in (1, 8, 90, 91, 10**12)}
    assert names == {1: "16", 8: "16", 90: "16", 91: "32", 10**12: "32"}
    with pytest.raises(UnsupportedProblem, match="work units .* are 0: expected an integer from 1"):
        t.find(Contract(), 0)


def test_variant_comes_with_kernel_and_knobs():
    """What an interval names is resolved within the table."""
    assert read(VALID).variant("recurrent.tv32") == Variant("recurrent", "recurrent.tv32", {"tile_v": 32})


def with_rules(*contracts):
    """A table that has a rule for each contract."""
    interval = {"from": 1, "to": None, "variant": "recurrent.tv16"}
    return read({**VALID, "rules": [{"when": msgspec.to_builtins(c), "intervals": [interval]} for c in contracts]})


BASE = Contract(tokens=2)


@pytest.mark.parametrize(
    "asked, rules, nearest",
    [
        (BASE, [BASE.replace(tokens=1), BASE], 1),
        (BASE.replace(gate_dtype="fp32", A_log_dtype="bf16", dt_bias_dtype="bf16", input_dtype="fp16"), [BASE.replace(tokens=1), BASE], 1),
        (BASE.replace(tokens=3), [BASE, BASE.replace(tokens=4)], 1),
        (BASE.replace(tokens=16), [BASE.replace(tokens=t) for t in (1, 8, 2)], 1),
        (BASE.replace(state_dtype="fp16"), [BASE, BASE.replace(state_dtype="fp16", tokens=8)], 1),
        (BASE.replace(state_dtype="fp16"), [BASE], 0),
        (BASE.replace(mode="frozen"), [BASE, BASE.replace(mode="frozen", tokens=8)], 1),
        (BASE.replace(intermediate="dense"), [BASE, BASE.replace(intermediate="dense", mode="frozen")], 1),
        # a state a token weighs more than where it goes: outputs alone once served what writes each token's state
        (
            BASE.replace(intermediate="slots", mode="frozen"),
            [BASE.replace(mode="frozen"), BASE.replace(intermediate="indexed", mode="frozen", ragged=True)],
            1,
        ),
        (BASE.replace(ragged=True, tokens=4), [BASE.replace(ragged=True), BASE.replace(tokens=4)], 1),
        (BASE.replace(gate="log"), [BASE.replace(tokens=4), BASE], 1),
        (BASE.replace(gate="log"), [BASE, BASE.replace(gate="log")], 1),
        (BASE.replace(op="kda_decode", gate="log"), [BASE], None),
        (BASE.replace(K=64), [BASE], None),
        (BASE.replace(V=64), [BASE], None),
        (BASE.replace(layout="v_last"), [BASE], None),
        (BASE.replace(state_dtype="fp32"), [BASE], None),
    ],
)  # fmt: skip
def test_nearest_rule(asked, rules, nearest):
    """A contract takes its own rule, else the nearest by the stated order, else none."""
    found = with_rules(*rules).find(asked, 5)
    assert (None if found is None else rules.index(found[0].when)) == nearest


def test_ranked_lists_what_could_serve():
    """All rules that could serve, the nearest first, for a caller whose kernel refuses the first.
    """
    t = with_rules(*(BASE.replace(tokens=n) for n in (8, 1, 2)), BASE.replace(K=64))
    assert [r.when.tokens for r in t.ranked(BASE)] == [2, 1, 8]


@pytest.mark.parametrize(("ruled", "asked"), [(1, 4), (4, 1), (4, 2)])
def test_a_layers_step_of_one_token_is_another_kernel(ruled, asked):
    """Bug: the rule of one token, the nearest with an fp32 state, served four, 5% slower than the
    default rule.
    """
    step = Contract(norm="silu", conv="silu", state_dtype="fp32")
    found = with_rules(step.replace(tokens=ruled)).ranked(step.replace(tokens=asked))
    assert len(found) == (1 not in (ruled, asked))


def test_explain_says_what_and_why():
    """`explain` is plain JSON: exact or nearest, rule, interval, evidence, runner-up."""
    t = read(VALID)
    exact = t.explain(Contract(), 64)
    assert json.loads(json.dumps(exact)) == exact
    assert (exact["match"], exact["variant"], exact["interval"], exact["runner_up"]) == (
        "exact",
        "recurrent.tv16",
        [1, 90],
        "recurrent.tv8",
    )
    assert exact["evidence"]["work_units"] == 64
    assert (
        exact["reason"]
        == "the contract's own rule; at 64 work units its median is 4 us, and its mean 4.125 us, 0.2% over the best mean; the next best, recurrent.tv8, has a median of 4.5 us"
    )
    assert "at the nearest measured cell (8 work units) its median is" in t.explain(Contract(), 20)["reason"]

    slight = t.explain(Contract(gate_dtype="fp32", beta="given"), 64)
    assert slight["match"] == "exact" and slight["reason"].startswith(
        "the rule of this contract with other gate_dtype, beta, which hardly matters; at 64"
    )
    near = t.explain(Contract(tokens=5, mode="frozen"), 7)
    assert (near["match"], near["evidence"]) == ("nearest", None)
    assert near["differs"] == {"mode": {"asked": "frozen", "rule": "update"}, "tokens": {"asked": 5, "rule": 4}}
    assert near["reason"] == "the nearest rule, which differs in mode, tokens; nothing was measured in this interval"

    none = t.explain(Contract(K=64), 7)
    assert (none["match"], none["variant"]) == ("none", None)
    assert "no rule for op=gdn_decode, K=64" in none["reason"]


def test_stale_names_changed_and_missing_kernels():
    """A kernel whose installed code differs, or that is not there, is named; others are not looked
    at.
    """
    t = read(VALID)
    assert table.stale(t, {"recurrent": "f1", "other": "f9"}) == []
    assert table.stale(t, {"recurrent": "f2"}) == table.stale(t, {}) == ["recurrent"]


def test_save_is_whole_and_the_same_each_time(tmp_path):
    """Saving makes folders, reads back equal, gives equal bytes, and leaves nothing beside the
    file.
    """
    t = read(VALID)
    path = tmp_path / "h100" / "gdn_decode.json"
    table.save(t, path)
    first = path.read_bytes()
    assert table.load(path) == t
    table.save(table.load(path), path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failed_save_leaves_the_old_table(tmp_path, monkeypatch):
    """A disk that fills, or a table that is not valid, leaves the old file and no other."""
    t, path = read(VALID), tmp_path / "t.json"
    table.save(t, path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(files.os, "fsync", full)
        with pytest.raises(TableError, match="not written: No space left on device; what was there is unchanged"):
            table.save(t, path)
    origin = msgspec.structs.replace(t.evidence, regret_max=float("nan"))
    for wrong in ({"evidence": origin}, {"variants": {}}):
        with pytest.raises(TableError):
            table.save(msgspec.structs.replace(t, **wrong), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_line_an_interval(tmp_path):
    """A diff of two tables shows choices: an interval, and a variant, has a line of its own."""
    table.save(read(VALID), tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    lines = [line for line in text.splitlines() if '"from":' in line]
    assert len(lines) == sum(len(r["intervals"]) for r in VALID["rules"])
    assert all(line.count('"from":') == 1 for line in lines)
    assert table.load(tmp_path / "t.json") == read(VALID)


def test_shipped_tables_are_as_saved(tmp_path):
    """The shipped tables have the form that `save` writes, and every value survives it."""
    for path in sorted((Path(__file__).parents[2] / "tables").glob("*/*.json")):
        loaded = table.load(path)
        table.save(loaded, tmp_path / "t.json")
        assert (tmp_path / "t.json").read_bytes() == path.read_bytes()
        encoded = without_defaults(msgspec.json.encode(loaded))
        assert json.loads(path.read_bytes()) == json.loads(encoded)


def test_load_of_no_file(tmp_path):
    """A path without a file is named."""
    with pytest.raises(TableError, match=r"none\.json: No such file"):
        table.load(tmp_path / "none.json")
    with pytest.raises(TableError, match="null byte"):
        table.load("a\0b")


def test_published_schema_is_current():
    """docs/table.schema.json is what `json_schema` gives; write it anew with json.dumps(...,
    indent=1) where it is not.
    """
    assert SCHEMA.read_text() == json.dumps(table.json_schema(), indent=1) + "\n"
    jsonschema.Draft202012Validator.check_schema(table.json_schema())


def test_saved_table_satisfies_the_schema(tmp_path):
    """A saved table validates against the published schema, and a wrong one does not."""
    table.save(read(VALID), tmp_path / "t.json")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.validate(json.loads((tmp_path / "t.json").read_text()))
    for wrong in (changed("schema", "x"), changed(*FIRST, "from", 0), changed("rule", 1)):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)


def test_shipped_tables_are_valid():
    """Every table in tables/ loads."""
    for path in sorted((Path(__file__).parents[2] / "tables").glob("*/*.json")):
        assert isinstance(table.load(path), Table)


@pytest.fixture
def identical(tmp_path, monkeypatch):
    """Puts entries in place of those that ship."""

    def put(*entries):
        (tmp_path / "identical.json").write_text(json.dumps(entries))
        monkeypatch.setattr(fingerprint, "IDENTICAL", tmp_path / "identical.json")
        fingerprint._identical.cache_clear()

    yield put
    fingerprint._identical.cache_clear()


def test_code_that_compiles_to_the_same_objects_is_not_stale(identical):
    """Fault: a kernel whose text alone was rewritten made every table of it stale."""
    steps = (("recurrent", "f1", "f2"), ("recurrent", "f2", "f4"), ("wy", "f4", "f5"))
    identical(*(dict(zip(("kernel", "measured", "code"), step, strict=True)) for step in steps))
    t = read(VALID)
    assert t.kernels == {"recurrent": "f1"}
    for same in ("f2", "f4"):
        assert table.stale(t, {"recurrent": same}) == []
    for other in ("f3", "f5"):
        assert table.stale(t, {"recurrent": other}) == ["recurrent"]


def test_objects_that_were_compared_for_one_op_are_the_same_for_its_tables_alone(identical):
    entry = {"kernel": "recurrent", "measured": "f1", "code": "f2"}
    t = read(VALID)
    assert table.ops_of(t) == {"gdn_decode"}
    identical({**entry, "op": "gdn_decode"})
    assert table.stale(t, {"recurrent": "f2"}) == []
    both = ("gdn_decode", "kda_decode")
    assert not fingerprint.same_objects("recurrent", "f1", "f2", both)
    identical({**entry, "op": "kda_decode"})
    assert table.stale(t, {"recurrent": "f2"}) == ["recurrent"]
    identical({**entry, "op": "gdn_decode"}, {**entry, "op": "kda_decode"})
    assert fingerprint.same_objects("recurrent", "f1", "f2", both)


def test_objects_that_were_compared_without_a_knob_are_the_same_where_it_is_not_set(identical):
    """Fault: a kernel that was changed for some settings alone made the tables of all others stale."""
    t = read(VALID)
    settings = table.settings_of(t, "recurrent")
    assert settings and not any(k.get("tf32") for k in settings) and all(k["tile_v"] for k in settings)
    entry = {"kernel": "recurrent", "measured": "f1", "code": "f2"}
    identical({**entry, "without": "tf32"})
    assert table.stale(t, {"recurrent": "f2"}) == []
    assert fingerprint.same_objects("recurrent", "f1", "f2", ("gdn_decode",), [{"tf32": False}])
    assert not fingerprint.same_objects("recurrent", "f1", "f2", ("gdn_decode",), [{}, {"tf32": True}])
    identical({**entry, "without": "tile_v"})
    assert table.stale(t, {"recurrent": "f2"}) == ["recurrent"]
