"""A plan: one contract's compiled functions behind a call that checks nothing twice."""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract
from gdntune.runtime import arguments, contracts, parts, traced
from gdntune.runtime.contracts import Settings, Tensors
from gdntune.runtime.dispatch import Bound, Function

_modes = torch._C._len_torch_dispatch_stack


class Plan:
    """Calls a contract for 1 to B requests; made by `gdntune.plan`.

    bound: the contract's choices and functions; batches: the largest B; HV: value heads.

    The first call is looked at whole, as a public function's is. Later calls must have tensors like
    the first one's: dense, with memory, of the same dtypes, strides and sizes, but for B. The
    compiled function still refuses other dtypes, ranks, tied sizes, strides and addresses; no plan
    sees a freed or negated tensor, requires_grad or GDNTUNE_CHECK.
    """

    def __init__(self, bound: Bound, batches: int, HV: int, numbers: dict[str, Any]):
        self.bound, self.batches, self.HV = bound, batches, HV
        c = bound.contract
        settings: dict[str, Any] = {
            "op": c.op, "gate": c.gate, "logit": c.beta == "logit",
            "indexed": c.intermediate == "indexed", "state_layout": c.layout,
            "frozen": c.mode == "frozen" and c.intermediate != "slots", "batch_invariant": False,
            "max_tokens": c.tokens if c.ragged else None, "scale": None, "softplus_beta": 1.0,
            "softplus_threshold": 20.0, "lower_bound": 0.0, "allow_neg_eigval": False,
            "null_index": -1, "use_qk_l2norm": True,
        }  # fmt: skip
        if unknown := numbers.keys() - NUMBERS:
            raise UnsupportedProblem(
                f"plan() has no setting {', '.join(sorted(unknown))}: expected one of"
                f" {', '.join(sorted(NUMBERS))}"
            )
        self._settings = Settings(**settings | numbers)
        self._numbers = contracts.numbers(self._settings, c.K)
        self._functions = [bound.at(max(B, 1) * HV) for B in range(batches + 1)]
        # a ragged call's B is not q's first size: it goes by the largest batch
        single = c.ragged or all(f is self._functions[1] for f in self._functions)
        for B in range(parts.MAX_REQUESTS + 1, batches + 1):
            self._functions[B] = parts.in_parts(self._functions[B], c)
        self._function: Function | None = self._functions[batches] if single else None
        self._known = False

    @property
    def contract(self) -> Contract:
        return self.bound.contract

    def __repr__(self) -> str:
        return f"Plan({self.contract.key()}, B=1..{self.batches}, HV={self.HV})"

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
        tensors = (
            initial_state, q, k, v, gate, beta, A_log, dt_bias, initial_state_indices,
            output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens,
            intermediate_states_buffer, output,
        )  # fmt: skip
        if not self._known or _modes():
            self._look(Tensors._make(tensors))
        function = self._function
        try:
            if function is None:
                function = self._functions[q.shape[0]]
            function(*tensors, *self._numbers)
        except IndexError:
            raise UnsupportedProblem(
                f"{q.shape[0]} requests: expected at most {self.batches}, this plan's B"
            ) from None
        except (TypeError, ValueError, RuntimeError) as e:
            raise arguments.refusal(self.contract, (*tensors, *self._numbers), e) from e
        return output

    def _look(self, t: Tensors) -> None:
        """Looks at a call whole; UnsupportedProblem where it is not this plan's."""
        s = self._settings
        for field, x in zip(t._fields, t, strict=True):
            if x is not None and (fault := arguments.tensor_fault(field, x)):
                raise UnsupportedProblem(fault)
        if special := traced.special(t):
            raise UnsupportedProblem(
                f"{special}: a plan is not traced; call gdntune.{s.op} under a transform"
            )
        B = contracts.requests(t, s)
        if (contract := contracts.contract_of(t, s)) != self.contract:
            raise UnsupportedProblem(
                f"the call's contract is {contract.key()}: expected this plan's,"
                f" {self.contract.key()}"
            )
        if t.v.shape[2] != self.HV or self.batches < B:
            raise UnsupportedProblem(
                f"B={B}, HV={t.v.shape[2]}: expected B up to {self.batches} and HV={self.HV}, this"
                " plan's"
            )
        for field in Tensors._fields[8:13]:
            x = getattr(t, field)
            if x is not None and x.dtype is not torch.int32:
                raise UnsupportedProblem(
                    f"{contracts.name_of(field, s)} has dtype {x.dtype}: a plan takes torch.int32"
                )
        contracts.check_sizes(self.contract, t, s, B)
        if faults := list(arguments.faults(self.contract, (*t, *self._numbers))):
            raise UnsupportedProblem("; ".join(faults))
        self._known = True


NUMBERS = {
    "scale", "softplus_beta", "softplus_threshold", "lower_bound", "allow_neg_eigval", "null_index",
    "use_qk_l2norm",
}  # fmt: skip
