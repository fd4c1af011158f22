"""SGLang: decode, packed decode and verify of its GDN and KDA layers by our kernels.

With GDNTUNE_SGLANG=1 the plug-in, an entry point of `sglang.srt.plugins`, adds the backend
`gdntune` to `--linear-attn-decode-backend` and its kin, and hooks the construction of the two
dispatchers: where decode or verify is `gdntune` or `triton`, their kernels call ours. What ours
does not serve runs SGLang's own kernel, with one line of log; trees of drafts always do, as with
its other backends. A backend that was chosen explicitly, FlashInfer or CuTe DSL, stays.

States are [slots, HV, V, K], any slot stride; indices int32; padding is null_index and below 0.
"""

import copy
import functools
import importlib
from types import ModuleType
from typing import Any

from torch import Tensor

from gdntune.engines import rows
from gdntune.engines.substitute import Function, before, not_here
from gdntune.errors import UnsupportedProblem
from gdntune.runtime import environment, ops
from gdntune.runtime.packed import views

# Of SGLang's pools every slot is somebody's: only negative indices are padding.
NULL_INDEX = -1
BACKEND = "gdntune"
LINEAR = "sglang.srt.layers.attention.linear"
# The dispatchers, and whether their op is KDA.
DISPATCHERS = {
    f"{LINEAR}.gdn_backend.GDNKernelDispatcher.__init__": False,
    f"{LINEAR}.kda_backend.KDAKernelDispatcher.__init__": True,
}

_null: int | None = None
_hooked = False
_choice_added = False


def plugin() -> None:
    """What SGLang calls in each of its processes, before it applies the hooks."""
    if environment.plugin_is_on("GDNTUNE_SGLANG"):
        enable()


def enable(*, null_index: int = NULL_INDEX) -> None:
    """Makes the dispatchers that SGLang builds from now on call gdntune. Its hooks are applied by
    SGLang when all plug-ins are loaded. To call it again changes nothing; with another null_index
    it is refused. ToolMissing without SGLang.
    """
    global _null, _hooked, _choice_added
    if _null not in (None, null_index):
        raise UnsupportedProblem(
            f"null_index={null_index}: since enable() it is {_null}; call disable() first"
        )
    if not _choice_added:
        choices = _module("sglang.srt.arg_groups.choices")
        choices.add_linear_attn_kernel_backend_choices([BACKEND])
        _choice_added = True
    if not _hooked:
        registry = _module("sglang.srt.plugins.hook_registry")
        for target, kda in DISPATCHERS.items():
            registry.HookRegistry.register(
                target, functools.partial(built, kda=kda), registry.HookType.AROUND
            )
        _hooked = True
    _null = null_index


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise not_here("SGLang", e) from None


def disable() -> None:
    """Dispatchers that are built from now on call SGLang's own kernels; the hooks stay, and do
    nothing.
    """
    global _null
    _null = None


def built(
    construct: Function, dispatcher: Any, decode_backend: Any, prefill_backend: Any,
    verify_backend: Any = None, *, kda: bool,
) -> None:  # fmt: skip
    """Around a dispatcher's construction: builds it with triton where gdntune is chosen, which it
    would refuse, and puts ours before its kernels.
    """

    def triton_for(backend: Any) -> Any:
        custom = backend is not None and backend.is_custom()
        return type(backend)("triton") if custom and _null is not None else backend

    construct(
        dispatcher,
        triton_for(decode_backend),
        triton_for(prefill_backend),
        triton_for(verify_backend),
    )
    if _null is None:
        return
    triton = type(dispatcher.triton_kernel if kda else dispatcher.tree_verify_kernel)
    if type(dispatcher.decode_kernel) is triton:
        dispatcher.decode_kernel = with_ours(dispatcher.decode_kernel, kda, _null)
        dispatcher.supports_packed_decode = dispatcher.decode_kernel.supports_packed_decode
    if type(dispatcher.verify_kernel) is triton:
        dispatcher.verify_kernel = with_ours(dispatcher.verify_kernel, kda, _null)


def with_ours(kernel: Any, kda: bool, null_index: int) -> Any:
    """A copy of one of SGLang's kernel objects, of its type, that calls ours first."""
    name, ours = type(kernel).__name__, copy.copy(kernel)
    for method, function in (
        ("decode", decode), ("packed_decode", packed_decode), ("target_verify", target_verify),
    ):  # fmt: skip
        bound = functools.partial(function, kda=kda, null_index=null_index)
        setattr(ours, method, before(f"SGLang's {name}.{method}", bound, getattr(kernel, method)))
    return ours


def _rows(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, kda: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """A call's rows [1, L, ...] and parameters as the public functions name them."""
    L, HV, K = q.shape[1], v.shape[2], q.shape[3]
    packed = {"q": q, "k": k, "v": v, "b": b.reshape(1, L, HV)}
    if not kda:
        if lower_bound is not None:
            raise UnsupportedProblem(f"lower_bound={lower_bound} with GDN: it is KDA's")
        return packed | {"a": a.reshape(1, L, HV)}, {"A_log": A_log, "dt_bias": dt_bias}
    parameters = {
        "A_log": A_log.reshape(-1), "dt_bias": dt_bias.reshape(-1), "lower_bound": lower_bound,
    }  # fmt: skip
    return packed | {"g": a.reshape(1, L, HV, K)}, parameters


def _function(kda: bool) -> Function:
    return ops.kda_decode if kda else ops.gated_delta_rule_decode


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    lower_bound: float | None = None,
    kda: bool,
    null_index: int,
    **_: Any,
) -> Tensor:
    """A token a request: q, k [1, B, H, K], v [1, B, HV, V], raw gates a, b [B, HV] (KDA: a
    [B, HV, K]), cache_indices [B]; returns [1, B, HV, V].
    """
    packed, parameters = _rows(q, k, v, a, b, A_log, dt_bias, lower_bound, kda)
    return rows.decode(
        _function(kda), packed,
        parameters | {"initial_state": ssm_states, "null_index": null_index},
        slots=cache_indices, accepted=None, cu_seqlens=query_start_loc, output=None,
    )  # fmt: skip


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    kda: bool,
    null_index: int,
    **kwargs: Any,
) -> Tensor:
    """A token a request: mixed_qkv [B, 2HK + HV V] after the convolution, a, b [B, HV] (KDA: a
    [B, HV K]), cache_indices [B]; returns [1, B, HV, V].
    """
    _refuse_rings(kwargs)
    if kda:
        B, K = mixed_qkv.shape[0], ssm_states.shape[3]
        beta = b.reshape(B, num_v_heads)
        q, k, v = views(mixed_qkv, beta, beta, ssm_states, "k_last")
        output = ops.kda_decode(
            q, k, v, a.reshape(B, 1, num_v_heads, K), b=beta.unsqueeze(1), A_log=A_log.reshape(-1),
            dt_bias=dt_bias.reshape(-1), lower_bound=lower_bound, initial_state=ssm_states,
            initial_state_indices=cache_indices, scale=scale, null_index=null_index,
        )  # fmt: skip
    else:
        output = ops.gated_delta_rule_packed_decode(
            mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, initial_state=ssm_states,
            initial_state_indices=cache_indices, scale=scale, null_index=null_index,
        )  # fmt: skip
    return output.transpose(0, 1)


def target_verify(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None,
    kda: bool,
    null_index: int,
    **kwargs: Any,
) -> Tensor:
    """Drafts, a chain a request: q, k [1, L, H, K], v [1, L, HV, V]; the states are read, and the
    state after each token goes to intermediate_states_buffer [rows, steps, HV, V, K] at row
    intermediate_state_indices[n]; returns [1, L, HV, V]. Lengths differ where drafts are cut, so
    they are read from query_start_loc.
    """
    _refuse_rings(kwargs)
    if retrieve_parent_token is not None:
        raise UnsupportedProblem("retrieve_parent_token: trees of drafts; chains are served")
    N = query_start_loc.shape[0] - 1
    packed, parameters = _rows(q, k, v, a, b, A_log, dt_bias, lower_bound, kda)
    output: Tensor = _function(kda)(
        **packed, **parameters, initial_state=ssm_states, initial_state_indices=cache_indices[:N],
        intermediate_states_buffer=intermediate_states_buffer,
        intermediate_state_indices=intermediate_state_indices[:N], cu_seqlens=query_start_loc,
        max_tokens=cache_steps, disable_state_update=True, null_index=null_index,
    )  # fmt: skip
    return output


def _refuse_rings(kwargs: dict[str, Any]) -> None:
    rings = [
        name
        for name, x in kwargs.items()
        if (name.startswith("replayssm_") and x is not None) or (name == "cache_ring" and x)
    ]
    if rings:
        raise UnsupportedProblem(f"{', '.join(rings)}: a ring of drafts (ReplaySSM) is not served")
