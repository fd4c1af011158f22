"""Whether a peer's call computes what ours does: a few requests of the case at hand against the
fp64 reference, by relative norms.

Peers round where ours do not (softplus without its threshold, bf16 products), so the bounds are
loose: 1e-2 for what is stored in 16 bits, 2e-3 in fp32, or what an entry says of itself. A wrong
gate, layout or slot is off by 0.1 and more.
"""

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.checking.check import Verdict
from gdntune.checking.reference import Trace, trace
from gdntune.peers.spec import Bound

TOLERANCES = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 2e-3}
# A reference in fp64 of all requests would take longer than the cell's timing.
REQUESTS = 4


def looked_at(B: int) -> list[int]:
    """The requests that are compared: the first, the last and two between, each once."""
    return sorted({B * i // (REQUESTS - 1) if i < REQUESTS - 1 else B - 1 for i in range(REQUESTS)})


def _error(got: Tensor, want: Tensor) -> Tensor:
    """The norm of the difference over the norm of what is wanted, a request; inf where anything is
    NaN.
    """
    want = want.flatten(1)
    # Norms, not values: a peer's rounding of one small value says nothing of its formula.
    error = (got.double().flatten(1) - want).norm(dim=1) / want.norm(dim=1)
    return torch.where(error.isnan(), torch.inf, error)


def _left(got: Tensor, want: Tensor, B: int) -> Verdict:
    """Whether what a call leaves besides is exactly what it must be."""
    same = (got == want).flatten(1).all(1)
    if bool(same.all()):
        return Verdict(True, 0.0, "", 1.0)
    said = f"windows of request {int(same.int().argmin())} of {B} differ"
    return Verdict(False, float("inf"), said, 1.0)


class Expected:
    """What a call on a case must give, computed before the call. tolerance: the least that is
    accepted of every part.
    """

    def __init__(self, case: Case, tolerance: float = 0.0):
        c = self.contract = case.contract
        self.requests = looked_at(case.problem.B)
        self.index = torch.tensor(self.requests, dtype=torch.int64, device=case.q.device)
        found = trace(c, **case.tensors(), requests=self.index)
        n = len(self.requests)
        self.output = found.output.unflatten(0, (n, -1))
        # [n, T or 1, HV, V, K]: the last is the final state
        self.states = found.states.unflatten(0, (n, -1))
        if c.ring:
            self.states = self._folded(case, found)
        self.tolerance = tolerance

    def _folded(self, case: Case, found: Trace) -> Tensor:
        """The states behind a ring [n, 1, HV, V, K]: as they are where it is not folded."""
        assert case.read_index is not None and case.write_index is not None
        index = self.index
        folds = found.state_from[case.write_index.long()[index]] >= 0
        before = self._k_last(case.state[case.read_index.long()[index]]).double()
        return torch.where(folds[:, None, None, None], found.states, before)[:, None]

    def judge(self, case: Case, bound: Bound, returned: object) -> Verdict:
        """The verdict on what the call returned and left in the case."""
        c, p = self.contract, case.problem
        rows = bound.output(returned).reshape(p.B, c.tokens, p.HV, c.V)
        wanted = self.output
        if bound.epilogue is not None:
            n = len(self.requests)
            shaped = wanted.reshape(n, c.tokens, p.HV, c.V).double()
            wanted = bound.epilogue(shaped, self.index)
        parts = [("output", _error(rows[self.index], wanted), TOLERANCES[c.input_dtype])]
        if bound.state is not None:
            places = self.index if bound.rows is None else bound.rows.long()[self.index]
            got = self._k_last(bound.state(returned)[places])
            parts.append(("state", _error(got, self.states[:, -1]), TOLERANCES[c.state_dtype]))
        between = self._intermediate(case)
        if between is not None and bound.intermediate is not None:
            between = bound.intermediate(returned)[self.index, : c.tokens]
        if between is not None:
            parts.append(
                (
                    "intermediate",
                    _error(self._k_last(between), self.states),
                    TOLERANCES[c.state_dtype],
                )
            )
        verdicts = []
        for name, errors, usual in parts:
            accepted, worst = max(usual, self.tolerance), int(errors.argmax())
            error = float(errors[worst])
            said = (
                f"{name} of request {self.requests[worst]} of {p.B}: relative error {error:.2g},"
                f" expected at most {accepted:g}"
            )
            verdicts.append(Verdict(error <= accepted, error, said, accepted))
        if bound.left is not None:
            verdicts.append(_left(*bound.left(), p.B))
        # By shares of the tolerance, since output and state have one each.
        return max(verdicts, key=lambda v: v.error / v.tolerance)

    def _k_last(self, x: Tensor) -> Tensor:
        return x if self.contract.layout == "k_last" else x.transpose(-1, -2)

    def _intermediate(self, case: Case) -> Tensor | None:
        """The states after each token [n, T, ...] as the call left them; None where the contract
        has none.
        """
        c, tokens = self.contract, self.contract.tokens
        if c.intermediate == "none":
            return None
        if c.intermediate == "slots":
            assert case.slot_index is not None
            # The pool itself holds them, at the slot that each token names.
            return case.state[case.slot_index.long()[self.index, :tokens]]
        assert case.intermediate is not None
        rows = self.index if case.slot_index is None else case.slot_index.long()[self.index]
        return case.intermediate[rows, :tokens]
