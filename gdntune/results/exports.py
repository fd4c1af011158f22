"""A run in the forms that other tools read: Kernel Tuner's T4 files, and traces of
flashinfer-bench.

Both are folders of small files. What a form has no place for is left out and counted in a note;
nothing is made up to fill a field.
"""

import json
import random
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gdntune.results import derive
from gdntune import kernels
from gdntune.errors import counted
from gdntune.results.records import Build, Check, Trial
from gdntune.problem import Contract, Problem
from gdntune.results.samples import LoadedRun, Row, tried

PEER = "peer:"


class Export(NamedTuple):
    """Files by their path within a folder, and what could not be said in them."""

    files: dict[str, bytes]
    notes: list[str]


def _json(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def _placed(sources: Sequence[LoadedRun], source: LoadedRun) -> str:
    """A folder for each run where there are several."""
    return f"{source.name}/" if len(sources) > 1 else ""


# -- Kernel Tuner

T4_VERSION = "1.0.0"
# T4's words for why a configuration has no times.
_INVALID = {
    "ok": "correct",
    "failed": "runtime",
    "crashed": "runtime",
    "impossible": "runtime",
    "timeout": "timeout",
}
_UNITS = {
    **dict.fromkeys(("median_us", "mean_us", "q1_us", "q3_us", "min_us", "floor_us"), "us"),
    "bandwidth_gb_s": "GB/s",
}
_MEASURED = (
    *_UNITS,
    "sol",
    "over_floor",
    "speedup_over_default",
    "samples",
    "outliers",
    "bytes_moved",
    "bound",
    "chosen",
)


def kernel_tuner(sources: Sequence[LoadedRun]) -> Export:
    """T4 files: results of each cell, a search space each, and metadata of the run.

    A configuration is a kernel's name and its knobs; floors and peers are none. Times are in
    milliseconds, as Kernel Tuner's; `runtimes` are the final samples, else the screening ones. The
    form is that of kernel_tuner/schema/T4/1.0.0 in github.com/KernelTuner/kernel_tuner.
    """
    files: dict[str, bytes] = {}
    notes: list[str] = []
    for source in sources:
        place = _placed(sources, source)
        for problem, results in _results(source).items():
            files[f"{place}{problem.key()}.json"] = _json(
                {"results": results, "schema_version": T4_VERSION}
            )
        files[f"{place}metadata.json"] = _json(_metadata(source))
        lost = sum(isinstance(r, Build) and r.status != "ok" for r in source.records)
        if lost:
            notes.append(
                f"{source.name}: {counted(lost, 'object')} did not compile; a journal does not say for which"
                " cells: left out"
            )
    return Export(files, notes)


def _results(source: LoadedRun) -> dict[Problem, list[dict[str, Any]]]:
    """By cell, a result for each variant that was timed there, then for each that failed its check
    and was timed nowhere.
    """
    checks = {(r.contract, r.variant): r for r in source.records if isinstance(r, Check)}
    cells: dict[Problem, list[dict[str, Any]]] = {
        problem: [] for problem in sorted(derive.passes(source.records))
    }
    seen: set[tuple[Problem, str]] = set()
    for trial, row in tried(source):
        if trial.role == "decode":
            seen.add((trial.problem, trial.variant.id))
            check = checks.get((trial.problem.contract, trial.variant.id))
            seconds = None if check is None else check.seconds
            cells[trial.problem].append(_result(source, trial, row, seconds))
    failed = {
        (r.contract, r.variant): r
        for r in source.records
        if isinstance(r, Check) and r.status != "ok"
    }
    for problem, results in cells.items():
        results += [
            _never_timed(source, problem.contract, check)
            for (contract, variant), check in failed.items()
            if contract == problem.contract
            and not variant.startswith(PEER)
            and (problem, variant) not in seen
        ]
    return cells


def _result(
    source: LoadedRun, trial: Trial, row: Row, check_seconds: float | None
) -> dict[str, Any]:
    times: dict[str, Any] = {"runtimes": [round(us / 1e3, 9) for us in trial.samples_us]}
    if check_seconds is not None:
        times["validation"] = round(1e3 * check_seconds, 3)
    # A time that was refused is not the objective's value.
    measurements = [_measured("time", row.median_ms, "ms")] if row.status == "ok" else []
    measurements += [
        _measured(name, str(value) if isinstance(value, bool) else value, _UNITS.get(name, ""))
        for name in _MEASURED
        if (value := getattr(row, name)) is not None
    ]
    measurements += [_measured("variant", trial.variant.id), _measured("stage", trial.stage)]
    if row.status != "ok":
        measurements.append(_measured("reason", row.reason))
    return {
        "timestamp": source.run.started,
        "configuration": {"kernel": trial.variant.kernel, **trial.variant.knobs},
        "times": times,
        "invalidity": _INVALID[row.status],
        "correctness": int(row.verified == "ok"),
        "measurements": measurements,
        "objectives": ["time"],
    }


def _never_timed(source: LoadedRun, contract: Contract, check: Check) -> dict[str, Any]:
    """A variant that failed its check. A journal has its id; its knobs are those of the kernels as
    installed, where they know it.
    """
    known = kernels.variants(
        contract, source.run.device, l2=source.run.policy.get("l2", "cold-clean")
    )
    v = next((v for v in known if v.id == check.variant), None)
    configuration = {"variant": check.variant} if v is None else {"kernel": v.kernel, **v.knobs}
    measurements = [_measured("variant", check.variant), _measured("reason", check.reason)]
    return {
        "timestamp": source.run.started,
        "configuration": configuration,
        "times": {"validation": round(1e3 * check.seconds, 3)},
        "invalidity": "correctness" if check.status == "failed" else _INVALID[check.status],
        "correctness": 0,
        "measurements": measurements,
        "objectives": ["time"],
    }


def _measured(name: str, value: Any, unit: str = "") -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def _metadata(source: LoadedRun) -> dict[str, Any]:
    run = source.run
    device = {**msgspec.to_builtins(run.device), "peaks_gb_s": run.peaks}
    return {
        "metadata": {
            "hardware": {"hardware_description": [device]},
            "environment": {
                "device_query": device,
                "requirements": [
                    f"{name}=={version}" for name, version in sorted(run.software.items())
                ],
                "kernels": run.kernels,
                "policy": run.policy,
                "config": run.config,
                "config_sha256": run.config_sha256,
                "journal_sha256": source.digest,
                "command": run.command,
            },
        },
        "schema_version": T4_VERSION,
    }


# -- flashinfer-bench

# The heads (q/k, value) of its published definitions, all with head size 128.
PUBLISHED_HEADS = ((16, 32), (8, 16), (4, 8))
AUTHOR = "gdntune"
_ALWAYS: dict[str, Any] = {
    "op": "gdn_decode",
    "layout": "k_last",
    "input_dtype": "bf16",
    "state_dtype": "fp32",
    "gate_dtype": "bf16",
    "beta_dtype": "bf16",
    "A_log_dtype": "fp32",
    "dt_bias_dtype": "fp32",
    "gate": "raw",
    "beta": "logit",
    "accepted": False,
    "ragged": False,
    "norm": "none",
    "conv": "none",
}
_STATUS = {
    "failed": "RUNTIME_ERROR",
    "crashed": "RUNTIME_ERROR",
    "impossible": "RUNTIME_ERROR",
    "timeout": "TIMEOUT",
}
_RANDOM = {"type": "random"}
# What the errors of a check are: ours, and peers'.
_EXCESS = (
    "difference beyond half a spacing of the dtype, over the scale of a row of the fp64 reference"
)
_NORM = "norm of the difference over the norm of the fp64 reference, of a request's output or state"
_HEADS: dict[str, Callable[[Mapping[str, int]], bool]] = {
    "num_v_heads >= num_q_heads": lambda x: x["num_v_heads"] >= x["num_q_heads"],
    "num_v_heads % num_q_heads == 0": lambda x: x["num_v_heads"] % x["num_q_heads"] == 0,
    "num_k_heads == num_q_heads": lambda x: x["num_k_heads"] == x["num_q_heads"],
}


class _Form(NamedTuple):
    """A kind of definition: its free axes, constraints on all axes, inputs, and what a contract
    must be beyond _ALWAYS.
    """

    stage: str
    free: tuple[str, ...]
    constraints: dict[str, Callable[[Mapping[str, int]], bool]]
    inputs: tuple[str, ...]
    contract: dict[str, tuple[Any, ...]]


# As in flashinfer_trace/definitions/gdn of github.com/flashinfer-ai/flashinfer-bench. The reference
# of decode returns the new state, that of mtp the pool as it was.
_DECODE = _Form(
    "decode",
    ("batch_size",),
    _HEADS,
    ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b"),
    {"tokens": (1,), "mode": ("update",), "intermediate": ("none",)},
)
_MTP = _Form(
    "mtp",
    ("batch_size", "seq_len", "pool_size"),
    {**_HEADS, "seq_len > 1": lambda x: x["seq_len"] > 1},
    ("q", "k", "v", "initial_state", "A_log", "a", "dt_bias", "b"),
    {"mode": ("frozen",), "intermediate": ("none", "dense", "indexed"), "pool": (True,)},
)


class Workload(NamedTuple):
    """A problem as a definition has it. axes: all of them; free: the names of those that a workload
    gives.
    """

    definition: str
    axes: dict[str, int]
    free: tuple[str, ...]
    inputs: tuple[str, ...]


def workload(problem: Problem) -> Workload | str:
    """The definition `gdn_decode_*_k_last` or `gdn_mtp_*_k_last` of a problem with its axes; or why
    there is none.
    """
    c = problem.contract
    if c.layout == "v_last":
        return (
            "layout=v_last: the state is [.., K, V], which is another definition (_v_last) than"
            " those of _k_last"
        )
    if c.op != _ALWAYS["op"]:
        return f"op={c.op}: the definitions are of {_ALWAYS['op']}"
    # One token that is written back is decode; everything else is mtp, which leaves the pool as it
    # was.
    form = _DECODE if (c.tokens, c.mode) == (1, "update") else _MTP
    accepted = {**{name: (value,) for name, value in _ALWAYS.items()}, **form.contract}
    for name, values in accepted.items():
        if getattr(c, name) not in values:
            return (
                f"{name}={getattr(c, name)}: gdn_{form.stage} has {' or '.join(map(str, values))}"
            )
    if c.K != c.V:
        return f"K={c.K}, V={c.V}: the definitions have one head_size"
    axes = {
        "batch_size": problem.B,
        "seq_len": c.tokens,
        "num_q_heads": problem.H,
        "num_k_heads": problem.H,
        "num_v_heads": problem.HV,
        "head_size": c.K,
        "pool_size": problem.B,
    }
    for text, holds in form.constraints.items():
        if not holds(axes):
            return (
                f"gdn_{form.stage} asks for {text}:"
                f" {', '.join(f'{n}={axes[n]}' for n in axes if n in text)}"
            )
    name = f"gdn_{form.stage}_qk{problem.H}_v{problem.HV}_d{c.K}_k_last"
    buffer = () if c.intermediate == "none" else ("intermediate_states_buffer",)
    return Workload(name, axes, form.free, (*form.inputs, *buffer))


def flashinfer_bench(sources: Sequence[LoadedRun]) -> Export:
    """Traces by definition, `traces/gdntune/gdn/NAME.jsonl` of a data set, with the slots of pools
    as safetensors below `blob/`.

    One trace a cell and implementation with final samples: ours, the default rule's and peers'
    entries, also those that failed. A problem that no definition fits, V-last ones among them, is a
    note. latency_ms is the median.
    """
    lines: dict[str, list[bytes]] = {}
    files: dict[str, bytes] = {}
    left: Counter[str] = Counter()
    strange: dict[str, None] = {}
    for source in sources:
        errors = {(r.contract, r.variant): r.error for r in source.records if isinstance(r, Check)}
        refused: set[Problem] = set()
        for trial, row in tried(source):
            found = workload(trial.problem)
            if isinstance(found, str):
                if trial.problem not in refused:
                    left[f"{trial.problem.contract.key()}: {found}"] += 1
                    refused.add(trial.problem)
                continue
            if not _is_solution(trial):
                continue
            evaluation = _evaluation(
                source, trial, row, errors.get((trial.problem.contract, trial.variant.id))
            )
            if evaluation is None:
                left["timed without a passed check of its own"] += 1
                continue
            solution = (
                trial.variant.id.removeprefix(PEER)
                if trial.role == "peer"
                else f"{AUTHOR}.{trial.variant.id}"
            )
            made = _workload(found, files)
            lines.setdefault(found.definition, []).append(
                json.dumps({"definition": found.definition, "workload": made, "solution": solution, "evaluation": evaluation}).encode()
            )  # fmt: skip
            if (trial.problem.H, trial.problem.HV) not in PUBLISHED_HEADS or found.axes[
                "head_size"
            ] != 128:
                strange[found.definition] = None
    for name, its in lines.items():
        files[f"traces/{AUTHOR}/gdn/{name}.jsonl"] = b"".join(line + b"\n" for line in its)
    notes = [f"{n} left out: {reason}" for reason, n in sorted(left.items())]
    notes += [
        f"{name}: flashinfer-bench publishes no definition of these heads; give it one of its form"
        for name in strange
    ]
    return Export(files, notes)


def _is_solution(trial: Trial) -> bool:
    """Whether a trial is of what solves a definition, with final samples.

    None is a whole peer that serves no such problem, what does more than the contract, and ours
    with that behind it.
    """
    return (
        trial.role not in ("floor", "partner")
        and "partner" not in trial.variant.knobs
        and trial.to_the_end
        and trial.variant.id != trial.variant.kernel
    )


def _workload(found: Workload, files: dict[str, bytes]) -> dict[str, Any]:
    inputs: dict[str, Any] = dict.fromkeys(found.inputs, _RANDOM)
    inputs["scale"] = {"type": "scalar", "value": found.axes["head_size"] ** -0.5}
    if "pool_size" in found.free:
        # Random indices would name slots that are not there.
        B = found.axes["batch_size"]
        # One file a batch size: slots depend on nothing else, and traces share it.
        path = f"blob/workloads/gdn/slots_{B}.safetensors"
        files[path] = _safetensors("initial_state_indices", random.Random(B).sample(range(B), B))
        inputs["initial_state_indices"] = {
            "type": "safetensors",
            "path": path,
            "tensor_key": "initial_state_indices",
        }
    axes = {name: found.axes[name] for name in found.free}
    said = json.dumps([found.definition, axes, inputs], sort_keys=True)
    # From the contents, so that the same workload has one name in all exports.
    return {"axes": axes, "inputs": inputs, "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, said))}


def _safetensors(name: str, values: Sequence[int]) -> bytes:
    """A file with one int32 tensor: the header's length, the header as JSON to a multiple of 8
    bytes, the data.
    """
    # Written by hand: the library is no dependency, and the form is a header and the numbers.
    data = struct.pack(f"<{len(values)}i", *values)
    header = json.dumps(
        {name: {"dtype": "I32", "shape": [len(values)], "data_offsets": [0, len(data)]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def _evaluation(
    source: LoadedRun, trial: Trial, row: Row, error: float | None
) -> dict[str, Any] | None:
    run = source.run
    # NaN, as text: the form's word for a number that is not there.
    correctness = {
        "max_relative_error": "NaN" if error is None else error,
        "max_absolute_error": "NaN",
        "extra": {"measure": _NORM if trial.role == "peer" else _EXCESS},
    }
    said: dict[str, Any] = {
        "status": "PASSED",
        "environment": {"hardware": run.device.name, "libs": run.software},
        "timestamp": run.started,
        "log": " ".join(_log(source, trial)),
    }
    if row.status != "ok":
        wrong = row.status == "failed" and trial.reason.startswith("check failed")
        said |= {
            "status": "INCORRECT_NUMERICAL" if wrong else _STATUS[row.status],
            "log": row.reason,
        }
        # The form allows the errors of a wrong result, and none of a call that did not return.
        return {**said, "correctness": correctness} if wrong else said
    if row.verified != "ok":
        return None
    return {
        **said,
        "correctness": correctness,
        "performance": {"latency_ms": row.median_ms},
    }


def _log(source: LoadedRun, trial: Trial) -> Iterator[str]:
    """What the definition does not say of the call that was timed."""
    c, policy = trial.problem.contract, source.run.policy
    timed = (
        f"Median of {len(trial.samples_us)} samples, timer {policy.get('timer')}, L2 policy"
        f" {policy.get('l2')}"
    )
    yield f"{timed}; gdntune journal {source.digest[:16]}."
    yield (
        "q and k were normalised within the call (use_qk_l2norm), which the definition leaves to"
        " its inputs."
    )
    if c.mode == "update" and c.pool:
        yield "States lay in a pool and were updated in place by slot."
    if c.intermediate == "dense":
        yield "States between tokens went to rows by request, not by slot."
