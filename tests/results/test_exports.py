"""gdntune/results/exports.py: Kernel Tuner's T4 files and flashinfer-bench's traces, as their readers take
them.
"""

import json
import re
import struct

import jsonschema
import pytest
import synthetic
from typer.testing import CliRunner

from gdntune import kernels
from gdntune.cli.app import app
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report.report import report
from gdntune.results import exports
from gdntune.results.records import Build, Cell, Check, Trial

# What kernel_tuner/schema/T4/1.0.0/results-schema.json of github.com/KernelTuner/kernel_tuner asks
# for, in our words; stricter where it
# leaves a type open that its readers rely on.
NUMBERS = {"type": "array", "items": {"type": "number"}}
MEASUREMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "value": {"type": ["number", "string", "array"]},
        "unit": {"type": "string"},
    },
    "required": ["name", "value", "unit"],
}
T4_RESULT = {
    "type": "object",
    "properties": {
        "timestamp": {"type": "string"},
        "configuration": {"type": "object"},
        "objectives": {"type": "array", "items": {"type": "string"}},
        "times": {"type": "object", "properties": {"runtimes": NUMBERS, "validation": {"type": "number"}}},
        "invalidity": {"enum": ["timeout", "compile", "runtime", "correctness", "constraints", "correct"]},
        "correctness": {"type": "number"},
        "measurements": {"type": "array", "items": MEASUREMENT},
    },
    "required": ["configuration", "times", "invalidity", "correctness"],
}
T4 = {
    "type": "object",
    "properties": {
        "schema_version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "results": {"type": "array", "items": T4_RESULT},
    },
    "required": ["schema_version", "results"],
}
# And its metadata-schema.json.
T4_METADATA = {
    "type": "object",
    "properties": {
        "schema_version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "metadata": {
            "type": "object",
            "properties": {
                "hardware": {"type": "object", "properties": {"hardware_description": {"type": "array"}}},
                "environment": {
                    "type": "object",
                    "properties": {"device_query": {"type": "object"}, "requirements": {"type": "array"}},
                },
            },
        },
    },
}
PEER = Variant("peer:flashinfer", "peer:flashinfer.gated_delta_rule_mtp", {"version": "0.7.2", "form": "as it comes"})
NOBODY = Variant("peer:fla", "peer:fla", {"version": "0.6"})
DECODE = Contract(state_dtype="fp32")
MTP = Contract(state_dtype="fp32", tokens=4, mode="frozen")


def made_of(folder, *problems, extra=()):
    """The report of made-up cells, with more records before each cell's end."""
    header = synthetic.run()
    records = [
        Check(contract=c, variant=v.id, status="ok", error=2e-7, seconds=0.5)
        for c in {p.contract: None for p in problems}
        for v in synthetic.VARIANTS
    ]
    for p in problems:
        *trials, closing = synthetic.cell(p, header)
        records += [*trials, *(r for r in extra if getattr(r, "problem", p) == p), closing]
    return report([synthetic.write(folder, header, records, with_table=False)])


def documents(export):
    """The JSON files by name."""
    return {name: json.loads(data) for name, data in export.files.items() if name.endswith(".json")}


def traces(export):
    """Every trace of every file."""
    return [json.loads(x) for name, data in export.files.items() if name.endswith(".jsonl") for x in data.splitlines()]


# -- Kernel Tuner


def test_t4_of_each_cell(tmp_path):
    """A file a cell that its schema accepts: every variant tried is a configuration of knobs, with
    its samples in ms; no floor, no peer.
    """
    problems = [Problem(DECODE, B, 8, 16) for B in (1, 4)]
    trial = Trial(problem=problems[0], variant=PEER, role="peer", stage="final", status="ok", samples_us=[5.0] * 9)
    made = made_of(tmp_path, *problems, extra=[trial])
    export = exports.kernel_tuner(made.sources)
    found = documents(export)
    jsonschema.validate(found.pop("metadata.json"), T4_METADATA, jsonschema.Draft202012Validator)
    assert set(found) == {f"{p.key()}.json" for p in problems}
    assert export.notes == []
    for problem in problems:
        document = found[f"{problem.key()}.json"]
        jsonschema.validate(document, T4, jsonschema.Draft202012Validator)
        configurations = [r["configuration"] for r in document["results"]]
        assert sorted(map(str, configurations)) == sorted(
            str({"kernel": v.kernel, **v.knobs}) for v in synthetic.VARIANTS
        )
        frame = made.frame[made.frame["B"] == problem.B].set_index("variant")
        for r in document["results"]:
            said = {m["name"]: m for m in r["measurements"]}
            row = frame.loc[said["variant"]["value"]]
            assert (r["invalidity"], r["correctness"], r["objectives"]) == ("correct", 1, ["time"])
            assert said["time"]["unit"] == "ms" and said["time"]["value"] == pytest.approx(row["median_us"] / 1e3)
            assert len(r["times"]["runtimes"]) == row["samples"] and r["times"]["validation"] == 500
            assert said["chosen"]["value"] == str(row["chosen"])


@pytest.mark.parametrize(
    ("status", "invalidity"), [("crashed", "runtime"), ("failed", "runtime"), ("timeout", "timeout")]
)
def test_t4_of_failures(tmp_path, status, invalidity):
    """A trial that failed has T4's word for it and the reason, and no time."""
    problem = Problem(DECODE, 4, 8, 16)
    lost = Variant("recurrent", "recurrent.tv128", {"tile_v": 128})
    trial = Trial(problem=problem, variant=lost, stage="screen", status=status, reason="exit code -11")
    [result] = [
        r
        for r in documents(exports.kernel_tuner(made_of(tmp_path, problem, extra=[trial]).sources))[f"{problem.key()}.json"]["results"]
        if r["configuration"] == {"kernel": "recurrent", "tile_v": 128}
    ]  # fmt: skip
    said = {m["name"]: m["value"] for m in result["measurements"]}
    assert (result["invalidity"], result["correctness"]) == (invalidity, 0)
    assert said["reason"] == "exit code -11" and "time" not in said and result["times"]["runtimes"] == []


def test_refused_times_are_no_results(tmp_path):
    """A share of the DRAM's peak above 100% under cold-dirty is refused: no objective in T4, no
    latency in a trace.
    """
    header, problem = synthetic.run(policy={"timer": "cupti", "l2": "cold-dirty"}), Problem(DECODE, 512, 8, 16)
    checks = [Check(contract=DECODE, variant=v.id, status="ok") for v in synthetic.VARIANTS]
    records = [*checks, *synthetic.cell(problem, header, slow=0.5)]
    sources = report([synthetic.write(tmp_path, header, records, with_table=False)]).sources
    results = documents(exports.kernel_tuner(sources))[f"{problem.key()}.json"]["results"]
    assert {r["invalidity"] for r in results} == {"runtime"}
    assert not any(m["name"] == "time" for r in results for m in r["measurements"])
    found = traces(exports.flashinfer_bench(sources))
    assert found and all(fault_of(t) == "RUNTIME_ERROR" and "cold-dirty" in t["evaluation"]["log"] for t in found)


def test_t4_of_what_never_was_timed(tmp_path):
    """A variant that failed its check is invalid at each cell of its contract; what did not compile
    is counted, not placed.
    """
    problems = [Problem(DECODE, B, 8, 16) for B in (1, 4)]
    header = synthetic.run()
    known = kernels.variants(DECODE, header.device)[-1]
    records = [Check(contract=DECODE, variant=v.id, status="ok") for v in synthetic.VARIANTS]
    records += [
        Check(contract=DECODE, variant=known.id, status="failed", reason="output[0]"),
        Check(contract=DECODE, variant="no.longer.known", status="timeout"),
        Check(contract=DECODE.replace(tokens=2), variant=known.id, status="failed"),
        Build(kernel="recurrent", variant="x", object_key="k", status="failed", reason="no"),
    ]
    for p in problems:
        records += synthetic.cell(p, header)
    export = exports.kernel_tuner(report([synthetic.write(tmp_path, header, records, with_table=False)]).sources)
    for p in problems:
        results = documents(export)[f"{p.key()}.json"]["results"]
        jsonschema.validate(results, {"type": "array", "items": T4_RESULT})
        assert [r["invalidity"] for r in results[-2:]] == ["correctness", "timeout"] and len(results) == 6
        assert results[-1]["configuration"] == {"variant": "no.longer.known"}
        assert results[-2]["configuration"] == {"kernel": known.kernel, **known.knobs}
    assert export.notes == ["synthetic: 1 object did not compile; a journal does not say for which cells: left out"]


# -- flashinfer-bench


@pytest.mark.parametrize(
    ("contract", "name"),
    [
        (DECODE, "gdn_decode_qk8_v16_d128_k_last"),
        (DECODE.replace(pool=False), "gdn_decode_qk8_v16_d128_k_last"),
        (MTP, "gdn_mtp_qk8_v16_d128_k_last"),
        (MTP.replace(intermediate="dense"), "gdn_mtp_qk8_v16_d128_k_last"),
        (MTP.replace(intermediate="indexed"), "gdn_mtp_qk8_v16_d128_k_last"),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else x,
)
def test_definitions(contract, name):
    """What the definitions compute, and the axes that a workload of each has."""
    found = exports.workload(Problem(contract, 3, 8, 16))
    assert found.definition == name
    axes = {n: found.axes[n] for n in found.free}
    assert axes == {"batch_size": 3} if "decode" in name else {"batch_size": 3, "seq_len": 4, "pool_size": 3}
    assert found.axes["num_k_heads"] == found.axes["num_q_heads"] == 8
    assert ("intermediate_states_buffer" in found.inputs) == (contract.intermediate != "none")


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (DECODE.replace(layout="v_last"), r"layout=v_last: the state is \[.., K, V\]"),
        (MTP.replace(layout="v_last"), "_v_last"),
        (DECODE.replace(state_dtype="bf16"), "state_dtype=bf16: gdn_decode has fp32"),
        (DECODE.replace(dt_bias_dtype="bf16"), "dt_bias_dtype=bf16"),
        (DECODE.replace(gate="log"), "gate=log"),
        (DECODE.replace(mode="frozen"), "gdn_mtp asks for seq_len > 1: seq_len=1"),
        (MTP.replace(mode="update"), "mode=update: gdn_mtp has frozen"),
        (MTP.replace(intermediate="slots"), "intermediate=slots"),
        (MTP.replace(ragged=True), "ragged=True"),
        (MTP.replace(pool=False), "pool=False"),
        (DECODE.replace(V=64), "K=128, V=64"),
        (Contract(op="kda_decode", gate="softplus", state_dtype="fp32"), "op=kda_decode"),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else None,
)
def test_what_no_definition_fits(contract, reason):
    """Anything else is refused with what is not as the definition has it; V-last is told apart
    although K=V.
    """
    found = exports.workload(Problem(contract, 3, 8, 16))
    assert isinstance(found, str)
    assert re.search(reason, found)


def test_constraints_are_evaluated():
    """Heads that the definitions' constraints exclude are refused by the constraint's text,
    whatever a journal holds.
    """
    assert "num_v_heads >= num_q_heads: num_q_heads=16, num_v_heads=8" in exports.workload(Problem(DECODE, 1, 16, 8))
    assert "num_v_heads % num_q_heads == 0" in exports.workload(Problem(DECODE, 1, 16, 24))


def fault_of(trace):
    """What flashinfer_bench/data/trace.py and workload.py of
    github.com/flashinfer-ai/flashinfer-bench refuse of a trace.
    """
    assert set(trace) == {"definition", "workload", "solution", "evaluation"}
    made, evaluation = trace["workload"], trace["evaluation"]
    assert set(made) == {"axes", "inputs", "uuid"} and all(type(x) is int and x > 0 for x in made["axes"].values())
    for given in made["inputs"].values():
        assert set(given) in ({"type"}, {"type", "value"}, {"type", "path", "tensor_key"})
        assert given["type"] in ("random", "scalar", "safetensors")
    assert evaluation["environment"]["hardware"] and all(
        isinstance(v, str) for v in evaluation["environment"]["libs"].values()
    )
    status = evaluation["status"]
    assert status in ("PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "TIMEOUT")
    assert ("performance" in evaluation) == (status == "PASSED")
    assert ("correctness" in evaluation) == (status in ("PASSED", "INCORRECT_NUMERICAL"))
    for name in ("max_relative_error", "max_absolute_error") if "correctness" in evaluation else ():
        assert float(evaluation["correctness"][name]) >= 0 or evaluation["correctness"][name] == "NaN"
    return status


def test_traces(tmp_path):
    """One trace a cell and final implementation, peers' among them; failures have their status;
    each is what its reader accepts.
    """
    problem = Problem(MTP, 4, 8, 16)

    def peer(entry, status, reason="", samples=()):
        v = Variant(PEER.kernel, f"{PEER.kernel}.{entry}", PEER.knobs)
        return Trial(
            problem=problem,
            variant=v,
            role="peer",
            stage="final",
            status=status,
            reason=reason,
            samples_us=list(samples),
        )

    extra = [
        Check(contract=MTP, variant=f"{PEER.kernel}.good", status="ok", error=1e-3),
        peer("good", "ok", samples=[7.0] * 5),
        peer("wrong", "failed", "check failed: state of request 0"),
        peer("raises", "failed", "AssertionError: no"),
        peer("dies", "crashed", "process died"),
        peer("hangs", "timeout", "600 s"),
        Trial(problem=problem, variant=NOBODY, role="peer", stage="final", status="failed", reason="no such op"),
    ]
    made = made_of(tmp_path, problem, extra=extra)
    export = exports.flashinfer_bench(made.sources)
    assert set(export.files) == {
        "traces/gdntune/gdn/gdn_mtp_qk8_v16_d128_k_last.jsonl", "blob/workloads/gdn/slots_4.safetensors",
    }  # fmt: skip
    found = {t["solution"]: t for t in traces(export)}
    assert {name.removeprefix("flashinfer."): fault_of(t) for name, t in found.items()} == {
        "gdntune.recurrent.tv16.ilp2": "PASSED",
        "gdntune.recurrent.tv16.ilp4": "PASSED",
        "good": "PASSED",
        "wrong": "INCORRECT_NUMERICAL",
        "raises": "RUNTIME_ERROR",
        "dies": "RUNTIME_ERROR",
        "hangs": "TIMEOUT",
    }
    good = found["flashinfer.good"]["evaluation"]
    assert good["performance"] == {"latency_ms": 0.007} and good["correctness"]["max_relative_error"] == 1e-3
    assert good["environment"]["hardware"] == "NVIDIA H100 80GB HBM3" and "cold-clean" in good["log"]
    assert found["flashinfer.dies"]["evaluation"]["log"] == "process died"
    assert len({t["workload"]["uuid"] for t in found.values()}) == 1
    assert export.notes == []
    assert exports.flashinfer_bench(made.sources) == export


def test_slots_are_a_permutation(tmp_path):
    """Random indices would leave the pool, so those of a workload are in a file of one int32 tensor
    that names each slot once.
    """
    [trace, *_] = traces(export := exports.flashinfer_bench(made_of(tmp_path, Problem(MTP, 7, 8, 16)).sources))
    given = trace["workload"]["inputs"]["initial_state_indices"]
    data = export.files[given["path"]]
    [length] = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])[given["tensor_key"]]
    assert (header["dtype"], header["shape"], header["data_offsets"]) == ("I32", [7], [0, 28])
    assert sorted(struct.unpack("<7i", data[8 + length :])) == list(range(7))
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: the file is read by hand alone"
    )
    assert sorted(safetensors.load(data)[given["tensor_key"]].tolist()) == list(range(7))


def test_what_is_left_out_is_said(tmp_path):
    """V-last and bf16 cells are notes with their number, also heads that no published definition
    has, and times without a check.
    """
    v_last = DECODE.replace(layout="v_last")
    problems = [
        Problem(v_last, 1, 8, 16),
        Problem(v_last, 2, 8, 16),
        Problem(Contract(), 1, 8, 16),
        Problem(DECODE, 1, 16, 64),
    ]
    trial = Trial(problem=problems[-1], variant=PEER, role="peer", stage="final", status="ok", samples_us=[7.0] * 5)
    export = exports.flashinfer_bench(made_of(tmp_path, *problems, extra=[trial]).sources)
    assert {t["definition"] for t in traces(export)} == {"gdn_decode_qk16_v64_d128_k_last"}
    text = "\n".join(export.notes)
    assert "2 left out: gdn_decode.tokens=1.layout=v_last.state_dtype=fp32: layout=v_last" in text
    assert "1 left out: gdn_decode.tokens=1: state_dtype=bf16" in text
    assert "1 left out: timed without a passed check" in text
    assert "gdn_decode_qk16_v64_d128_k_last: flashinfer-bench publishes no definition of these heads" in text


# -- the command


@pytest.mark.parametrize(("form", "wanted"), [("kernel-tuner", "metadata.json"), ("flashinfer-bench", "traces")])
def test_the_command(tmp_path, form, wanted):
    """A folder in the run's own, or where --out says; twice the same bytes; what was left out goes
    to stderr.
    """
    made_of(tmp_path / "run", Problem(DECODE, 2, 8, 16), Problem(Contract(), 2, 8, 16))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--format", form])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run" / form
    assert done.stdout.startswith(f"{folder}: ") and (folder / wanted).exists()
    assert ("state_dtype=bf16" in done.stderr) == (form == "flashinfer-bench")
    again = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--format", form, "--out", str(tmp_path / "out")])
    assert again.exit_code == 0, again.output
    written = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*.json*")} for f in (folder, tmp_path / "out")]
    assert written[0] == written[1] != {}


def test_the_command_refuses(tmp_path):
    """What has no place in these forms, and a folder that cannot be made, are refused."""
    made_of(tmp_path / "run", Problem(DECODE, 2, 8, 16))
    run = ["report", str(tmp_path / "run"), "--format", "kernel-tuner"]
    for more in (["--baseline", "default"], ["--against", "published:flashinfer-pr-3127"]):
        done = CliRunner().invoke(app, [*run, *more])
        assert done.exit_code == 2 and "leave them out" in done.stderr
    (tmp_path / "file").write_text("x")
    done = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "file")])
    assert done.exit_code == 2 and "cannot be written" in done.stderr


def test_several_runs_have_a_folder_each(tmp_path):
    """Cells of two runs do not overwrite each other."""
    for name in ("one", "two"):
        made_of(tmp_path / name, Problem(DECODE, 2, 8, 16))
    made = report([tmp_path / "one", tmp_path / "two"])
    names = {s.name for s in made.sources}
    assert {p.partition("/")[0] for p in exports.kernel_tuner(made.sources).files} == names


def test_an_unfinished_run(tmp_path):
    """A run without a cell has metadata and no results."""
    header = synthetic.run()
    made = report([synthetic.write(tmp_path, header, [], with_table=False)])
    assert set(exports.kernel_tuner(made.sources).files) == {"metadata.json"}
    assert exports.flashinfer_bench(made.sources) == exports.Export({}, [])
    failed = Cell(problem=Problem(DECODE, 1, 8, 16), status="failed", reason="none passed")
    made = report([synthetic.write(tmp_path / "b", header, [failed], with_table=False)])
    assert documents(exports.kernel_tuner(made.sources))[f"{failed.problem.key()}.json"]["results"] == []
