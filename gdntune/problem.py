"""What is computed: `Contract` (what one compiled kernel can serve) and `Problem` (a contract at
sizes).

A contract's fields are what a table's rules are keyed on; nothing here imports torch.
"""

from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from gdntune.errors import UnsupportedProblem, listed, shown

Op = Literal["gdn_decode", "kda_decode"]
DType = Literal["bf16", "fp16", "fp32"]
Layout = Literal["k_last", "v_last"]
Gate = Literal["raw", "log", "softplus", "lower_bound"]
Beta = Literal["logit", "given"]
Mode = Literal["update", "frozen"]
Intermediate = Literal["none", "dense", "indexed", "slots"]
Norm = Literal["none", "silu", "sigmoid"]
Conv = Literal["none", "identity", "silu"]
Window = Literal["ring", "shifted", "dims_first"]
Channels = Literal["packed", "interleaved"]
RingDType = Literal["fp32", "bf16"]
Rounding = Literal["nearest", "stochastic"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_TOKENS = 16
GATES = {"gdn_decode": ("raw", "log"), "kda_decode": ("log", "softplus", "lower_bound")}
HEAD_SIZES_K = (64, 96, 128, 256)
RINGS = (16, 32)


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A problem without its sizes B, H and HV.

    op: `gdn_decode` (one decay a head) or `kda_decode` (one a key dimension).
    tokens: T, tokens a request and call (the largest, where `ragged`).
    K, V: key and value head size. layout: `k_last` is a state [slots, HV, V, K], `v_last` [slots,
        HV, K, V].
    input_dtype: q, k, v and output; state_dtype: the state and the intermediate states.
    gate_dtype: a (GDN) or g (KDA); beta_dtype: b or beta; A_log_dtype, dt_bias_dtype: the
        parameters, where the gate has them.
    gate: `raw` and `softplus` are -exp(A_log) softplus(a + dt_bias), `log` a log decay,
        `lower_bound` KDA's sigmoid form.
    beta: `logit` (sigmoid is applied) or `given`.
    mode: `update` writes the final state, `frozen` does not.
    intermediate: where the state after each token goes: nowhere, `dense` (a buffer by batch row),
        `indexed` (a buffer by `intermediate_state_indices`), `slots` (the pool itself, by
        `ssm_state_indices`).
    accepted: with `slots`, the start column comes from `num_accepted_tokens`.
    pool: the state is a pool of slots named by index tensors; otherwise row n of the state belongs
        to request n.
    ragged: q, k, v are packed rows [1, total, ...] delimited by cu_seqlens.
    norm: what the layer does with a head's output o [V] in the same call: nothing, or
        o rsqrt(mean(o^2) + eps) norm_weight gate(output_gate), its gate `silu` or `sigmoid`. With
        a ring GDN alone has it.
    norm_weight_dtype: of its weight [V]; the output gate has the inputs' dtype.
    conv: what the layer does with q, k and v before, in the same call: nothing, or the causal
        convolution of each channel over its last tokens, with `silu` behind it or without
        (`identity`), in fp32 and rounded to the inputs' dtype, which weights and windows have too.
    conv_width: its taps, 2 to 4. conv_bias: whether it has a bias.
    conv_window: where a slot keeps its last rows: a `ring`, whose row `conv_position` gets the new
        one, or `shifted` by a row a token, the oldest first; `dims_first`: shifted, and a channel's
        rows side by side in memory.
    conv_input: how the tokens' rows lie before it, as the projections leave them: `packed`, q, k
        and v [q | k | v], or, of GDN, `interleaved` by q/k head, as Qwen3-Next has them: q, k, and
        of the head's value heads v and z, the output's gate, [q | k | v | z]; then of b and a too
        [b | a]. Weights and windows are packed either way.
    ring: how many corrections a request's ring holds at most between folds into the state, 16 or
        32; 0: there is no ring, each call writes the state. The tokens of a call are drafts then:
        they are appended, and count as nothing until a later call's `ring_count` says so. Behind a
        convolution there is none.
    ring_dtype: of the corrections u; k is kept in the inputs' dtype, decays in fp32.
    ring_rounding: of a state where a ring is folded into it: to `nearest`, or up or down at random
        in proportion (`stochastic`), by a seed on the device.
    """

    op: Op = "gdn_decode"
    tokens: int = 1
    K: int = 128
    V: int = 128
    layout: Layout = "k_last"
    input_dtype: DType = "bf16"
    state_dtype: DType = "bf16"
    gate_dtype: DType = "bf16"
    beta_dtype: DType = "bf16"
    A_log_dtype: DType = "fp32"
    dt_bias_dtype: DType = "fp32"
    gate: Gate = "raw"
    beta: Beta = "logit"
    mode: Mode = "update"
    intermediate: Intermediate = "none"
    accepted: bool = False
    pool: bool = True
    ragged: bool = False
    norm: Norm = "none"
    norm_weight_dtype: DType = "fp32"
    conv: Conv = "none"
    conv_width: int = 4
    conv_bias: bool = False
    conv_window: Window = "ring"
    conv_input: Channels = "packed"
    ring: int = 0
    ring_dtype: RingDType = "fp32"
    ring_rounding: Rounding = "nearest"

    @property
    def layer(self) -> bool:
        """Whether a call does more of a model's layer than gates and delta rule."""
        return self.norm != "none" or self.conv != "none"

    @property
    def always_writes(self) -> bool:
        """Whether each call writes the final state: with a ring that is a call in some."""
        return self.mode == "update" and not self.ring

    @property
    def has_parameters(self) -> bool:
        """Whether the gate uses A_log and dt_bias."""
        return self.gate != "log"

    @property
    def reads_index(self) -> bool:
        """Whether the state to start from is named by a read index [B]."""
        return self.pool and self.intermediate != "slots"

    @property
    def writes_index(self) -> bool:
        """Whether the slot of the final state is named by a write index [B]."""
        return self.pool and self.mode == "update"

    def replace(self, **changes: Any) -> "Contract":
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def key(self) -> str:
        """A short stable name: the fields that differ from the defaults,
        `gdn_decode.tokens=4.state_dtype=fp32`.
        """
        # Both always: they are what a reader looks for first, whatever the defaults are.
        parts = [self.op, f"tokens={self.tokens}"]
        # not structs.fields, which resolves all annotations anew at each call: 0.4 ms
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            value = getattr(self, name)
            if name not in ("op", "tokens") and value != default:
                parts.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return ".".join(parts)


# What came after the first tables and journals, at its defaults, the newest first.
_LATER = (
    b',"conv_input":"packed"',
    b',"ring_rounding":"nearest"',
    b',"ring":0,"ring_dtype":"fp32"',
    b',"norm":"none","norm_weight_dtype":"fp32","conv":"none","conv_width":4,"conv_bias":false,'
    b'"conv_window":"ring"',
)


def without_defaults(encoded: bytes) -> bytes:
    """Compact JSON whose contracts of the delta rule alone say nothing of the rest of a layer, so
    that what older versions wrote is written again byte for byte, and they read what this one
    writes.
    """
    for fields in _LATER:
        encoded = encoded.replace(fields, b"")
    return encoded


# With two of them as factors, work units fit into 64 bits.
MAX_SIZE = 2**31 - 1
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """A contract at a batch size B, H q/k heads and HV value heads (GVA: HV is a multiple of H)."""

    contract: Contract
    B: Size
    H: Size
    HV: Size

    @property
    def work_units(self) -> int:
        """B*HV, the axis that tables are keyed on."""
        return self.B * self.HV

    def key(self) -> str:
        return f"{self.contract.key()}.B={self.B}.H={self.H}.HV={self.HV}"


TYPES = {name: get_args(hint) for name, hint in get_type_hints(Contract).items() if get_args(hint)}
PLAIN_TYPES = {name: hint for name, hint in get_type_hints(Contract).items() if hint in (int, bool)}


def contract_fault(c: Any) -> str | None:
    """Why the mathematics, or any kernel here, has no such contract; None where it is legal. The
    one legality function.
    """
    if not isinstance(c, Contract):
        return f"the contract is of type {type(c).__name__}: expected a gdntune.Contract"
    for name, accepted in TYPES.items():
        value = getattr(c, name)
        if not isinstance(value, str) or value not in accepted:
            return f"{shown(name, value)}: expected one of {listed(accepted)}"
    # msgspec checks what it decodes, not what Python constructs. By type(): True is an int too,
    # and would stand in keys as `True`.
    for name, kind in PLAIN_TYPES.items():
        value = getattr(c, name)
        if type(value) is not kind:
            return f"{shown(name, value)}: expected {kind.__name__}"
    if not 1 <= c.tokens <= MAX_TOKENS:
        return (
            f"tokens={c.tokens}: expected 1 to {MAX_TOKENS}; split longer runs into several calls"
        )
    if c.K not in HEAD_SIZES_K:
        return f"K={c.K}: expected one of {listed(HEAD_SIZES_K)}"
    if c.V % 32 or not 32 <= c.V <= 512:
        return f"V={c.V}: expected multiples of 32 from 32 to 512"
    if c.gate not in GATES[c.op]:
        return f"gate={c.gate!r} with op={c.op}: expected one of {listed(GATES[c.op])}"
    if c.intermediate == "slots" and not c.pool:
        return (
            "intermediate='slots' without a pool: the slots are those of the pool; pass pool=True"
        )
    if c.accepted and c.intermediate != "slots":
        return (
            f"accepted=True with intermediate={c.intermediate!r}: num_accepted_tokens goes with"
            " 'slots' alone"
        )
    if c.norm == "none" and c.norm_weight_dtype != "fp32":
        return (
            f"norm_weight_dtype={c.norm_weight_dtype!r} with norm='none': there is no weight;"
            " leave it at 'fp32'"
        )
    return _ring_fault(c) or _conv_fault(c)


def _ring_fault(c: Contract) -> str | None:
    """Why a contract's ring is not legal, or none of ours."""
    if c.ring == 0:
        usual = (c.ring_dtype, c.ring_rounding) == ("fp32", "nearest")
        return None if usual else "ring_dtype or ring_rounding with ring=0: leave them out"
    if c.ring_rounding != "nearest" and c.state_dtype == "fp32":
        return "ring_rounding='stochastic' with state_dtype='fp32': nothing is rounded to 16 bits"
    if c.ring not in RINGS:
        return f"ring={c.ring}: expected 0 (none) or one of {listed(RINGS)}"
    if c.conv != "none":
        return (
            f"ring={c.ring} with conv={c.conv!r}: expected conv='none'; convolve in a launch ahead"
        )
    if c.norm != "none" and c.op != "gdn_decode":
        return (
            f"ring={c.ring} with norm={c.norm!r}, op={c.op}: expected norm='none', or"
            " op=gdn_decode; normalise in a launch behind"
        )
    if (c.mode, c.intermediate, c.pool, c.ragged) != ("update", "none", True, False):
        return (
            f"ring={c.ring} with mode={c.mode!r}, intermediate={c.intermediate!r}, pool={c.pool},"
            f" ragged={c.ragged}: expected mode='update' and intermediate='none' on a pool, with as"
            " many tokens of each request"
        )
    return None


def _conv_fault(c: Contract) -> str | None:
    """Why a contract's convolution is not legal, or none of ours."""
    if c.conv == "none":
        if (c.conv_width, c.conv_bias, c.conv_window) != (4, False, "ring"):
            return "conv_width, conv_bias or conv_window with conv='none': leave them out"
        if c.conv_input != "packed":
            return (
                f"conv_input={c.conv_input!r} with conv='none': expected 'packed'; what is"
                " interleaved goes through a convolution first"
            )
        return None
    if c.conv_input == "interleaved" and c.op != "gdn_decode":
        return f"conv_input='interleaved' with op={c.op}: expected 'packed', or op=gdn_decode"
    if c.conv_input == "interleaved" and c.gate_dtype != c.beta_dtype:
        return (
            f"conv_input='interleaved' with gate_dtype={c.gate_dtype!r}, beta_dtype="
            f"{c.beta_dtype!r}: a and b are one projection's rows, expected one dtype"
        )
    if not 2 <= c.conv_width <= 4:
        return f"conv_width={c.conv_width}: expected 2 to 4"
    if c.intermediate not in ("none", "slots") or not c.pool:
        return (
            f"conv={c.conv!r} with intermediate={c.intermediate!r}, pool={c.pool}: its windows are"
            " in the slots of a pool; expected pool=True and intermediate 'none' or 'slots'"
        )
    return None


def check_contract(c: Contract) -> Contract:
    """The contract itself, or UnsupportedProblem."""
    fault = contract_fault(c)
    if fault:
        raise UnsupportedProblem(fault)
    return c


def problem_fault(p: Any) -> str | None:
    """Why a problem is not legal; None where it is."""
    if not isinstance(p, Problem):
        return f"the problem is of type {type(p).__name__}: expected a gdntune.Problem"
    for name in ("B", "H", "HV"):
        value = getattr(p, name)
        if type(value) is not int:
            return f"{shown(name, value)}: expected int"
        if not 1 <= value <= MAX_SIZE:
            return f"{name}={value}: expected integers from 1 to {MAX_SIZE}"
    if p.HV % p.H:
        return (
            f"HV={p.HV}, H={p.H}: HV must be a multiple of H (each q/k head serves HV/H value"
            " heads)"
        )
    return contract_fault(p.contract)
