"""What is done before the first call: plans, preparing a contract, choosing a table."""

import os
from typing import Any

from gdntune.device import arch
from gdntune.errors import ToolMissing, UnsupportedProblem, shown
from gdntune.problem import Contract, Problem, check_contract, problem_fault
from gdntune.runtime import call, dispatch
from gdntune.runtime.dispatch import Bound, Runtime
from gdntune.runtime.layer_plan import make_layer_plan
from gdntune.runtime.planned import Plan, make_plan


def plan(
    problem: Problem,
    device: str = "cuda",
    index: int = 0,
    *,
    dependent_launch: bool = False,
    **numbers: Any,
) -> Plan:
    """A callable bound to a problem's contract, for 1 to problem.B requests of problem.HV heads.
    Its functions are loaded here, so that no call compiles.

    device: `cuda`, the card by its index, or `cpu`. dependent_launch: as of
    `gated_delta_rule_decode`. numbers: scale, softplus_beta,
    softplus_threshold, lower_bound, allow_neg_eigval, null_index and use_qk_l2norm, with the public
    functions' defaults; of a layer norm_eps too (see `layer_plan`). UnsupportedProblem for sizes
    or a contract that no call can have.
    """
    if fault := problem_fault(problem):
        raise UnsupportedProblem(fault)
    bound = _runtime(device, index).bind(problem.contract, dependent_launch=dependent_launch)
    c = problem.contract
    # a ring's has none of either kind, and make_plan says so
    make = make_layer_plan if c.layer and not c.ring else make_plan
    return make(bound, problem.B, problem.HV, numbers)


def prepare(
    contract: Contract, device: str = "cuda", index: int = 0, *, dependent_launch: bool = False
) -> Bound:
    """Loads every function that a rule can choose for a contract; afterwards any batch can be
    captured in a CUDA graph. dependent_launch: what the calls will give for it.
    """
    bound = _runtime(device, index).bind(
        check_contract(contract), dependent_launch=dependent_launch
    )
    bound.load_all()
    return bound


def load_table(path: str | os.PathLike[str], device: str | None = None, index: int = 0) -> None:
    """Makes a table the one in use, on its own kind of device unless another is named; TableError
    where it cannot be trusted.
    """
    from gdntune.results import table

    if not isinstance(path, str | os.PathLike):
        raise UnsupportedProblem(
            f"path is of type {type(path).__name__}: expected a str or a pathlib.Path of a"
            " table's file"
        )
    if device is None:
        # Read twice, once here: which runtime is asked is decided by the table's device.
        of = table.load(path).device
        given = f"{os.fspath(path)} was measured on {of.name}, of kind {of.kind}"
        found = _runtime(
            of.kind, index, given, "give a table of kind cpu; `gdntune sweep` makes one"
        )
    else:
        found = _runtime(device, index)
    found.use(path)
    # Records hold functions of the table before.
    call.forget()


def table_hash(device: str = "cuda", index: int = 0) -> str:
    """16 hex digits of what decides the choices on a device: its tables and this version. Ranks of
    one job that print the same one choose the same kernels.
    """
    return _runtime(device, index).table_hash()


def explain(
    contract: Contract,
    work_units: int,
    device: str = "cuda",
    index: int = 0,
    *,
    dependent_launch: bool = False,
) -> dict[str, Any]:
    """What serves a contract at some work units (B*HV), and why, as plain values: the variant, its
    kernel and knobs, the table and rule that it comes from, what was measured there, warnings.

    dependent_launch: what the calls give for it; `otherwise`: what serves the others, None where
    that is the same.
    """
    from gdntune.runtime.explain import explanation

    kind = _runtime(device, index).device.kind
    return explanation(
        check_contract(contract),
        work_units,
        kind=kind,
        index=index,
        dependent_launch=dependent_launch,
    )


def check_ranks(device: str = "cuda", index: int = 0, group: Any = None) -> str:
    """The table hash of this rank, which all ranks of a process group share: tensor-parallel ranks
    that choose other kernels round otherwise. Every rank of the group calls it.

    group: of torch.distributed, None for the default one. UnsupportedProblem, on each rank, where
    they differ: it names them all.
    """
    import torch.distributed

    own = table_hash(device, index)
    hashes: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(hashes, own, group=group)
    if len(set(hashes)) > 1:
        said = ", ".join(f"rank {rank} has {found}" for rank, found in enumerate(hashes))
        raise UnsupportedProblem(
            f"the ranks' tables differ: {said}; give each the same gdntune and the same table"
            " (GDNTUNE_TABLE), on GPUs of one kind"
        )
    return own


def _runtime(
    device: str, index: int, given: str = "device='cuda'", instead: str = "give device='cpu'"
) -> Runtime:
    """A device's runtime, as callers name it. Where there is no CUDA, what asked for it is `given`,
    and they can do `instead`.
    """
    if not isinstance(device, str) or device not in ("cuda", "cpu"):
        raise UnsupportedProblem(
            f"{shown('device', device)}: expected 'cuda' or 'cpu'; index= names the card"
        )
    if type(index) is not int or index < 0 or (device == "cpu" and index):
        accepted = (
            "0 on the CPU" if device == "cpu" else "an int from 0, torch's number of the card"
        )
        raise UnsupportedProblem(f"{shown('index', index)}: expected {accepted}")
    try:
        return dispatch.runtime(device, index)
    except ToolMissing as e:
        raise ToolMissing(f"{given}: {arch.cuda_fault(index) or e}, or {instead}") from None
