"""What is wrong with a call's arguments, in words: used after a compiled function refused them, and
by GDNTUNE_CHECK=1.

The hot path looks at nothing here but a call's numbers, once for a set of them. A compiled call
checks dtypes, ranks, tied sizes, strides and alignment by itself; this module says which public
argument that was, what was given and what is expected.
"""

import math
from collections.abc import Hashable, Iterator
from numbers import Complex, Number
from typing import Any, get_args

import torch

from gdntune.errors import GdntuneError, UnsupportedProblem, listed, shown
from gdntune.kernels.spec import arguments_of
from gdntune.problem import MAX_TOKENS, Contract, Layout
from gdntune.runtime.memory import memory_fault

# exp of more is no fp32 number.
LARGEST_A_LOG = 88

# The public name of each argument of the calling convention.
PUBLIC = {
    "state": "initial_state",
    "read_index": "initial_state_indices",
    "write_index": "output_state_indices",
    "accepted": "num_accepted_tokens",
    "intermediate": "intermediate_states_buffer",
}

TENSORS = (
    "A_log a dt_bias b g beta initial_state_indices output_state_indices intermediate_states_buffer"
    " intermediate_state_indices ssm_state_indices num_accepted_tokens cu_seqlens output"
).split()
LAYER_TENSORS = ("output_gate norm_weight conv_state conv_weight conv_bias conv_position").split()
STATIC = (
    "state_layout",
    "batch_invariant",
    "dependent_launch",
    "disable_state_update",
    "max_tokens",
)
NUMBERS = (
    "scale softplus_beta softplus_threshold null_index use_qk_l2norm allow_neg_eigval lower_bound"
).split()
FP32_MAX, FP32_TINY = (
    float(x) for x in (torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny)
)


def tensor_fault(name: str, x: Any) -> str | None:
    """Why an argument is no tensor that a kernel can read, whatever its shape and dtype; None where
    it is.
    """
    if not isinstance(x, torch.Tensor):
        return f"{name} is of type {type(x).__name__}: expected a torch.Tensor"
    if x.is_nested or x.layout is not torch.strided:
        return (
            f"{name} is a {'nested' if x.is_nested else x.layout} tensor: expected dense ones"
            " (torch.strided); ragged batches are packed rows with cu_seqlens"
        )
    return None


def rank_fault(q: Any, v: Any, state: Any) -> str | None:
    """What is wrong with the number of dimensions of the tensors that sizes are read off."""
    if q.dim() != 4 or v.dim() != 4:
        return (
            f"q has shape {tuple(q.shape)}, v {tuple(v.shape)}: expected q [B, T, H, K] and v"
            " [B, T, HV, V]"
        )
    if state.dim() != 4:
        return (
            f"initial_state has shape {tuple(state.shape)}: expected [slots, HV, V, K] (k_last)"
            " and [slots, HV, K, V] (v_last)"
        )
    return None


def explain(error: Exception, called: dict[str, Any], needed: str) -> None:
    """Raises the UnsupportedProblem that stands behind an error from within a public function;
    returns where its arguments are right.

    called: what it was called with, by name, and what else; needed: the tensors that it cannot be
        without.
    """
    if isinstance(error, GdntuneError):
        return
    tensors = {
        name: x
        for name, x in called.items()
        if name in needed.split() or (name in (*TENSORS, *LAYER_TENSORS) and x is not None)
    }
    faults = [fault for name, x in tensors.items() if (fault := tensor_fault(name, x))]
    if (
        not faults
        and "q" in needed.split()
        and (fault := rank_fault(called["q"], called["v"], called["initial_state"]))
    ):
        faults = [fault]
    if not faults:
        faults = [fault for name, x in tensors.items() if (fault := memory_fault(name, x))]
    if faults:
        raise UnsupportedProblem("; ".join(faults)) from error
    check_static(**{name: called[name] for name in STATIC if name in called})
    check_numbers(**{name: called[name] for name in NUMBERS if name in called})


def check_static(
    state_layout: Any,
    batch_invariant: Any,
    dependent_launch: Any = False,
    disable_state_update: Any = False,
    max_tokens: Any = None,
) -> None:
    """UnsupportedProblem for what decides the compiled object and is no tensor."""
    if not isinstance(state_layout, str) or state_layout not in get_args(Layout):
        raise UnsupportedProblem(
            f"{shown('state_layout', state_layout)}: expected one of {listed(get_args(Layout))}"
        )
    if max_tokens is not None and not _is_integer(max_tokens, 1, MAX_TOKENS):
        raise UnsupportedProblem(
            f"{shown('max_tokens', max_tokens)}: expected 1 to {MAX_TOKENS}; split longer"
            " requests into several calls"
        )
    _check_flags(
        batch_invariant=batch_invariant, dependent_launch=dependent_launch,
        disable_state_update=disable_state_update,
    )  # fmt: skip


def check_numbers(
    scale: Any, softplus_beta: Any, softplus_threshold: Any, null_index: Any, use_qk_l2norm: Any,
    allow_neg_eigval: Any, lower_bound: Any = None,
) -> None:  # fmt: skip
    """UnsupportedProblem for a number that fp32 does not hold, or with which a gate is NaN or
    grows, and for a flag that is none.
    """
    # Tensors are no numbers: to read one would synchronise.
    for name, x, least, most, accepted in (
        (
            "scale",
            1.0 if scale is None else scale,
            -FP32_MAX,
            FP32_MAX,
            "a finite number, or None for K**-0.5",
        ),
        ("softplus_beta", softplus_beta, FP32_TINY, FP32_MAX, "a finite number above 0"),
        ("softplus_threshold", softplus_threshold, 0.0, FP32_MAX, "a finite number from 0"),
        (
            "lower_bound",
            0.0 if lower_bound is None else lower_bound,
            -FP32_MAX,
            0.0,
            "a finite number of at most 0",
        ),
    ):
        if not least <= _float(x) <= most:
            raise UnsupportedProblem(f"{shown(name, x)}: expected {accepted}, within fp32's range")
    if not _is_integer(null_index, -(2**31), 2**31 - 1):
        raise UnsupportedProblem(
            f"{shown('null_index', null_index)}: expected an int within int32's range"
        )
    _check_flags(use_qk_l2norm=use_qk_l2norm, allow_neg_eigval=allow_neg_eigval)


def _float(x: Any) -> float:
    """A number's value; NaN for what is none. Numbers that are equal are equally right, since the
    records of calls, a dictionary, cannot tell 1 from True, 1.0 or 1+0j.
    """
    if not isinstance(x, Number) or (isinstance(x, Complex) and x.imag):
        return math.nan
    try:
        return float(x.real if isinstance(x, Complex) else x)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf


def _is_integer(x: Any, least: int, most: int) -> bool:
    """Whether a number is a whole one of a range, whatever its type."""
    return least <= _float(x) <= most and _float(x) == int(_float(x))


def _check_flags(**flags: Any) -> None:
    for name, x in flags.items():
        # 1 and numpy's True are flags too: a key of a dictionary, by which calls are found again,
        # cannot tell them from True.
        if isinstance(x, torch.Tensor) or not isinstance(x, Hashable) or x not in (True, False):
            raise UnsupportedProblem(f"{shown(name, x)}: expected True or False")


def public_name(name: str, contract: Contract) -> str:
    """What the caller calls an argument of the calling convention."""
    if name == "slot_index":
        return (
            "ssm_state_indices"
            if contract.intermediate == "slots"
            else "intermediate_state_indices"
        )
    if name == "a" and (contract.op == "kda_decode" or contract.gate == "log"):
        return "g"
    if name == "b" and contract.beta == "given":
        return "beta"
    return PUBLIC.get(name, name)


def expected_shapes(
    contract: Contract, arguments: dict[str, Any]
) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """The shape of each argument that a contract has, in sizes where q, v and cu_seqlens say them,
    in letters where any size will do.
    """
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
    if c.norm != "none":
        yield "output_gate", (N, T, HV, c.V)
        yield "norm_weight", (c.V,)
    if c.ring:
        slots = arguments["state"].shape[0]
        yield "ring_k", (slots, H, "rows", c.K)
        yield "ring_u", (slots, HV, "rows", c.V)
        yield "ring_decay", (slots, HV, "rows", *((c.K,) if c.op == "kda_decode" else ()))
        yield "ring_base", (B,)
        yield "ring_count", (B,)
        if c.ring_rounding == "stochastic":
            yield "ring_seed", (2,)
    if c.conv != "none":
        D = 2 * H * c.K + HV * c.V
        yield "mixed_qkv", (N, T, D + (HV * c.V if c.conv_input == "interleaved" else 0))
        yield "conv_state", (arguments["state"].shape[0], "rows", D)
        yield "conv_weight", (D, c.conv_width)
        if c.conv_bias:
            yield "conv_bias", (D,)
        if c.conv_window == "ring":
            yield "conv_position", (B,)


def faults(contract: Contract, values: tuple[Any, ...]) -> Iterator[str]:
    """What is wrong with a call, argument by argument."""
    arguments = dict(zip(arguments_of(contract), values, strict=True))
    device = arguments["q"].device
    heads = {arguments["v"].shape[2], arguments["q"].shape[2]}
    for name, shape in expected_shapes(contract, arguments):
        if (
            name == "write_index"
            and arguments[name] is arguments["read_index"]
            and arguments[name] is not None
        ):
            # By default the slot that is read is written: the caller has not passed this one, and
            # the other is looked at already.
            continue
        public, x = public_name(name, contract), arguments[name]
        if x is None:
            yield f"{public} is None: expected a tensor {_shape(shape)}"
            continue
        if fault := tensor_fault(public, x) or memory_fault(public, x):
            yield fault
            continue
        given = (
            f"{public} has shape {tuple(x.shape)}, strides {tuple(x.stride())}, dtype {x.dtype} on"
            f" {x.device}"
        )
        if x.device != device:
            yield f"{given}: expected a tensor on {device}, where q is"
        elif x.dim() != len(shape) or any(
            isinstance(n, int) and n != m for n, m in zip(shape, x.shape, strict=True)
        ):
            yield f"{given}: expected the shape {_shape(shape)}"
        elif shape and shape[0] == "HV or H" and x.shape[0] not in heads:
            yield f"{given}: expected one row a value head or one a q/k head, {sorted(heads)}"
        elif fault := _stride_fault(name, x, contract):
            yield f"{given}: {fault}"
    for name in ("k", "v", "output", "output_gate", "conv_state", "conv_weight", "conv_bias"):
        if arguments.get(name) is not None and arguments[name].dtype != arguments["q"].dtype:
            yield (
                f"{name} has dtype {arguments[name].dtype}: expected q's, {arguments['q'].dtype}"
            )
    yield from _window_faults(contract, arguments)
    if contract.ring:
        yield from _ring_faults(contract, arguments)
    x = arguments["intermediate"]
    if x is not None and x.dtype != arguments["state"].dtype:
        yield (
            f"intermediate_states_buffer has dtype {x.dtype}: expected initial_state's,"
            f" {arguments['state'].dtype}"
        )


def _window_faults(c: Contract, arguments: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a convolution's windows beside shapes and dtypes."""
    if c.conv == "none":
        return
    rows, at = arguments["conv_state"].shape[1], arguments["conv_position"]
    ring, before = c.conv_window == "ring", c.conv_width - 1
    drafts = not ring and c.intermediate == "slots"
    # a ragged call's longest request is known to the device alone
    least = before + (c.tokens if ring else c.tokens - 1 if drafts else 0)
    if rows < least or (not ring and not drafts and rows > least):
        kind = (
            "those of a ring" if ring else "those of drafts" if drafts else "those before a token"
        )
        yield (
            f"conv_state has {rows} rows a slot: expected {least}"
            + (" or more, " if ring or drafts else ", ")
            + f"{kind} of a convolution of width {c.conv_width} and {c.tokens} tokens"
        )
    if at is not None and at.dtype is not torch.int32:
        yield f"conv_position has dtype {at.dtype}: expected torch.int32"


def _ring_faults(c: Contract, arguments: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a ring beside shapes."""
    kinds = {"ring_k": arguments["q"].dtype, "ring_decay": torch.float32}
    kinds |= dict.fromkeys(("ring_base", "ring_count"), torch.int32)
    if c.ring_rounding == "stochastic":
        kinds["ring_seed"] = torch.int32
    for name, dtype in kinds.items():
        if arguments[name] is not None and arguments[name].dtype != dtype:
            yield f"{name} has dtype {arguments[name].dtype}: expected {dtype}"
    sizes = {arguments[n].shape[2] for n in ("ring_k", "ring_u", "ring_decay")}
    least = c.ring + arguments["q"].shape[1]
    if len(sizes) > 1 or min(sizes) < least:
        yield (
            f"the ring's tensors have {listed(sorted(sizes))} rows a head: expected ring + T ="
            f" {least} or more, of each as many"
        )


def _shape(shape: tuple[str | int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _stride_fault(name: str, x: Any, contract: Contract) -> str | None:
    """What is wrong with strides or alignment."""
    itemsize = x.element_size()
    # How many inner dimensions a kernel takes as contiguous; the outer ones have strides of their
    # own.
    inner = {"state": 3, "intermediate": 3, "conv_weight": 2}.get(name, 0)
    if name in ("norm_weight", "mixed_qkv", "conv_state", "conv_bias"):
        inner = 1
    if name in ("q", "k", "v", "output", "output_gate"):
        inner = 2
    if name == "conv_state" and contract.conv_window == "dims_first":
        inner = 0
    if name in ("ring_k", "ring_u", "ring_decay"):
        inner = x.dim() - 1
    if name == "a" and contract.op == "kda_decode":
        inner = 2
    if name == "dt_bias" and contract.op == "kda_decode":
        inner = 2
    expected = 1
    for d in range(x.dim() - 1, x.dim() - 1 - inner, -1):
        # A dimension of size 1 has any stride in torch, and none that counts.
        if x.shape[d] != 1 and x.stride(d) != expected:
            return (
                f"expected contiguous inner dimensions (stride {expected} at dimension {d});"
                " nothing is copied behind your back: call .contiguous() where a copy is meant"
            )
        expected *= x.shape[d]
    # decays of heads are read one by one
    if inner and not (name == "ring_decay" and x.dim() == 3):
        if x.data_ptr() % 16:
            return (
                f"its address {x.data_ptr():#x} is not a multiple of 16 bytes, which kernels load"
                " at once"
            )
        for d in range(x.dim() - inner):
            if x.shape[d] != 1 and x.stride(d) * itemsize % 16:
                return (
                    f"stride {x.stride(d)} at dimension {d} is not a multiple of 16 bytes, which"
                    " kernels load at once"
                )
    return None


def refusal(contract: Contract, values: tuple[Any, ...], error: Exception) -> GdntuneError:
    """The error to raise after a compiled function refused its arguments."""
    found = list(faults(contract, values))
    if found:
        return UnsupportedProblem("; ".join(found))
    # Nothing here knows the fault, so the compiled function's own words are the best there are.
    if isinstance(error, (TypeError, ValueError)):
        return UnsupportedProblem(f"the compiled {contract.op} refused its arguments: {error}")
    return GdntuneError(f"{contract.op} failed: {type(error).__name__}: {error}")


def check_values(contract: Contract, values: tuple[Any, ...]) -> None:
    """Reads what lies on the device, which synchronises: indices, counts, duplicates.
    UnsupportedProblem names the first fault.
    """
    for fault in faults(contract, values):
        raise UnsupportedProblem(fault)
    for fault in _value_faults(contract, dict(zip(arguments_of(contract), values, strict=True))):
        raise UnsupportedProblem(f"{fault} (found by GDNTUNE_CHECK=1)")


def check_width(**indices: Any) -> None:
    """Refuses int64 values beyond 32 bits, of which a kernel would see the low half: slot 2^32 + 1
    as slot 1.
    """
    for name, x in indices.items():
        if x is not None and x.numel() and x.element_size() == 8:
            low, high = int(x.min()), int(x.max())
            if low < -(2**31) or high >= 2**31:
                raise UnsupportedProblem(
                    f"{name} has values from {low} to {high}: expected those of int32 (found by"
                    " GDNTUNE_CHECK=1)"
                )


def _slot_conflicts(
    c: Contract,
    arguments: dict[str, Any],
    read: list[int],
    write: list[int],
    columns: list[list[int]],
) -> Iterator[str]:
    """Slots that two requests write, or that one writes and another starts from: which comes first
    is chance.
    """
    null, slots = arguments["null_index"], arguments["state"].shape[0]
    accepted = arguments["accepted"].tolist() if arguments["accepted"] is not None else []

    def names_slot(i: int) -> bool:
        return 0 <= i < slots and i != null

    start = list(read)
    for n, row in enumerate(columns):
        # As the kernels clamp it.
        start.append(row[min(max(accepted[n], 1), len(row)) - 1 if accepted else 0] if row else -1)
    named = public_name(
        "read_index" if arguments["write_index"] is arguments["read_index"] else "write_index", c
    )
    writes = [(n, f"{named}[{n}]", i) for n, i in enumerate(write)]
    bounds = arguments["cu_seqlens"].tolist() if c.ragged else []
    for n, row in enumerate(columns):
        tokens = max(bounds[n + 1] - bounds[n], 0) if c.ragged else arguments["q"].shape[1]
        writes += [(n, f"ssm_state_indices[{n}, {t}]", i) for t, i in enumerate(row[:tokens])]
    # Padding writes nothing, whatever slot its write index names.
    live = [(n, name, i) for n, name, i in writes if names_slot(start[n]) and names_slot(i)]
    seen: dict[int, tuple[int, str]] = {}
    for n, name, i in live:
        if i in seen and seen[i][0] != n:
            yield (
                f"{name} is {i}, as is {seen[i][1]}: two requests would write one slot; expected"
                " distinct slots"
            )
        # Two columns of one request may name one slot: its tokens are written in order, so the last
        # stays.
        seen.setdefault(i, (n, name))
    for m, i in enumerate(start):
        if names_slot(i) and i in seen and seen[i][0] != m:
            yield (
                f"{seen[i][1]} is {i}, the slot that request {m} starts from: it may be read before"
                " or after it is written; expected slots that no other request reads"
            )


def _expanded(c: Contract, arguments: dict[str, Any]) -> Iterator[str]:
    """Tensors that are written and whose rows are one row of memory: what they hold in the end is
    chance.
    """
    written: tuple[str, ...] = (
        ("state", "intermediate", "output")
        if c.mode == "update" or c.intermediate == "slots"
        else ("intermediate", "output")
    )
    for name in (*written, *(("ring_k", "ring_u", "ring_decay") if c.ring else ())):
        x = arguments[name]
        for d in range(0 if x is None else x.dim()):
            if x.shape[d] > 1 and x.stride(d) == 0:
                yield (
                    f"{public_name(name, c)} has stride 0 at dimension {d}, of size {x.shape[d]}:"
                    " it is written, so expected tensors with memory for each row; call"
                    " .clone() where .expand() made it"
                )


def rate_faults(c: Contract, A_log: Any, device: str) -> Iterator[str]:
    """An A_log whose exp is no fp32 number: in the raw gate on CUDA that is inf, and NaN where the
    softplus vanishes, which then stays in the pool. The other gates and the CPU compute it.
    """
    if c.gate == "raw" and device == "cuda" and A_log.numel():
        largest = float(A_log.max())
        if largest > LARGEST_A_LOG:
            yield f"A_log is {largest:g} at most: expected up to {LARGEST_A_LOG} on CUDA"


def _value_faults(c: Contract, arguments: dict[str, Any]) -> Iterator[str]:
    yield from _expanded(c, arguments)
    yield from rate_faults(c, arguments["A_log"], arguments["q"].device.type)
    slots, null = arguments["state"].shape[0], arguments["null_index"]

    def lists(name: str) -> list[Any]:
        return arguments[name].tolist() if arguments[name] is not None else []

    def out_of_range(name: str, indices: list[int], limit: int, what: str) -> Iterator[str]:
        for at, i in enumerate(indices):
            if i >= limit:
                yield (
                    f"{public_name(name, c)}[{at}] is {i}: expected 0 to {limit - 1} ({what}),"
                    " or a negative index as padding"
                )

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
            "slot_index",
            rows,
            arguments["intermediate"].shape[0],
            "intermediate_states_buffer's rows",
        )
        used = [r for r in rows if r >= 0 and r != null]
        if len(set(used)) != len(used):
            yield (
                "intermediate_state_indices names a row twice: two requests would write it;"
                " expected distinct rows"
            )
    if c.accepted:
        columns = arguments["slot_index"].shape[1]
        for n, count in enumerate(lists("accepted")):
            if not 0 <= count <= columns:
                yield (
                    f"num_accepted_tokens[{n}] is {count}: expected 0 to {columns} (the columns"
                    " of ssm_state_indices)"
                )
    if c.ring:
        rows = arguments["ring_u"].shape[2]
        for name, most in (("ring_base", rows - 1), ("ring_count", c.ring)):
            for n, value in enumerate(lists(name)):
                if not 0 <= value <= most:
                    yield f"{name}[{n}] is {value}: expected 0 to {most}"
    if c.ragged:
        bounds, total = lists("cu_seqlens"), arguments["q"].shape[1]
        if bounds[0] != 0 or bounds[-1] > total:
            yield (
                f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}: expected from 0 to at most"
                f" the {total} rows of q"
            )
        for n in range(len(bounds) - 1):
            if not 0 <= bounds[n + 1] - bounds[n] <= c.tokens:
                yield (
                    f"cu_seqlens gives request {n} {bounds[n + 1] - bounds[n]} tokens: expected"
                    f" 0 to max_tokens={c.tokens}"
                )
