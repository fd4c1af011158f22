"""A plan: one contract's compiled functions behind a call that checks nothing twice."""

from typing import Any, Protocol

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract
from gdntune.runtime import arguments, contracts, parts, traced
from gdntune.runtime.contracts import NO_LAYER, Layer, Settings, Tensors
from gdntune.runtime.dispatch import Bound, Function

_modes = torch._C._len_torch_dispatch_stack
NUMBERS = {
    "scale", "softplus_beta", "softplus_threshold", "lower_bound", "allow_neg_eigval", "null_index",
    "use_qk_l2norm",
}  # fmt: skip


class Plan(Protocol):
    """Calls a contract for 1 to `batches` requests of HV value heads; made by `gdntune.plan`.

    The first call is looked at whole, as a public function's is. Later calls must have tensors like
    the first one's: dense, with memory, of the same dtypes, strides and sizes, but for B. The
    compiled function still refuses other dtypes, ranks, tied sizes, strides and addresses; no plan
    sees a freed or negated tensor, requires_grad or GDNTUNE_CHECK.
    """

    bound: Bound
    contract: Contract
    batches: int
    HV: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor,
        output: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_state_indices: Tensor | None = None,
        output_state_indices: Tensor | None = None,
        slot_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        intermediate_states_buffer: Tensor | None = None,
    ) -> Tensor:
        """Decodes; returns `output`, which the caller gives.

        gate: a or g; beta: b or beta; slot_indices: ssm_state_indices or
        intermediate_state_indices; each as the contract says, the shapes as in
        `gated_delta_rule_decode`. Indices are int32; output_state_indices is given wherever the
        contract writes by index.
        """


def make_plan(bound: Bound, batches: int, HV: int, given: dict[str, Any]) -> Plan:
    """The plan of a contract's choices and functions for up to `batches` requests.

    It is a function: to call an object of a class, Python makes a dictionary of the named
    arguments, 0.5 us of the 0.9 that a call would have on top of the compiled function.
    """
    c = bound.contract
    if c.ring:
        raise UnsupportedProblem(
            f"plan() of {c.key()}: expected a contract with ring=0; call"
            " gdntune.gated_delta_rule_verify"
        )
    settings = settings_of(c, given)
    numbers = contracts.numbers(settings, c.K)
    scale, softplus_beta, threshold, lower_bound, beta_scale, null_index, l2norm = numbers
    functions, only = choices(bound, batches, HV)
    known = False

    def plan(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor,
        output: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_state_indices: Tensor | None = None,
        output_state_indices: Tensor | None = None,
        slot_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        intermediate_states_buffer: Tensor | None = None,
    ) -> Tensor:
        nonlocal known
        try:
            if not known or _modes():
                tensors = Tensors(
                    initial_state, q, k, v, gate, beta, A_log, dt_bias, initial_state_indices,
                    output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens,
                    intermediate_states_buffer, output,
                )  # fmt: skip
                look(tensors, settings, numbers, c, batches, HV)
                known = True
            function = functions[q.shape[0]] if only is None else only
            # Each by its place: a tuple that is made first and unpacked takes 0.3 us longer
            function(
                initial_state, q, k, v, gate, beta, A_log, dt_bias, initial_state_indices,
                output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens,
                intermediate_states_buffer, output, scale, softplus_beta, threshold, lower_bound,
                beta_scale, null_index, l2norm,
            )  # fmt: skip
        # Only a list that is too short raises it: the check costs right calls nothing.
        except IndexError:
            raise UnsupportedProblem(
                f"{q.shape[0]} requests: expected at most {batches}, this plan's B"
            ) from None
        except UnsupportedProblem:
            raise
        except (TypeError, ValueError, RuntimeError) as e:
            values = (
                initial_state, q, k, v, gate, beta, A_log, dt_bias, initial_state_indices,
                output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens,
                intermediate_states_buffer, output, *numbers,
            )  # fmt: skip
            raise arguments.refusal(c, values, e) from e
        return output

    plan.__name__ = plan.__qualname__ = f"Plan({c.key()}, B=1..{batches}, HV={HV})"
    plan.__doc__ = Plan.__call__.__doc__
    for name, value in (("bound", bound), ("contract", c), ("batches", batches), ("HV", HV)):
        setattr(plan, name, value)
    return plan  # type: ignore[return-value]


def choices(bound: Bound, batches: int, HV: int) -> tuple[list[Function], Function | None]:
    """A contract's function for each B to `batches`, by index; and the only one where there is
    one.
    """
    # One for each B, so that a call looks nothing up but a list; 0 is there for the index alone.
    functions: list[Function] = [bound.at(max(B, 1) * HV) for B in range(batches + 1)]
    # A ragged call's B is not q's first size: it goes by the largest batch.
    single = bound.contract.ragged or all(f is functions[1] for f in functions)
    for B in range(parts.MAX_REQUESTS + 1, batches + 1):
        functions[B] = parts.in_parts(functions[B], bound.contract)
    return functions, functions[batches] if single else None


def settings_of(c: Contract, given: dict[str, Any]) -> Settings:
    """A plan's settings; UnsupportedProblem for names that it has none of."""
    settings: dict[str, Any] = {
        "op": c.op, "gate": c.gate, "logit": c.beta == "logit",
        "indexed": c.intermediate == "indexed", "state_layout": c.layout,
        "frozen": c.mode == "frozen" and c.intermediate != "slots", "batch_invariant": False,
        "dependent_launch": False,
        "max_tokens": c.tokens if c.ragged else None, "scale": None, "softplus_beta": 1.0,
        "softplus_threshold": 20.0, "lower_bound": 0.0, "allow_neg_eigval": False,
        "null_index": -1, "use_qk_l2norm": True,
    }  # fmt: skip
    if unknown := given.keys() - NUMBERS:
        raise UnsupportedProblem(
            f"plan() has no setting {', '.join(sorted(unknown))}: expected one of"
            f" {', '.join(sorted(NUMBERS))}"
        )
    return Settings(**settings | given)


def look(
    t: Tensors,
    s: Settings,
    numbers: tuple[float | int, ...],
    contract: Contract,
    batches: int,
    HV: int,
    layer: Layer = NO_LAYER,
) -> None:
    """Looks at a call whole; UnsupportedProblem where it is not the plan's."""
    for field, x in (*zip(t._fields, t, strict=True), *layer.tensors.items()):
        if x is not None and (fault := arguments.tensor_fault(field, x)):
            raise UnsupportedProblem(fault)
    if special := traced.special(t) or traced.wrapped(layer.tensors):
        raise UnsupportedProblem(
            f"{special}: a plan is not traced; call gdntune.{s.op} under a transform"
        )
    B = contracts.requests(t, s)
    if (asked := layer.contract(contracts.contract_of(t, s))) != contract:
        raise UnsupportedProblem(
            f"the call's contract is {asked.key()}: expected this plan's, {contract.key()}"
        )
    if t.v.shape[2] != HV or batches < B:
        raise UnsupportedProblem(
            f"B={B}, HV={t.v.shape[2]}: expected B up to {batches} and HV={HV}, this plan's"
        )
    for field in Tensors._fields[8:13]:
        x = getattr(t, field)
        if x is not None and x.dtype is not torch.int32:
            raise UnsupportedProblem(
                f"{contracts.name_of(field, s)} has dtype {x.dtype}: a plan takes torch.int32"
            )
    contracts.check_sizes(contract, t, s, B)
    if faults := list(arguments.faults(contract, (*t, *numbers, *layer.values))):
        raise UnsupportedProblem("; ".join(faults))
