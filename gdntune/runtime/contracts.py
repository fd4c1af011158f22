"""A call as a value, and the contract that its tensors ask for: the cold path, where sizes that no
compiled function ties are refused.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem, listed
from gdntune.problem import MAX_TOKENS, Contract, Op, check_contract
from gdntune.runtime.arguments import PUBLIC, check_numbers, rank_fault

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Tensors(NamedTuple):
    """A call's tensors, in the order of the calling convention (kernels/spec.py)."""

    state: Any
    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    read_index: Any
    write_index: Any
    slot_index: Any
    accepted: Any
    cu_seqlens: Any
    intermediate: Any
    output: Any


class Settings(NamedTuple):
    """What is no tensor of a call.

    logit: whether `b` is beta's logit; indexed: whether `slot_index` is the buffer's index.
    """

    op: Op
    gate: str
    logit: bool
    indexed: bool
    state_layout: Any
    frozen: Any
    batch_invariant: Any
    dependent_launch: Any
    max_tokens: Any
    scale: Any
    softplus_beta: Any
    softplus_threshold: Any
    lower_bound: Any
    allow_neg_eigval: Any
    null_index: Any
    use_qk_l2norm: Any


class Layer(NamedTuple):
    """What a call does of a layer beside gates and delta rule, and its arguments. norm: the kind of
    its gate; conv: its activation; each `none` where there is none.
    """

    norm: Any = "none"
    output_gate: Any = None
    norm_weight: Any = None
    norm_eps: Any = 1e-6
    conv: Any = "none"
    mixed_qkv: Any = None
    conv_state: Any = None
    conv_weight: Any = None
    conv_bias: Any = None
    conv_position: Any = None
    conv_input: Any = "packed"

    @property
    def tensors(self) -> dict[str, Any]:
        """Its tensors by name."""
        kinds = ("norm", "norm_eps", "conv", "conv_input")
        return {name: getattr(self, name) for name in self._fields if name not in kinds}

    @property
    def values(self) -> tuple[Any, ...]:
        """What a compiled function takes behind a call's numbers."""
        if self.norm == "none" and self.conv == "none":
            return ()
        # parameters of a model, which DLPack refuses
        weight, taps, bias = (
            None if x is None else x.detach()
            for x in (self.norm_weight, self.conv_weight, self.conv_bias)
        )
        rest = (self.mixed_qkv, self.conv_state, taps, bias, self.conv_position)
        return (self.output_gate, weight, float(self.norm_eps), *rest)

    def contract(self, inner: Contract) -> Contract:
        """The contract of a call whose gates and delta rule are those of another."""
        fields: dict[str, Any] = {}
        if self.norm != "none":
            fields |= {"norm": self.norm, "norm_weight_dtype": self._dtype("norm_weight")}
        if self.conv != "none":
            if self.conv_weight.dim() != 2:
                raise UnsupportedProblem(
                    f"conv_weight has shape {tuple(self.conv_weight.shape)}: expected [D, width]"
                )
            fields |= {
                "conv": self.conv,
                "conv_width": self.conv_weight.shape[1],
                "conv_bias": self.conv_bias is not None,
                "conv_window": self._window(),
                "conv_input": self.conv_input,
            }
        return check_contract(inner.replace(**fields)) if fields else inner

    def _window(self) -> str:
        """Of a shifted one by its strides whether a row's channels or a channel's rows are side by
        side.
        """
        if self.conv_position is not None:
            return "ring"
        state = self.conv_state
        first = state.dim() == 3 and state.stride(2) != 1 and state.stride(1) == 1
        return "dims_first" if first else "shifted"

    def _dtype(self, name: str) -> Any:
        dtype = getattr(self, name).dtype
        if dtype not in DTYPES:
            raise UnsupportedProblem(f"{name} has dtype {dtype}: expected one of {listed(DTYPES)}")
        return DTYPES[dtype]


NO_LAYER = Layer()


def name_of(field: str, s: Settings) -> str:
    """What the caller calls a tensor."""
    if field == "slot_index":
        return "intermediate_state_indices" if s.indexed else "ssm_state_indices"
    if field == "a" and s.gate != "raw":
        return "g"
    if field == "b" and not s.logit:
        return "beta"
    return PUBLIC.get(field, field)


def numbers(s: Settings, K: int) -> tuple[float | int, ...]:
    """The numbers of a call as a compiled function takes them."""
    check_numbers(
        s.scale,
        s.softplus_beta,
        s.softplus_threshold,
        s.null_index,
        s.use_qk_l2norm,
        s.allow_neg_eigval,
        s.lower_bound,
    )
    return (
        K**-0.5 if s.scale is None else _real(s.scale),
        _real(s.softplus_beta),
        _real(s.softplus_threshold),
        _real(s.lower_bound),
        2.0 if s.allow_neg_eigval else 1.0,
        int(_real(s.null_index)),
        1 if s.use_qk_l2norm else 0,
    )


def _real(x: Any) -> float:
    """The value of a number that `check_numbers` has passed."""
    return float(x.real if isinstance(x, complex) else x)


def requests(t: Tensors, s: Settings) -> int:
    """B of a call. A compiled call ties a ragged call's indices to each other, and neither to
    cu_seqlens nor q to one row.
    """
    if fault := rank_fault(t.q, t.v, t.state):
        raise UnsupportedProblem(fault)
    if t.cu_seqlens is None:
        return int(t.q.shape[0])
    shape = t.cu_seqlens.shape
    if len(shape) != 1 or shape[0] < 1:
        raise UnsupportedProblem(
            f"cu_seqlens has shape {tuple(shape)}: expected [B+1], from 0 to the last request's end"
        )
    if t.q.shape[0] != 1:
        raise UnsupportedProblem(
            f"q has shape {tuple(t.q.shape)} with cu_seqlens: expected packed rows [1, total, H, K]"
        )
    B = int(shape[0]) - 1
    for field in ("read_index", "slot_index"):
        x = getattr(t, field)
        if x is not None and (not x.dim() or x.shape[0] != B):
            raise UnsupportedProblem(
                f"{name_of(field, s)} has shape {tuple(x.shape)} for cu_seqlens of {B} requests:"
                " expected one row a request"
            )
    return B


def check_sizes(contract: Contract, t: Tensors, s: Settings, B: int) -> None:
    """Refuses what compiled functions do not tie, and would read beyond."""
    T = contract.tokens if contract.ragged else t.q.shape[1]
    H, HV = t.q.shape[2], t.v.shape[2]
    if t.output.dtype != t.q.dtype:
        raise UnsupportedProblem(f"output has dtype {t.output.dtype}: expected q's, {t.q.dtype}")
    if H < 1 or HV % H:
        raise UnsupportedProblem(f"v has HV={HV} heads and q H={H}: HV must be a multiple of H")
    if t.A_log is not None:
        _check_parameters(s.op, t.A_log, t.dt_bias, H, HV, contract.K)
    if contract.intermediate == "slots":
        x = t.slot_index
        if x.dim() != 2 or (not contract.ragged and x.shape[1] < T):
            raise UnsupportedProblem(
                f"ssm_state_indices has shape {tuple(x.shape)} for T={T}: expected [B, 1+S] with a"
                " column a token; a plain [B] goes to initial_state_indices"
            )
    elif t.read_index is None and t.state.shape[0] != B:
        raise UnsupportedProblem(
            f"initial_state has {t.state.shape[0]} rows for {B} requests: expected one a request,"
            " or a pool with initial_state_indices"
        )
    if t.intermediate is not None:
        _check_buffer(t.intermediate, t.slot_index, B, T)


def _check_parameters(op: Op, A_log: Tensor, dt_bias: Tensor, H: int, HV: int, K: int) -> None:
    """A compiled call of KDA ties neither to the heads."""
    heads = (HV,) if op == "gdn_decode" else (HV, H)
    A_shape, dt_shape = A_log.shape, dt_bias.shape
    if A_shape and A_shape[0] in heads and dt_shape and dt_shape[0] in heads:
        return
    given = f"A_log has shape {tuple(A_shape)}, dt_bias {tuple(dt_shape)}: "
    if op == "gdn_decode":
        raise UnsupportedProblem(f"{given}expected one a value head, [{HV}] each")
    raise UnsupportedProblem(
        f"{given}expected A_log [{HV}] (one a value head) or [{H}] (one a q/k head) and dt_bias"
        f" [{HV}, {K}] or [{H}, {K}]"
    )


def _check_buffer(buffer: Tensor, index: Tensor | None, B: int, T: int) -> None:
    if buffer.dim() != 5 or buffer.shape[1] < T or (index is None and buffer.shape[0] < B):
        rows = "any rows" if index is not None else f"at least {B} rows"
        raise UnsupportedProblem(
            f"intermediate_states_buffer has shape {tuple(buffer.shape)}: expected [rows, steps,"
            f" HV, V, K] with {rows} and at least {T} steps"
        )


def _intermediate(t: Tensors, s: Settings) -> str:
    """Where the state after each token goes."""
    if t.slot_index is not None and not s.indexed:
        for field in ("read_index", "intermediate"):
            if getattr(t, field) is not None:
                raise UnsupportedProblem(
                    f"{name_of(field, s)} with ssm_state_indices: expected one of them;"
                    " ssm_state_indices names every slot"
                )
        return "slots"
    if t.intermediate is not None:
        return "indexed" if s.indexed else "dense"
    if s.indexed:
        raise UnsupportedProblem(
            "intermediate_state_indices without intermediate_states_buffer: give both or neither"
        )
    return "none"


def _updates(t: Tensors, s: Settings, slots: bool) -> bool:
    """Whether the final state is written."""
    if t.accepted is not None and not slots:
        raise UnsupportedProblem(
            "num_accepted_tokens without ssm_state_indices: it names a column of ssm_state_indices"
        )
    if t.write_index is not None and t.read_index is None and not slots:
        raise UnsupportedProblem(
            "output_state_indices without initial_state_indices: give both, or neither"
        )
    if t.write_index is not None and s.frozen:
        raise UnsupportedProblem(
            "output_state_indices with disable_state_update=True: nothing would be written there;"
            " give one of them"
        )
    return t.write_index is not None if slots else not s.frozen


def contract_of(t: Tensors, s: Settings) -> Contract:
    """The contract that a call's tensors ask for."""

    def dtype(field: str) -> Any:
        x = getattr(t, field)
        if x is None:
            return "fp32"
        if x.dtype not in DTYPES:
            raise UnsupportedProblem(
                f"{name_of(field, s)} has dtype {x.dtype}: expected one of {listed(DTYPES)}"
            )
        return DTYPES[x.dtype]

    intermediate = _intermediate(t, s)
    update = _updates(t, s, intermediate == "slots")
    ragged = t.cu_seqlens is not None
    if s.max_tokens is not None and not ragged:
        raise UnsupportedProblem("max_tokens without cu_seqlens: T is q.shape[1]; leave it out")
    for field in ("k", "v"):
        if dtype(field) != dtype("q"):
            raise UnsupportedProblem(
                f"{field} has dtype {getattr(t, field).dtype}: expected q's, {t.q.dtype}"
            )
    longest = MAX_TOKENS if s.max_tokens is None else int(_real(s.max_tokens))
    return check_contract(
        Contract(
            op=s.op,
            tokens=longest if ragged else t.q.shape[1],
            K=t.q.shape[3],
            V=t.v.shape[3],
            layout=s.state_layout,
            input_dtype=dtype("q"),
            state_dtype=dtype("state"),
            gate_dtype=dtype("a"),
            beta_dtype=dtype("b"),
            A_log_dtype=dtype("A_log"),
            dt_bias_dtype=dtype("dt_bias"),
            gate=s.gate,  # type: ignore[arg-type]
            beta="logit" if s.logit else "given",
            mode="update" if update else "frozen",
            intermediate=intermediate,  # type: ignore[arg-type]
            accepted=t.accepted is not None,
            pool=t.read_index is not None or intermediate == "slots",
            ragged=ragged,
        )
    )
