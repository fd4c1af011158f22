"""What is wrong with a call's arguments, in words: used after a compiled function refused them, and by GDNTUNE_CHECK=1.

The hot path looks at nothing here. A compiled call checks dtypes, ranks, tied sizes, strides and alignment by itself; this module says
which public argument that was, what was given and what is accepted.
"""

from collections.abc import Iterator
from typing import Any

from gdntune.errors import GdntuneError, UnsupportedProblem
from gdntune.kernels.spec import DECODE_ARGUMENTS
from gdntune.problem import Contract

# The public name of each argument of the calling convention.
PUBLIC = {
    "state": "initial_state",
    "read_index": "initial_state_indices",
    "write_index": "output_state_indices",
    "accepted": "num_accepted_tokens",
    "intermediate": "intermediate_states_buffer",
}


def public_name(name: str, contract: Contract) -> str:
    """What the caller calls an argument of the calling convention."""
    if name == "slot_index":
        return "ssm_state_indices" if contract.intermediate == "slots" else "intermediate_state_indices"
    if name == "a" and (contract.op == "kda_decode" or contract.gate == "log"):
        return "g"
    if name == "b" and contract.beta == "given":
        return "beta"
    return PUBLIC.get(name, name)


def expected_shapes(contract: Contract, arguments: dict[str, Any]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """The shape of each argument that a contract has, in sizes where q, v and cu_seqlens say them, in letters where any size will do."""
    c = contract
    N, T, H = arguments["q"].shape[:3]
    HV = arguments["v"].shape[2]
    B = arguments["cu_seqlens"].shape[0] - 1 if c.ragged else N
    tile = (c.V, c.K) if c.layout == "k_last" else (c.K, c.V)
    yield "q", (N, T, H, c.K)
    yield "k", (N, T, H, c.K)
    yield "v", (N, T, HV, c.V)
    yield "state", ("slots", HV, *tile)
    yield "a", (N, T, HV, c.K) if c.op == "kda_decode" else (N, T, HV)
    yield "b", (N, T, HV)
    if c.has_parameters:
        yield "A_log", ("HV or H",) if c.op == "kda_decode" else (HV,)
        yield "dt_bias", ("HV or H", c.K) if c.op == "kda_decode" else (HV,)
    if c.reads_index:
        yield "read_index", (B,)
    if c.writes_index:
        yield "write_index", (B,)
    if c.intermediate == "slots":
        yield "slot_index", (B, "1+S")
    if c.intermediate == "indexed":
        yield "slot_index", (B,)
    if c.accepted:
        yield "accepted", (B,)
    if c.intermediate in ("dense", "indexed"):
        yield "intermediate", ("rows", "steps", HV, *tile)
    if c.ragged:
        yield "cu_seqlens", ("B+1",)
    yield "output", (N, T, HV, c.V)


def faults(contract: Contract, values: tuple[Any, ...]) -> Iterator[str]:
    """What is wrong with a call, argument by argument."""
    arguments = dict(zip(DECODE_ARGUMENTS, values, strict=True))
    device = arguments["q"].device
    heads = {arguments["v"].shape[2], arguments["q"].shape[2]}
    for name, shape in expected_shapes(contract, arguments):
        public, x = public_name(name, contract), arguments[name]
        if x is None:
            yield f"{public} is None: accepted is a tensor {_shape(shape)}"
            continue
        given = f"{public} has shape {tuple(x.shape)}, strides {tuple(x.stride())}, dtype {x.dtype} on {x.device}"
        if x.device != device:
            yield f"{given}: accepted is a tensor on {device}, where q is"
        elif x.dim() != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, x.shape, strict=True)):
            yield f"{given}: accepted is the shape {_shape(shape)}"
        elif shape and shape[0] == "HV or H" and x.shape[0] not in heads:
            yield f"{given}: accepted is one row a value head or one a q/k head, {sorted(heads)}"
        elif fault := _stride_fault(name, x, contract):
            yield f"{given}: {fault}"
    for name in ("k", "v", "output"):
        if arguments[name] is not None and arguments[name].dtype != arguments["q"].dtype:
            yield f"{name} has dtype {arguments[name].dtype}: accepted is q's, {arguments['q'].dtype}"
    x = arguments["intermediate"]
    if x is not None and x.dtype != arguments["state"].dtype:
        yield f"intermediate_states_buffer has dtype {x.dtype}: accepted is initial_state's, {arguments['state'].dtype}"


def _shape(shape: tuple[str | int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _stride_fault(name: str, x: Any, contract: Contract) -> str | None:
    """What is wrong with strides or alignment."""
    itemsize = x.element_size()
    inner = {"state": 3, "intermediate": 3, "q": 2, "k": 2, "v": 2, "output": 2}.get(name, 0)
    if name == "a" and contract.op == "kda_decode":
        inner = 2
    if name == "dt_bias" and contract.op == "kda_decode":
        inner = 2
    expected = 1
    for d in range(x.dim() - 1, x.dim() - 1 - inner, -1):
        if x.shape[d] != 1 and x.stride(d) != expected:
            return (
                f"accepted are contiguous inner dimensions (stride {expected} at dimension {d}); nothing is copied behind your back: "
                f"call .contiguous() where a copy is meant"
            )
        expected *= x.shape[d]
    if inner and contract is not None and x.is_cuda:
        if x.data_ptr() % 16:
            return f"its address {x.data_ptr():#x} is not a multiple of 16 bytes, which kernels load at once"
        for d in range(x.dim() - inner):
            if x.shape[d] != 1 and x.stride(d) * itemsize % 16:
                return (
                    f"stride {x.stride(d)} at dimension {d} is not a multiple of 16 bytes, which kernels load at once"
                )
    return None


def refusal(contract: Contract, values: tuple[Any, ...], error: Exception) -> GdntuneError:
    """The error to raise after a compiled function refused its arguments."""
    found = list(faults(contract, values))
    if found:
        return UnsupportedProblem("; ".join(found))
    if isinstance(error, (TypeError, ValueError)):
        return UnsupportedProblem(f"the compiled {contract.op} refused its arguments: {error}")
    return GdntuneError(f"{contract.op} failed: {type(error).__name__}: {error}")


def check_values(contract: Contract, values: tuple[Any, ...]) -> None:
    """Reads what lies on the device, which synchronises: indices, counts, duplicates. UnsupportedProblem names the first fault."""
    for fault in faults(contract, values):
        raise UnsupportedProblem(fault)
    for fault in _value_faults(contract, dict(zip(DECODE_ARGUMENTS, values, strict=True))):
        raise UnsupportedProblem(f"{fault} (found by GDNTUNE_CHECK=1)")


def check_width(**indices: Any) -> None:
    """Refuses int64 values beyond 32 bits, of which a kernel would see the low half: slot 2^32 + 1 as slot 1."""
    for name, x in indices.items():
        if x is not None and x.numel() and x.element_size() == 8:
            low, high = int(x.min()), int(x.max())
            if low < -(2**31) or high >= 2**31:
                raise UnsupportedProblem(
                    f"{name} has values from {low} to {high}: accepted are those of int32 (found by GDNTUNE_CHECK=1)"
                )


def _slot_conflicts(
    c: Contract, arguments: dict[str, Any], read: list[int], write: list[int], columns: list[list[int]]
) -> Iterator[str]:
    """Slots that two requests write, or that one writes and another starts from: which comes first is chance."""
    null, slots = arguments["null_index"], arguments["state"].shape[0]
    accepted = arguments["accepted"].tolist() if arguments["accepted"] is not None else []

    def names_slot(i: int) -> bool:
        return 0 <= i < slots and i != null

    start = list(read)
    for n, row in enumerate(columns):
        start.append(row[min(max(accepted[n], 1), len(row)) - 1 if accepted else 0] if row else -1)
    writes = [(n, f"{public_name('write_index', c)}[{n}]", i) for n, i in enumerate(write)]
    bounds = arguments["cu_seqlens"].tolist() if c.ragged else []
    for n, row in enumerate(columns):
        tokens = max(bounds[n + 1] - bounds[n], 0) if c.ragged else arguments["q"].shape[1]
        writes += [(n, f"ssm_state_indices[{n}, {t}]", i) for t, i in enumerate(row[:tokens])]
    live = [(n, name, i) for n, name, i in writes if names_slot(start[n]) and names_slot(i)]
    seen: dict[int, tuple[int, str]] = {}
    for n, name, i in live:
        if i in seen and seen[i][0] != n:
            yield f"{name} is {i}, as is {seen[i][1]}: two requests would write one slot; accepted are distinct slots"
        seen.setdefault(i, (n, name))
    for m, i in enumerate(start):
        if names_slot(i) and i in seen and seen[i][0] != m:
            yield (
                f"{seen[i][1]} is {i}, the slot that request {m} starts from: it may be read before or after it is written; "
                "accepted are slots that no other request reads"
            )


def _value_faults(c: Contract, arguments: dict[str, Any]) -> Iterator[str]:
    slots, null = arguments["state"].shape[0], arguments["null_index"]

    def lists(name: str) -> list[Any]:
        return arguments[name].tolist() if arguments[name] is not None else []

    def out_of_range(name: str, indices: list[int], limit: int, what: str) -> Iterator[str]:
        for at, i in enumerate(indices):
            if i >= limit:
                yield f"{public_name(name, c)}[{at}] is {i}: accepted are 0 to {limit - 1} ({what}), or a negative index as padding"

    read, write = lists("read_index"), lists("write_index")
    yield from out_of_range("read_index", read, slots, "initial_state's slots")
    yield from out_of_range("write_index", write, slots, "initial_state's slots")
    columns = lists("slot_index") if c.intermediate == "slots" else []
    for n, row in enumerate(columns):
        yield from out_of_range("slot_index", row, slots, f"initial_state's slots, row {n}")
    yield from _slot_conflicts(c, arguments, read, write, columns)
    if c.intermediate == "indexed":
        rows = lists("slot_index")
        yield from out_of_range(
            "slot_index", rows, arguments["intermediate"].shape[0], "intermediate_states_buffer's rows"
        )
        used = [r for r in rows if r >= 0 and r != null]
        if len(set(used)) != len(used):
            yield "intermediate_state_indices names a row twice: two requests would write it; accepted are distinct rows"
    if c.accepted:
        columns = arguments["slot_index"].shape[1]
        for n, count in enumerate(lists("accepted")):
            if not 0 <= count <= columns:
                yield f"num_accepted_tokens[{n}] is {count}: accepted are 0 to {columns} (the columns of ssm_state_indices)"
    if c.ragged:
        bounds, total = lists("cu_seqlens"), arguments["q"].shape[1]
        if bounds[0] != 0 or bounds[-1] > total:
            yield f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}: accepted is from 0 to at most the {total} rows of q"
        for n in range(len(bounds) - 1):
            if not 0 <= bounds[n + 1] - bounds[n] <= c.tokens:
                yield f"cu_seqlens gives request {n} {bounds[n + 1] - bounds[n]} tokens: accepted are 0 to max_tokens={c.tokens}"
