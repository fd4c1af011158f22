"""vLLM: the decode of its GDN and KDA layers by our kernels.

With GDNTUNE_VLLM=1 the plug-in, an entry point of `vllm.general_plugins`, replaces the functions
that its layers call, in the modules that call them. Each function here has the parameters of the
one that it stands for, and `null_index`: the slot that vLLM keeps for padding. What ours does not
serve runs vLLM's own kernel, with one line of log.

States are [slots, HV, V, K], any slot stride; indices int32; padding is null_index and below 0.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.engines import rows
from gdntune.engines.substitute import Function, Patches, Target, before
from gdntune.errors import UnsupportedProblem
from gdntune.runtime import environment, ops
from gdntune.runtime.packed import views

# vLLM's `NULL_BLOCK_ID`: block 0 of a pool is nobody's.
NULL_INDEX = 0

QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
OLMO = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn"
KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
BAILING = "vllm.model_executor.models.bailing_moe_v3"
# Where its gated RMSNorm is, and whether it takes the activation: the newest first.
NORMS = (
    ("vllm.third_party.flash_linear_attention.ops.layernorm_guard", "layer_norm_fwd", True),
    ("vllm.model_executor.layers.mamba.ops.layernorm_gated", "_layer_norm_fwd", False),
)


def plugin() -> None:
    """What vLLM calls in each of its processes, perhaps more than once."""
    if environment.plugin_is_on("GDNTUNE_VLLM"):
        enable()


def enable(*, null_index: int = NULL_INDEX) -> None:
    """Makes vLLM's layers call gdntune, those that are imported later too. To call it again changes
    nothing; with another null_index it is refused.
    """
    global _on
    if _on is None:
        _on = Patches("vLLM", targets(null_index)), null_index
    elif _on[1] != null_index:
        raise UnsupportedProblem(
            f"null_index={null_index}: since enable() it is {_on[1]}; call disable() first"
        )
    _on[0].on()


def disable() -> None:
    """Puts vLLM's own functions back."""
    global _on
    if _on is not None:
        _on[0].off()
        _on = None


def replaced() -> dict[str, Function]:
    """Our functions that stand in vLLM's place now, by name."""
    return {} if _on is None else _on[0].replaced()


_on: tuple[Patches, int] | None = None


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    null_index: int,
) -> tuple[Tensor, Tensor]:
    """GDN, a token a request: mixed_qkv [B, 2HK + HV V] after the convolution, a and b [B, HV], out
    [B, 1, HV, V], ssm_state_indices [B].
    """
    ops.gated_delta_rule_packed_decode(
        mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
        initial_state_indices=ssm_state_indices, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel, null_index=null_index, output=out,
    )  # fmt: skip
    return out, initial_state


def sigmoid_gating_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    *,
    null_index: int,
) -> tuple[Tensor, Tensor]:
    """GDN or KDA on packed rows q, k [1, L, H, K], v [1, L, HV, V] from raw gates a, b [L, HV]
    (KDA: a [L, HV, K]): plain decode by slots [N], drafts by slots [N, S].
    """
    if initial_state is None or ssm_state_indices is None or cu_seqlens is None:
        raise UnsupportedProblem("states without a pool, slots or cu_seqlens: expected all three")
    if not inplace_final_state:
        raise UnsupportedProblem("inplace_final_state=False: states are updated in the pool")
    settings: dict[str, Any] = {
        "initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias, "scale": scale,
        "softplus_beta": beta, "softplus_threshold": threshold, "null_index": null_index,
        "use_qk_l2norm": use_qk_l2norm_in_kernel,
    }  # fmt: skip
    HV, K = v.shape[2], q.shape[3]
    gate = a.reshape(1, -1, HV, K) if is_kda else a.reshape(1, -1, HV)
    packed = {"q": q, "k": k, "v": v, "g" if is_kda else "a": gate, "b": b.reshape(1, -1, HV)}
    output = rows.decode(
        ops.kda_decode if is_kda else ops.gated_delta_rule_decode, packed, settings,
        slots=ssm_state_indices, accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, output=None,
    )  # fmt: skip
    return output, initial_state


def post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float = 128**-0.5,
    norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
    *,
    null_index: int,
    gated_norm: Callable[..., None] | None = None,
) -> Tensor:
    """GDN drafts after the convolution, then the gated RMSNorm: mixed_qkv [L, 2HK + HV V], a, b
    [L, HV], state_indices [N, S], output_gate and out [L, HV, V], norm_weight [V].

    gated_norm: `norm_by_torch` or what does the same; None is vLLM's own kernel on CUDA. vLLM's op
    gives zeros for a request of which no token was accepted; here such a count means one token.
    Rows beyond cu_seqlens[-1] hold nothing of meaning afterwards.
    """
    if output_gate_activation not in ("silu", "sigmoid"):
        raise UnsupportedProblem(
            f"output_gate_activation={output_gate_activation!r}: expected silu or sigmoid"
        )
    # looked for first: what is refused must be refused before a state is written
    norm = gated_norm or _norm_of(mixed_qkv.device.type, output_gate_activation)
    if out is None:
        out = torch.empty_like(output_gate, memory_format=torch.contiguous_format)
    q, k, v = (x.transpose(0, 1) for x in views(mixed_qkv, a, b, state, "k_last"))
    ops.gated_delta_rule_decode(
        q, k, v, a=a.unsqueeze(0), b=b.unsqueeze(0), A_log=A_log,
        dt_bias=dt_bias, initial_state=state, ssm_state_indices=state_indices,
        num_accepted_tokens=num_accepted_tokens, cu_seqlens=cu_seqlens,
        max_tokens=state_indices.shape[1], scale=scale, null_index=null_index,
        output=out.unsqueeze(0),
    )  # fmt: skip
    norm(out, output_gate, norm_weight, norm_eps, output_gate_activation)
    return out


def norm_by_torch(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> None:
    """Writes x rsqrt(mean x^2 + eps) weight act(gate) to x [..., V], in fp32, rounded once."""
    wide, gated = x.float(), gate.float()
    gated = torch.sigmoid(gated) if activation == "sigmoid" else torch.nn.functional.silu(gated)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    x.copy_(scaled * weight.float() * gated)


@functools.cache
def _norm_of(device: str, activation: str) -> Callable[..., None]:
    """The gated RMSNorm for a device: torch's, or vLLM's kernel on CUDA, where torch's takes eight
    launches.
    """
    if device != "cuda":
        return norm_by_torch
    for module, name, takes_activation in NORMS:
        if not takes_activation and activation != "silu":
            continue
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        named = {"activation": activation} if takes_activation else {}
        return functools.partial(_norm_by_vllm, function, named)
    raise UnsupportedProblem(
        "vLLM's gated RMSNorm is in none of the places of version 0.33: "
        + ", ".join(f"{module}.{name}" for module, name, _ in NORMS)
    )


def _norm_by_vllm(
    function: Function, named: dict[str, str], x: Tensor, gate: Tensor, weight: Tensor, eps: float,
    _: str,
) -> None:  # fmt: skip
    V = x.shape[-1]
    flat = x.view(-1, V)
    function(
        flat, weight, None, eps, z=gate.reshape(-1, V), out=flat, group_size=V,
        norm_before_gate=True, is_rms_norm=True, **named,
    )  # fmt: skip


def kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    *,
    null_index: int,
) -> tuple[Tensor, Tensor]:
    """KDA, a token a request: mixed_qkv [B, 2HK + H V], raw_g [1, B, H, K], raw_beta [1, B, H],
    state_indices [B]; the output is [1, B, H, V].
    """
    beta = raw_beta[0]
    q, k, v = views(mixed_qkv, beta, beta, initial_state, "k_last")
    output = ops.kda_decode(
        q, k, v, raw_g.transpose(0, 1), b=raw_beta.transpose(0, 1), A_log=A_log,
        dt_bias=dt_bias.view(-1), lower_bound=lower_bound, initial_state=initial_state,
        initial_state_indices=state_indices, scale=scale, null_index=null_index,
        output=None if out is None else out.transpose(0, 1),
    )  # fmt: skip
    return output.transpose(0, 1) if out is None else out, initial_state


def kda_from_raw_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
    *,
    null_index: int,
) -> tuple[Tensor, Tensor]:
    """KDA on packed rows q, k, v [1, L, H, K] from raw gates. fuse_gate says how vLLM's kernel
    forms them, and nothing here.
    """
    if dt_bias is None:
        raise UnsupportedProblem("dt_bias is None: the gate is formed with a bias")
    output = rows.decode(
        ops.kda_decode,
        {"q": q, "k": k, "v": v, "g": raw_g, "b": raw_beta},
        {
            "initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias.view(-1),
            "lower_bound": lower_bound, "null_index": null_index,
        },
        slots=ssm_state_indices, accepted=num_accepted_tokens, cu_seqlens=cu_seqlens, output=out,
    )  # fmt: skip
    return output if out is None else out, initial_state


def kda_from_log_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    *,
    null_index: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """KDA on packed rows from the log decay g [1, L, H, K] and beta. What else is given vLLM's own
    function leaves aside too.
    """
    output, state = _from_log_decay(
        ops.kda_decode, q, k, v, g, beta, scale, initial_state, inplace_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, ssm_state_indices, None, null_index,
    )  # fmt: skip
    return output, state


def gdn_from_log_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    null_index: int,
) -> tuple[Tensor, Tensor]:
    """GDN on packed rows from the log decay g [1, L, HV] and beta, as OLMo's layer calls it."""
    return _from_log_decay(
        ops.gated_delta_rule_decode, q, k, v, g, beta, scale, initial_state, inplace_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, ssm_state_indices, num_accepted_tokens, null_index,
    )  # fmt: skip


def _from_log_decay(
    function: Function, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
    scale: float | None, state: Tensor | None, in_place: bool, l2norm: bool,
    cu_seqlens: Tensor | None, slots: Tensor | None, accepted: Tensor | None, null_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if beta is None or state is None or slots is None or cu_seqlens is None or not in_place:
        raise UnsupportedProblem(
            "beta, a pool, slots or cu_seqlens are missing, or states are not updated in place:"
            " expected the call of a decode step"
        )
    output = rows.decode(
        function,
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        {
            "initial_state": state, "scale": scale, "null_index": null_index,
            "use_qk_l2norm": l2norm,
        },
        slots=slots, accepted=accepted, cu_seqlens=cu_seqlens, output=None,
    )  # fmt: skip
    return output, state


def targets(null_index: int) -> list[Target]:
    """What is replaced, where, and by what."""

    def served(module: str, name: str, ours: Function, parameters: str) -> Target:
        bound = functools.partial(ours, null_index=null_index)
        return Target(
            module,
            name,
            functools.partial(before, f"vLLM's {name}", bound),
            tuple(parameters.split()),
        )

    def implementation(theirs: Function) -> Function:
        """What returns the fused op, made to return ours before it; found once."""

        @functools.cache
        def substituted(op: Function) -> Function:
            bound = functools.partial(post_conv_mtp, null_index=null_index)
            return before("vLLM's fused_gdn_decode_post_conv_mtp", bound, op)

        @functools.wraps(theirs)
        def impl() -> Function:
            return substituted(theirs())

        return impl

    raw = "A_log a b dt_bias q k v initial_state ssm_state_indices num_accepted_tokens is_kda"
    given = "q k v g beta scale initial_state cu_seqlens ssm_state_indices"
    kda = "raw_g raw_beta A_log dt_bias lower_bound initial_state"
    return [
        served(
            QWEN, "fused_recurrent_gated_delta_rule_packed_decode", packed_decode,
            "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices",
        ),
        served(QWEN, "fused_sigmoid_gating_delta_rule_update", sigmoid_gating_update, raw),
        Target(QWEN, "fused_mtp_decode_impl", implementation, ()),
        served(OLMO, "fused_recurrent_gated_delta_rule", gdn_from_log_decay, given),
        served(KIMI, "fused_recurrent_kda_packed_decode", kda_packed_decode, f"mixed_qkv {kda}"),
        served(KIMI, "fused_recurrent_kda", kda_from_raw_gates, f"q k v {kda} ssm_state_indices"),
        served(BAILING, "fused_recurrent_kda", kda_from_log_decay, given),
    ]  # fmt: skip
