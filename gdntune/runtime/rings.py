"""Drafts behind a ring of corrections: a verify reads the state once, and writes it where the ring
is folded in, once in several steps.

What is kept of an accepted token is its key, its correction u and its decay; the state lacks it
until a fold. FlashInfer calls the protocol ucache, after u; the ReplaySSM of SGLang is `RawWindow`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract, Problem, problem_fault
from gdntune.runtime import environment, ring_call
from gdntune.runtime.contracts import DTYPES
from gdntune.runtime.drafts import (
    NOBODY,
    TORCH,
    check_bound,
    check_pair,
    check_parameter,
    check_range,
    check_unique,
    checked,
)
from gdntune.runtime.norm_arguments import NORM_GATES, check_epsilon, check_kind, together
from gdntune.runtime.ring_arguments import numbers

_TREE = (
    "retrieve_parent_token: drafts that form a tree are not served; expected a chain of tokens for"
    " each request, and None here"
)
_NO_NORM = ("none", 1e-6)


def gated_delta_rule_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_decay: Tensor,
    ring_base: Tensor,
    ring_count: Tensor,
    ring_seed: Tensor | None = None,
    A_log: Tensor | None = None,
    a: Tensor | None = None,
    dt_bias: Tensor | None = None,
    b: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    capacity: int = 16,
    flush_min: int | None = None,
    append: bool = True,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: str = "silu",
    norm_eps: float = 1e-6,
    retrieve_parent_token: Tensor | None = None,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Gated DeltaNet decode of T drafts (1 to 16) for each of B requests behind a ring: returns the
    output [B, T, HV, V], appends the drafts to the ring, and writes the state where the ring is
    folded into it.

    initial_state: a pool [slots, HV, V, K] (v_last: [slots, HV, K, V]) in bf16, fp16 or fp32.
    ring_k: [slots, H, rows, K] of q's dtype, keys as they came. ring_u: [slots, HV, rows, V], fp32
        or bf16: beta (v - S k) over the norm of its key. ring_decay: [slots, HV, rows], fp32: each
        token's own decay. rows is capacity + T or more; a slot's memory is contiguous, slots lie
        at any stride. The caller owns them.
    ring_base, ring_count: [B] int32. Request n has ring_count[n] live entries, 0 to capacity, in
        the rows from ring_base[n] on, modulo rows; clamped to what there is. They are read alone.
    ring_seed: [2] int32: states are rounded up or down at random in proportion where rings are
        folded into them, by Philox with this key; each call should have another. None: to nearest.
    capacity: live entries at most, 16 or 32.
    flush_min: a request with so many live entries or more is folded, as is one to which T more do
        not fit; None: those alone. The state with its live entries goes to the slot of
        output_state_indices, by default the one read.
    append: whether the drafts are kept, in the rows behind the live entries.
    output_gate, norm_weight, norm_gate, norm_eps: the layer's gated RMSNorm in the same launch,
        where the first two are given, as in `gated_delta_rule_layer_decode`: output_gate is
        [B, T, HV, V] of q's dtype, norm_weight [V]. On CUDA V is a power of two then.

    What a caller does with its counts, once all layers are through: where a request was folded, its
    base is (base + count) % rows and its count 0; then its count grows by the drafts accepted.
    `RingState` does so.

    retrieve_parent_token: refused, as drafts that form a tree are not served.
    The other arguments, what is static (dtypes, T up to 4, 8 and 16, K, V, capacity), ownership and
        errors are as in `gated_delta_rule_decode`.
    Formula: Gated Delta Networks (arXiv 2412.06464), eq. 10, with the state's last updates apart.
    """
    if (g is None) == (A_log is None or a is None or dt_bias is None):
        raise UnsupportedProblem(
            "the gate: expected A_log, a and dt_bias together (raw), or g (log decay); give one of"
            " the two"
        )
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    given = (
        initial_state, q, k, v, a if g is None else g, beta if b is None else b, A_log, dt_bias,
        initial_state_indices,
        initial_state_indices if output_state_indices is None else output_state_indices,
        None, None, None, None, output, ring_k, ring_u, ring_decay, ring_base, ring_count,
        ring_seed, output_gate, norm_weight,
    )  # fmt: skip
    settings = (
        "gdn_decode", "raw" if g is None else "log", b is not None, False, state_layout, False,
        batch_invariant, False, None, scale, softplus_beta, softplus_threshold, 0.0,
        allow_neg_eigval, null_index, use_qk_l2norm,
    )  # fmt: skip
    norm = _norm_of(output_gate, norm_weight, norm_gate, norm_eps)
    return _run(given, settings, (capacity, flush_min, append, *norm), retrieve_parent_token)


def _norm_of(gate: Any, weight: Any, kind: Any, epsilon: Any) -> tuple[str, float]:
    """The norm's kind and epsilon; of calls without one always the same."""
    if not together({"output_gate": gate, "norm_weight": weight}, "output_gate", "norm_weight"):
        return _NO_NORM
    check_kind("norm_gate", kind, NORM_GATES)
    check_epsilon(epsilon)
    return kind, epsilon


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_decay: Tensor,
    ring_base: Tensor,
    ring_count: Tensor,
    ring_seed: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    b: Tensor | None = None,
    beta: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    capacity: int = 16,
    flush_min: int | None = None,
    append: bool = True,
    retrieve_parent_token: Tensor | None = None,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Kimi Delta Attention behind a ring: as `gated_delta_rule_verify`, with one decay for each
    key. Returns the output [B, T, HV, V].

    g, A_log, dt_bias, lower_bound: as in `kda_decode`.
    ring_decay: [slots, HV, rows, K], fp32: each token's own decays.
    The other arguments, what is static, ownership and errors are as in `gated_delta_rule_verify`.
    Formula: Kimi Linear (arXiv 2510.26692), eq. 1, with the state's last updates apart.
    """
    if (A_log is None) != (dt_bias is None) or (A_log is None and lower_bound is not None):
        raise UnsupportedProblem(
            "the gate: expected A_log and dt_bias together, lower_bound with them alone, or neither"
            " (g is the log decay)"
        )
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    if isinstance(dt_bias, Tensor) and dt_bias.dim() == 1:
        dt_bias = dt_bias.unflatten(0, (-1, q.shape[-1]))
    given = (
        initial_state, q, k, v, g, beta if b is None else b, A_log, dt_bias, initial_state_indices,
        initial_state_indices if output_state_indices is None else output_state_indices,
        None, None, None, None, output, ring_k, ring_u, ring_decay, ring_base, ring_count,
        ring_seed, None, None,
    )  # fmt: skip
    gate = "log" if A_log is None else "softplus" if lower_bound is None else "lower_bound"
    settings = (
        "kda_decode", gate, b is not None, False, state_layout, False, batch_invariant, False, None,
        scale, softplus_beta, softplus_threshold, 0.0 if lower_bound is None else lower_bound,
        allow_neg_eigval, null_index, use_qk_l2norm,
    )  # fmt: skip
    return _run(given, settings, (capacity, flush_min, append, *_NO_NORM), retrieve_parent_token)


def _run(
    given: tuple[Any, ...], settings: tuple[Any, ...], ring: tuple[Any, ...], tree: Any
) -> Tensor:
    """A call whose arguments are named as they are given; tree: refused."""
    if tree is not None:
        raise UnsupportedProblem(_TREE)
    for name, at in (("q", 1), ("k", 2), ("v", 3), ("initial_state_indices", 8)):
        if not isinstance(given[at], Tensor):
            raise UnsupportedProblem(
                f"{name} is of type {type(given[at]).__name__}: expected a tensor"
            )
    return ring_call.run(given, settings, ring)


class _Token(NamedTuple):
    """One token for a call that folds alone, which nobody keeps: q and k, v, gate and beta, and the
    output, which nobody reads.
    """

    k: Tensor
    v: Tensor
    gate: Tensor
    output: Tensor

    @classmethod
    def of(cls, B: int, ring_k: Tensor, ring_u: Tensor, ring_decay: Tensor) -> "_Token":
        """For B requests behind these rings, on all their heads."""
        keys, heads, V = ring_k.shape[1], ring_u.shape[1], ring_u.shape[3]
        return cls(
            ring_k.new_zeros(1, 1, keys, ring_k.shape[3]), ring_k.new_zeros(1, 1, heads, V),
            ring_decay.new_zeros(1, 1, heads, *ring_decay.shape[3:]),
            ring_k.new_empty(B, 1, heads, V),
        )  # fmt: skip


def gated_delta_rule_commit(
    checkpoint_state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_decay: Tensor,
    ring_base: Tensor,
    ring_count: Tensor,
    state_indices: Tensor,
    accept_lens: Tensor | None = None,
    *,
    track_state_indices: Tensor | None = None,
    track_steps: Tensor | None = None,
    ring_seed: Tensor | None = None,
    capacity: int = 16,
    state_layout: str = "k_last",
    null_block_id: int = NOBODY,
    batch_invariant: bool = False,
) -> None:
    """Folds rings, GDN's or KDA's, into states in one launch: of all layers, where their heads lie
    side by side.

    checkpoint_state: [slots, heads, V, K] (v_last: [slots, heads, K, V]), updated in place; heads
        are HV, or layers * HV. ring_k, ring_u, ring_decay, ring_base, ring_count, capacity: as in
        `gated_delta_rule_verify`, of as many heads. They are read alone: a caller then sets
        counts to 0.
    state_indices: [B] int32 or int64; two live ones must differ. Negative, null_block_id (0 in
        vLLM's and SGLang's pools) and what is outside the pool is padding.
    accept_lens: [B] int32 or int64: so many of the entries behind the live ones are folded too: the
        drafts accepted of a verify just before, if it did not fold. None: none. ring_count +
        accept_lens is clamped to capacity.
    track_state_indices, track_steps: [B] each: the state after accepted token track_steps[n],
        counted from 0, goes to slot track_state_indices[n] too, by a launch before. Where that
        token was not accepted, or the slot is padding, nothing is written. Tracked slots must
        differ from one another and from all live ones.

    ring_seed: as in `gated_delta_rule_verify`.

    Allocates its outputs, which nobody reads. Errors are as in `gated_delta_rule_verify`.
    """
    if (track_state_indices is None) != (track_steps is None):
        raise UnsupportedProblem("track_state_indices and track_steps: expected both or neither")
    B = state_indices.shape[0]
    token = _Token.of(B, ring_k, ring_u, ring_decay)
    rings = (ring_k, ring_u, ring_decay)
    accepted = torch.zeros_like(ring_count)
    if accept_lens is not None:
        check_pair(B, "accept_lens", accept_lens)
        accepted = accept_lens.to(torch.int32).clamp(min=0)
    given: dict[str, Any] = {
        "capacity": capacity, "state_layout": state_layout, "null_index": null_block_id,
        "ring_seed": ring_seed,
        "batch_invariant": batch_invariant,
    }  # fmt: skip
    if track_state_indices is not None and track_steps is not None:
        check_pair(B, "track_state_indices", track_state_indices)
        check_pair(B, "track_steps", track_steps)
        step = track_steps.to(torch.int32)
        reached = (step >= 0) & (step < accepted)
        goal = torch.where(reached, track_state_indices.to(torch.int32), NOBODY)
        _fold(checkpoint_state, rings, ring_base, ring_count + step + 1, state_indices, goal, token,
              given)  # fmt: skip
    _fold(checkpoint_state, rings, ring_base, ring_count + accepted, state_indices, state_indices,
          token, given)  # fmt: skip


def _fold(
    states: Tensor, rings: tuple[Tensor, ...], base: Tensor, count: Tensor, read: Tensor,
    write: Tensor, token: _Token, given: dict[str, Any],
) -> None:  # fmt: skip
    """The states of slots `read` with `count` entries of their rings, to slots `write`."""
    B, most = count.shape[0], given["capacity"]
    k, v, gate = (x.expand(B, *x.shape[1:]) for x in token[:3])
    given |= {
        "initial_state": states, "initial_state_indices": read.to(torch.int32),
        "output_state_indices": write.to(torch.int32), "ring_k": rings[0], "ring_u": rings[1],
        "ring_decay": rings[2], "ring_base": base, "ring_count": count.clamp(0, most),
        "flush_min": 0, "append": False, "output": token.output[:B],
    }  # fmt: skip
    if rings[2].dim() == 4:
        kda_verify(k, k, v, gate, beta=gate[..., 0], **given)
    else:
        gated_delta_rule_verify(k, k, v, g=gate, beta=gate, **given)


class RingState:
    """The states of all layers of a model, a ring beside each, and where each sequence is in its
    ring.

    Owns every tensor, allocated once; `verify` allocates its output alone, so a step can be
    captured in a CUDA graph. A step is `begin`, `verify` for each layer, `accept`.

    *Accepted* tokens of a request are the first accept_lens[n] of the T that were verified, those
    that become part of its sequence.

    problem: a layer at its largest: `contract.tokens` drafts (1 to 16) of at most B requests.
        `contract.ring` is the capacity, 16 or 32, `contract.ring_dtype` u's, `contract.norm` the
        gate of a norm behind each verify. Of the contract V, K, layout, gate, beta and the dtypes
        count too.
    layers, slots: states are kept of `slots` sequences.
    A_log, dt_bias: the parameters of all layers, [layers, HV] (KDA: dt_bias [layers, HV, K]); the
        caller's tensors. None for both where contract.gate is `log`.
    lower_bound: KDA's, where contract.gate is `lower_bound`.
    flush_min: from so many live entries on a request is folded; None: as late as may be.
    seed: where contract.ring_rounding is `stochastic`: what its random numbers start from.
    null_index: a slot that is nobody's, beside every negative one.
    device: where all of it is; by default that of A_log, else the CPU.

    Raises UnsupportedProblem, a ValueError, which names the argument.
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
        flush_min: int | None = None,
        seed: int = 0,
        null_index: int = NOBODY,
        device: torch.device | str | None = None,
    ):
        if fault := _fault(problem, layers, slots):
            raise UnsupportedProblem(fault)
        c = problem.contract
        numbers(c.ring, flush_min, True)
        self.problem, self.layers, self.slots = problem, layers, slots
        self.flush_min, self.null_index = flush_min, null_index
        check_parameter("A_log", A_log, (layers, problem.HV), c.has_parameters)
        self._kda, self._lower_bound = c.op == "kda_decode", lower_bound
        per_key = (c.K,) if self._kda else ()
        check_parameter("dt_bias", dt_bias, (layers, problem.HV, *per_key), c.has_parameters)
        check_bound(c, lower_bound)
        if device is None:
            device = "cpu" if A_log is None else A_log.device
        self._A_log, self._dt_bias = A_log, dt_bias
        self.rows, heads = c.ring + c.tokens, layers * problem.HV

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        matrix = (c.V, c.K) if c.layout == "k_last" else (c.K, c.V)
        self.states = zeros(TORCH[c.state_dtype], slots, heads, *matrix)
        keys = layers * problem.H
        self.ring_k = zeros(TORCH[c.input_dtype], slots, keys, self.rows, c.K)
        self.ring_u = zeros(TORCH[c.ring_dtype], slots, heads, self.rows, c.V)
        self.ring_decay = zeros(torch.float32, slots, heads, self.rows, *per_key)
        # one more, which padding writes to
        self._base, self._count = zeros(torch.int32, 2, slots + 1)
        self._row_base, self._row_count = zeros(torch.int32, 2, problem.B)
        self._seeds: Tensor | None = None
        if c.ring_rounding == "stochastic":
            # a layer's own, and how many steps there were
            own = [(seed * layers + layer) % 2**31 for layer in range(layers)]
            self._seeds = torch.tensor([own, [0] * layers], dtype=torch.int32, device=device).mT
            self._seeds = self._seeds.contiguous()
        self._token = _Token.of(problem.B, self.ring_k, self.ring_u, self.ring_decay)
        self._tokens = c.tokens

    @property
    def contracts(self) -> tuple[Contract, Contract]:
        """What verify and commit call, for `gdntune.prepare` and for a sweep's config."""
        c = self.problem.contract
        if self._A_log is not None and self._dt_bias is not None:
            c = c.replace(
                A_log_dtype=DTYPES[self._A_log.dtype], dt_bias_dtype=DTYPES[self._dt_bias.dtype]
            )
        return c, commit_contract(c)

    @property
    def bytes(self) -> int:
        """Bytes of all that it owns."""
        owned = (
            self.states, self.ring_k, self.ring_u, self.ring_decay, self._base, self._count,
            self._row_base, self._row_count, *self._token,
        )  # fmt: skip
        seeds = () if self._seeds is None else (self._seeds,)
        return sum(t.numel() * t.element_size() for t in (*owned, *seeds))

    @property
    def counts(self) -> Tensor:
        """[slots] int32: each slot's live entries, which its state lacks."""
        return self._count[: self.slots]

    def state(self, layer: int) -> Tensor:
        """A layer's states [slots, HV, V, K], for prefill to write to: a view. They are a
        sequence's own where its count is 0, as after `reset` and `commit`.
        """
        check_range("layer", layer, self.layers)
        return self.states[:, self._heads(layer)]

    def reset(self, slots: Tensor) -> None:
        """Empty states and rings for these slots, [n] int64: sequences that begin."""
        for x in (self.states, self._base, self._count):
            x.index_fill_(0, slots, 0)

    def begin(self, state_indices: Tensor) -> None:
        """Takes up a step's requests, [B] int32 or int64, at most problem.B: before its first
        verify. Negative, or null_index, is padding. Two live ones must differ.
        """
        B = self._requests(state_indices)
        at = self._places(state_indices)
        torch.index_select(self._base, 0, at, out=self._row_base[:B])
        torch.index_select(self._count, 0, at, out=self._row_count[:B])
        if self._seeds is not None:
            self._seeds[:, 1].add_(1)

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
        output_gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        retrieve_parent_token: Tensor | None = None,
        output: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """The outputs [B, T, HV, V] of a layer's T drafts for the B requests of `begin`.

        q, k: [B, T, H, K], v: [B, T, HV, V], gate: [B, T, HV] (a, or the log decay; KDA's g: [B, T,
            HV, K]), b: [B, T, HV], as `contract.beta` says; strided as you like. T is
            contract.tokens or fewer, the same for all layers of a step.
        output_gate [B, T, HV, V], norm_weight [V], norm_eps: of the norm behind it, where
            contract.norm says its gate; else none is given.
        retrieve_parent_token: drafts that form a tree; refused. output: to write to; by default a
            new tensor. settings: scale, use_qk_l2norm, allow_neg_eigval, softplus_beta,
            softplus_threshold, batch_invariant, as of `gated_delta_rule_verify`.
        """
        check_range("layer", layer, self.layers)
        B = self._requests(state_indices)
        if not isinstance(q, Tensor) or q.dim() != 4 or q.shape[1] > self.problem.contract.tokens:
            what = list(q.shape) if isinstance(q, Tensor) else type(q).__name__
            raise UnsupportedProblem(
                f"q is {what}: expected [B, T, H, K] with T up to {self.problem.contract.tokens}"
            )
        self._tokens = q.shape[1]
        heads, keys = self._heads(layer), self._keys(layer)
        A_log = dt_bias = None
        if self._A_log is not None and self._dt_bias is not None:
            A_log, dt_bias = self._A_log[layer], self._dt_bias[layer]
        c = self.problem.contract
        given: dict[str, Any] = {
            "initial_state": self.states[:, heads], "initial_state_indices": state_indices,
            "A_log": A_log, "dt_bias": dt_bias, "b" if c.beta == "logit" else "beta": b,
            "ring_k": self.ring_k[:, keys], "ring_u": self.ring_u[:, heads],
            "ring_decay": self.ring_decay[:, heads], "ring_base": self._row_base[:B],
            "ring_count": self._row_count[:B], "ring_seed": self._seed(layer), "capacity": c.ring,
            "flush_min": self.flush_min,
            "state_layout": c.layout, "null_index": self.null_index, "output": output,
            "retrieve_parent_token": retrieve_parent_token, **settings,
        }  # fmt: skip
        if (output_gate is not None or norm_weight is not None) != (c.norm != "none"):
            raise UnsupportedProblem(
                f"output_gate and norm_weight with a contract of norm={c.norm!r}: expected"
                f" {'neither' if c.norm == 'none' else 'both'}"
            )
        if c.norm != "none":
            given |= {"output_gate": output_gate, "norm_weight": norm_weight}
            given |= {"norm_gate": c.norm, "norm_eps": norm_eps}
        if self._kda:
            return kda_verify(q, k, v, gate, lower_bound=self._lower_bound, **given)
        given["a" if c.has_parameters else "g"] = gate
        return gated_delta_rule_verify(q, k, v, **given)

    def accept(self, state_indices: Tensor, accept_lens: Tensor) -> None:
        """Counts the accepted tokens of a step into the rings: a few numbers a request for all
        layers, no state.

        state_indices: as verified. accept_lens: [B] int32 or int64, 0 to T; clamped outside that.
        Under GDNTUNE_CHECK=1 what is not as said raises UnsupportedProblem.
        """
        B = self._requests(state_indices)
        check_pair(B, "accept_lens", accept_lens)
        T = self._tokens
        if environment.checking():
            self._check_values(state_indices, accept_lens, T)
        base, count = self._row_base[:B], self._row_count[:B]
        ring = self.problem.contract.ring
        least, _ = numbers(ring, self.flush_min, True)
        folded = count >= min(least, ring + 1 - T)
        left = torch.where(folded, 0, count) + accept_lens.to(torch.int32).clamp(0, T)
        begun = torch.where(folded, (base + count) % self.rows, base)
        self._keep(state_indices, begun, left)

    def commit(
        self,
        state_indices: Tensor,
        *,
        track_state_indices: Tensor | None = None,
        track_counts: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Folds all live entries of these requests into the states of all layers, in one launch:
        for sequences that go on without a ring, or whose state is asked for.

        state_indices: [B], at most problem.B. track_state_indices, track_counts: [B] each: the
            state with the first track_counts[n] live entries goes to slot track_state_indices[n]
            too, by a launch before, for a prefix cache; clamped to those there are; where the slot
            is padding, nothing is written. Tracked slots must differ from one another and from all
            live ones; what their ring holds is dropped.
        batch_invariant: as of `gated_delta_rule_decode`.
        """
        B = self._requests(state_indices)
        self.begin(state_indices)
        if (track_state_indices is None) != (track_counts is None):
            raise UnsupportedProblem(
                "track_state_indices and track_counts: expected both or neither"
            )
        base, count = self._row_base[:B], self._row_count[:B]
        if track_state_indices is not None and track_counts is not None:
            check_pair(B, "track_state_indices", track_state_indices)
            check_pair(B, "track_counts", track_counts)
            if environment.checking():
                self._check_tracked(state_indices, track_state_indices)
            reached = torch.minimum(track_counts.to(torch.int32).clamp(min=0), count)
            self._fold(state_indices, track_state_indices, reached, batch_invariant)
            nothing = torch.zeros_like(count)
            live = self._places(state_indices) < self.slots
            target = torch.where(live, track_state_indices, NOBODY)
            self._keep(target, nothing, nothing)
        self._fold(state_indices, state_indices, count, batch_invariant)
        self._keep(state_indices, (base + count) % self.rows, torch.zeros_like(count))

    def _fold(self, read: Tensor, write: Tensor, count: Tensor, invariant: bool) -> None:
        c = self.problem.contract
        given = {
            "capacity": c.ring, "state_layout": c.layout, "null_index": self.null_index,
            "batch_invariant": invariant, "ring_seed": self._seed(0),
        }  # fmt: skip
        rings = (self.ring_k, self.ring_u, self.ring_decay)
        base = self._row_base[: count.shape[0]]
        _fold(self.states, rings, base, count, read, write, self._token, given)

    def _seed(self, layer: int) -> Tensor | None:
        return None if self._seeds is None else self._seeds[layer]

    def _keep(self, slots: Tensor, base: Tensor, count: Tensor) -> None:
        at = self._places(slots)
        self._base.index_copy_(0, at, base)
        self._count.index_copy_(0, at, count)

    def _places(self, indices: Tensor) -> Tensor:
        """Where the cursors of slots are, int64; those of padding, one place behind all."""
        nobody = (indices < 0) | (indices >= self.slots) | (indices == self.null_index)
        return torch.where(nobody, self.slots, indices).to(torch.int64)

    def _heads(self, layer: int) -> slice:
        return slice(layer * self.problem.HV, (layer + 1) * self.problem.HV)

    def _keys(self, layer: int) -> slice:
        return slice(layer * self.problem.H, (layer + 1) * self.problem.H)

    def _requests(self, indices: Tensor) -> int:
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.is_floating_point():
            raise UnsupportedProblem("state_indices: expected a tensor [B] of int32 or int64")
        B = indices.shape[0]
        if B > self.problem.B:
            raise UnsupportedProblem(
                f"state_indices has {B} requests: the rings were made for {self.problem.B}; make"
                f" them with a problem of B={B}"
            )
        return B

    def _live(self, indices: Tensor) -> list[int]:
        found = [i for i in indices.tolist() if i >= 0 and i != self.null_index]
        for i in found:
            if i >= self.slots:
                raise checked(f"slot {i}: there are {self.slots}")
        return found

    def _check_values(self, read: Tensor, accepted: Tensor, T: int) -> None:
        check_unique("state_indices", self._live(read))
        for n, value in enumerate(accepted.tolist()):
            if not 0 <= value <= T:
                raise checked(f"accept_lens[{n}]={value}: expected 0 to {T}")

    def _check_tracked(self, read: Tensor, track: Tensor) -> None:
        live, tracked = self._live(read), self._live(track)
        check_unique("state_indices", live)
        check_unique("track_state_indices", tracked)
        if both := sorted(set(tracked) & set(live)):
            raise checked(f"slots {both} are tracked and live: expected other slots")


def commit_contract(c: Contract) -> Contract:
    """What a commit calls behind a verify of a contract: one token, without a gate to compute or a
    norm.
    """
    return c.replace(
        tokens=1, gate="log", gate_dtype="fp32", beta="given", beta_dtype="fp32",
        A_log_dtype="fp32", dt_bias_dtype="fp32", norm="none", norm_weight_dtype="fp32",
    )  # fmt: skip


def _fault(problem: Any, layers: Any, slots: Any) -> str | None:
    """Why there can be no rings of these sizes, or None."""
    if not isinstance(problem, Problem):
        return f"problem is of type {type(problem).__name__}: expected a gdntune.Problem"
    if fault := problem_fault(problem):
        return fault
    if not problem.contract.ring:
        return "ring=0: expected a contract with ring=16 or 32"
    for name, n in (("layers", layers), ("slots", slots)):
        if type(n) is not int or n < 1:
            return f"{name}={n!r}: expected a positive number"
    return None
