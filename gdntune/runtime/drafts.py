"""Verifying drafts with one read of the state: `verify` leaves it as it is and keeps its inputs;
`commit` folds the accepted ones into the states of all layers, in one launch.

The protocol is called the raw window, after what is kept of each token: v, k before its norm, and
the gates as they came. SGLang and FlashInfer call it ReplaySSM. A state per token writes T states
a step; this reads the state twice and writes it once.

Both launches are decode calls: verify has `disable_state_update`, and a commit is a ragged call
whose rows are the window's and whose heads are those of all layers, side by side. So both are tuned
by the tables that decode is tuned by.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem, shown
from gdntune.problem import MAX_TOKENS, Contract, Problem, contract_fault
from gdntune.runtime import environment, ops
from gdntune.runtime.contracts import DTYPES

NOBODY = -1
TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a window keeps of one layer; the window's own memory, request by request.

    k: [requests, T, H, K], before its norm. v: [requests, T, HV, V]. gate: [requests, T, HV] (GDN's
    a, or g) or [requests, T, HV, K] (KDA's g). b: [requests, T, HV], logits.
    """

    k: Tensor
    v: Tensor
    gate: Tensor
    b: Tensor


class RawWindow:
    """The states of all layers and the inputs of one step's drafts.

    Owns every tensor, allocated once: verify allocates its output alone, so verify and commit can
    be captured in CUDA graphs. Rows of the window are requests of the step at hand: row n is the
    n-th of `state_indices`, at verify and at the commit after it.

    *Accepted* tokens of a request are the first accept_lens[n] of the T that were verified, those
    that become part of its state.

    problem: a layer at its largest: `contract.tokens` drafts (2 to 16) of at most B requests. Of
        the contract op, tokens, K, V, layout, gate, beta and the dtypes count.
    layers, slots: states are kept of `slots` sequences.
    A_log, dt_bias: the parameters of all layers, [layers, HV] (KDA: A_log [layers, HV], dt_bias
        [layers, HV, K]); the caller's tensors. None for both where contract.gate is `log`.
    lower_bound: KDA's, where contract.gate is `lower_bound`.
    null_index: a slot that is nobody's, beside every negative one; in vLLM's and SGLang's pools 0.
    device: where all of it is; by default that of A_log, else the CPU.

    Raises UnsupportedProblem, a ValueError, which names the argument.
    Formula: Gated Delta Networks (arXiv 2412.06464), eq. 10, in the recurrent form.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        layers: int,
        slots: int,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        null_index: int = NOBODY,
        device: torch.device | str | None = None,
    ):
        if fault := _fault(problem, layers, slots):
            raise UnsupportedProblem(fault)
        c = problem.contract
        self.problem, self.layers, self.slots = problem, layers, slots
        self.kda, self.null_index, self._lower_bound = c.op == "kda_decode", null_index, lower_bound
        per_key = (c.K,) if self.kda else ()
        check_parameter("A_log", A_log, (layers, problem.HV), c.has_parameters)
        check_parameter("dt_bias", dt_bias, (layers, problem.HV, *per_key), c.has_parameters)
        check_bound(c, lower_bound)
        if device is None:
            device = "cpu" if A_log is None else A_log.device
        heads, T = layers * problem.HV, c.tokens
        self._A_log = None if A_log is None else A_log.reshape(heads)
        self._dt_bias = None if dt_bias is None else dt_bias.reshape(heads, *per_key)

        def empty(dtype: str, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=TORCH[dtype], device=device)

        matrix = (c.V, c.K) if c.layout == "k_last" else (c.K, c.V)
        self.states = empty(c.state_dtype, slots, heads, *matrix)
        self._all = Inputs(
            empty(c.input_dtype, problem.B, T, layers * problem.H, c.K),
            empty(c.input_dtype, problem.B, T, heads, c.V),
            empty(c.gate_dtype, problem.B, T, heads, *per_key),
            empty(c.beta_dtype, problem.B, T, heads),
        )
        # a commit's outputs, which nobody reads
        self._unread = empty(c.input_dtype, 1, problem.B * T, heads, c.V)
        self._starts = torch.arange(problem.B + 1, device=device, dtype=torch.int32) * T
        self._inputs = [self._of(layer) for layer in range(layers)]

    @property
    def contracts(self) -> tuple[Contract, Contract]:
        """What verify and commit call, for `gdntune.prepare` and for a sweep's config."""
        c = self.problem.contract
        if self._A_log is not None and self._dt_bias is not None:
            c = c.replace(
                A_log_dtype=DTYPES[self._A_log.dtype], dt_bias_dtype=DTYPES[self._dt_bias.dtype]
            )
        return c.replace(mode="frozen"), c.replace(ragged=True)

    def _of(self, layer: int) -> Inputs:
        x, heads = self._all, self._heads(layer)
        keys = slice(layer * self.problem.H, (layer + 1) * self.problem.H)
        return Inputs(x.k[:, :, keys], x.v[:, :, heads], x.gate[:, :, heads], x.b[:, :, heads])

    def _heads(self, layer: int) -> slice:
        return slice(layer * self.problem.HV, (layer + 1) * self.problem.HV)

    @property
    def bytes(self) -> int:
        """Bytes of all that it owns."""
        x = self._all
        owned = (self.states, x.k, x.v, x.gate, x.b, self._unread, self._starts)
        return sum(t.numel() * t.element_size() for t in owned)

    def state(self, layer: int) -> Tensor:
        """A layer's states [slots, HV, V, K], as `gated_delta_rule_decode` takes them: a view, for
        prefill to write to, and for plain decode steps between verified ones.
        """
        check_range("layer", layer, self.layers)
        return self.states[:, self._heads(layer)]

    def inputs(self, layer: int) -> Inputs:
        """A layer's part of the window: views. What writes k, v and the gates here, such as the
        convolution before, saves `verify` the copies.
        """
        check_range("layer", layer, self.layers)
        return self._inputs[layer]

    def reset(self, slots: Tensor) -> None:
        """Empty states for these slots, [n] int64: sequences that begin."""
        self.states.index_fill_(0, slots, 0)

    def verify(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        b: Tensor,
        state_indices: Tensor,
        *,
        retrieve_parent_token: Tensor | None = None,
        output: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """The outputs [B, T, HV, V] of a layer's T drafts for B requests; no state changes.

        q, k: [B, T, H, K], v: [B, T, HV, V], gate: [B, T, HV] (KDA: [B, T, HV, K]), b: [B, T, HV],
            logits; strided as you like. Kept for the commit by a copy each, but for tensors that
            are the window's own (`inputs`).
        state_indices: [B] int32 or int64; negative, or null_index: padding, whose outputs are zero.
        retrieve_parent_token: drafts that form a tree; refused, since chains alone are served.
        output: to write to; by default a new tensor. settings: scale, use_qk_l2norm,
            allow_neg_eigval, softplus_beta, softplus_threshold, batch_invariant, as of
            `gated_delta_rule_decode`; a commit must be given the same.
        """
        if retrieve_parent_token is not None:
            raise UnsupportedProblem(
                "retrieve_parent_token: drafts that form a tree are not served; expected a chain of"
                " tokens for each request, and None here"
            )
        B = self._requests("state_indices", state_indices)
        kept = self.inputs(layer)
        given = {"k": k, "v": v, "gate": gate, "b": b}
        for name, x in given.items():
            own = getattr(kept, name)[:B]
            if not isinstance(x, Tensor) or x.shape != own.shape:
                what = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise UnsupportedProblem(f"{name} is of {what}: expected {list(own.shape)}")
            # the window's own memory, if a view of it came back
            if x.data_ptr() != own.data_ptr() or x.stride() != own.stride():
                own.copy_(x)
        own = Inputs(kept.k[:B], kept.v[:B], kept.gate[:B], kept.b[:B])
        heads = self._heads(layer)
        return self._decode(
            q, own, heads, self.state(layer),
            initial_state_indices=state_indices, disable_state_update=True, output=output,
            **settings,
        )  # fmt: skip

    def commit(
        self,
        state_indices: Tensor,
        accept_lens: Tensor,
        *,
        track_state_indices: Tensor | None = None,
        track_steps: Tensor | None = None,
        **settings: Any,
    ) -> None:
        """Folds the accepted tokens of the step that was verified into the states of all layers.

        state_indices: [B], as verified. Two live ones must differ. accept_lens: [B] int32 or
            int64, 0 to T; outside that they are clamped. A request that accepts none, and padding,
            keep their states, bit for bit.
        track_state_indices, track_steps: [B] each: the state after token track_steps[n], counted
            from 0, goes to slot track_state_indices[n] too, for a prefix cache. Where that token
            was not accepted, or the slot is padding, nothing is written. Tracked slots must differ
            from one another and from all live ones.
        settings: those of verify, but for output; `scale` means nothing here.

        Values on the device are not read: under GDNTUNE_CHECK=1 they are, and what is not as said
        above raises UnsupportedProblem. Without it a slot outside the pool is padding.
        """
        B = self._requests("state_indices", state_indices)
        check_pair(B, "accept_lens", accept_lens)
        if (track_state_indices is None) != (track_steps is None):
            raise UnsupportedProblem(
                "track_state_indices and track_steps: expected both or neither"
            )
        if environment.checking():
            self._check_values(state_indices, accept_lens, track_state_indices, track_steps)
        read = state_indices.to(torch.int32)
        count = accept_lens.to(torch.int32).clamp(0, self.problem.contract.tokens)
        if track_state_indices is not None and track_steps is not None:
            check_pair(B, "track_state_indices", track_state_indices)
            check_pair(B, "track_steps", track_steps)
            step = track_steps.to(torch.int32)
            reached = torch.where((step >= 0) & (step < count), step + 1, 0)
            # before the states move on
            self._fold(read, track_state_indices.to(torch.int32), reached, settings)
        self._fold(read, read, count, settings)

    def _fold(self, read: Tensor, write: Tensor, count: Tensor, settings: dict[str, Any]) -> None:
        """The states of slots `read` after the first `count` tokens, to slots `write`."""
        B = count.shape[0]
        # rows of q, k and v: of each request those that count, then the others, for nobody
        ends = torch.stack((self._starts[:B] + count, self._starts[1 : B + 1]), 1).flatten()
        rows = torch.cat((self._starts[:1], ends))
        nobody = torch.full_like(count, NOBODY)
        some = count > 0
        slots = [
            torch.stack((torch.where(some, x, nobody), nobody), 1).flatten() for x in (read, write)
        ]
        all_rows = B * self.problem.contract.tokens
        x = self._all
        flat = Inputs(
            *(
                t[:B].reshape(1, all_rows, *t.shape[2:])
                for t in (x.k, x.v, x.gate, x.b)
            )
        )  # fmt: skip
        # nobody reads what comes out, so that any q will do
        self._decode(
            flat.k, flat, slice(None), self.states,
            initial_state_indices=slots[0], output_state_indices=slots[1], cu_seqlens=rows,
            max_tokens=self.problem.contract.tokens, output=self._unread[:, :all_rows], **settings,
        )  # fmt: skip

    def _decode(
        self, q: Tensor, x: Inputs, heads: slice, states: Tensor, **given: Any
    ) -> Tensor:  # fmt: skip
        c = self.problem.contract
        given |= {
            "initial_state": states, "state_layout": c.layout, "null_index": self.null_index,
            "b" if c.beta == "logit" else "beta": x.b,
        }  # fmt: skip
        if self._A_log is not None and self._dt_bias is not None:
            given |= {"A_log": self._A_log[heads], "dt_bias": self._dt_bias[heads]}
        if self.kda:
            return ops.kda_decode(q, x.k, x.v, x.gate, lower_bound=self._lower_bound, **given)
        given["a" if c.has_parameters else "g"] = x.gate
        return ops.gated_delta_rule_decode(q, x.k, x.v, **given)

    def _requests(self, name: str, indices: Tensor) -> int:
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.is_floating_point():
            raise UnsupportedProblem(f"{name}: expected a tensor [B] of int32 or int64")
        B = indices.shape[0]
        if B > self.problem.B:
            raise UnsupportedProblem(
                f"{name} has {B} requests: the window was made for {self.problem.B}; make it with"
                f" requests={B}"
            )
        return B

    def _check_values(
        self, read: Tensor, accepted: Tensor, track: Tensor | None, steps: Tensor | None
    ) -> None:
        """What a host can see of values on the device, for GDNTUNE_CHECK."""
        live = self._live(read)
        check_unique("state_indices", live)
        for name, x, most in (
            ("accept_lens", accepted, self.problem.contract.tokens),
            ("track_steps", steps, None),
        ):
            for n, value in enumerate([] if x is None else x.tolist()):
                if value < 0 or (most is not None and value > most):
                    expected = "0 or more" if most is None else f"0 to {most}"
                    raise checked(f"{name}[{n}]={value}: expected {expected}")
        if track is not None:
            tracked = self._live(track)
            check_unique("track_state_indices", tracked)
            if both := sorted(set(tracked) & set(live)):
                raise checked(f"slots {both} are tracked and live: expected other slots")

    def _live(self, indices: Tensor) -> list[int]:
        found = [i for i in indices.tolist() if i >= 0 and i != self.null_index]
        for i in found:
            if i >= self.slots:
                raise checked(f"slot {i}: the window has {self.slots}")
        return found


def _fault(problem: Any, layers: Any, slots: Any) -> str | None:
    """Why there can be no window of these sizes, or None."""
    if not isinstance(problem, Problem):
        return f"problem is of type {type(problem).__name__}: expected a gdntune.Problem"
    c = problem.contract
    if fault := contract_fault(c):
        return fault
    if c.tokens < 2:
        return f"tokens={c.tokens}: expected 2 to {MAX_TOKENS} drafts; one token is plain decode"
    if problem.HV % problem.H:
        return f"HV={problem.HV}, H={problem.H}: expected HV to be a multiple of H"
    for name, n in (("layers", layers), ("slots", slots)):
        if type(n) is not int or n < 1:
            return f"{shown(name, n)}: expected a positive number"
    return None


def check_parameter(name: str, x: Tensor | None, shape: tuple[int, ...], needed: bool) -> None:
    """Refuses a parameter that a gate lacks, or has in another shape."""
    if (x is not None) != needed:
        raise UnsupportedProblem(
            f"{name}: the contract's gate has {'parameters' if needed else 'none'}; expected"
            f" {list(shape) if needed else None}"
        )
    if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != shape):
        what = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise UnsupportedProblem(f"{name} is {what}: expected a tensor {list(shape)}")


def check_bound(c: Contract, lower_bound: float | None) -> None:
    """Refuses a bound that the gate has not, or lacks."""
    if (lower_bound is not None) != (c.gate == "lower_bound"):
        raise UnsupportedProblem(
            f"lower_bound={lower_bound} with the gate {c.gate}: expected a number for the gate"
            " lower_bound, None for others"
        )


def check_range(name: str, x: int, n: int) -> None:
    """Refuses a number that is not from 0 to n - 1."""
    if not 0 <= x < n:
        raise UnsupportedProblem(f"{name}={x}: expected 0 to {n - 1}")


def check_pair(B: int, name: str, x: Tensor) -> None:
    """Refuses what is no tensor of a whole number a request."""
    if not isinstance(x, Tensor) or x.shape != (B,) or x.is_floating_point():
        raise UnsupportedProblem(f"{name}: expected a tensor [{B}] of int32 or int64")


def check_unique(name: str, slots: list[int]) -> None:
    """Refuses slots of which two are the same."""
    if len(set(slots)) < len(slots):
        twice = sorted({i for i in slots if slots.count(i) > 1})
        raise checked(f"{name} names slots {twice} more than once: expected different ones")


def checked(fault: str) -> UnsupportedProblem:
    """The error of a fault that GDNTUNE_CHECK found."""
    return UnsupportedProblem(f"{fault} (found by GDNTUNE_CHECK=1)")
