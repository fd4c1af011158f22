"""transformers: its models decode by our kernels.

`enable()` replaces the recurrent step of GDN and KDA models by attribute of their modules, which
serves every device; where `kernels` is installed it also offers ours to `use_kernels=True`, whose
mapping would otherwise load another kernel from the hub on CUDA.

The states are updated in place. The step's own function leaves them, and the layer copies what it
returns into the cache: returning the cache's own tensor makes that copy a copy onto itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.engines.substitute import (
    NOT_SERVED,
    Counts,
    Function,
    Patches,
    Target,
    not_here,
    say_once,
)
from gdntune.problem import HEAD_SIZES_K, MAX_TOKENS
from gdntune.runtime import ops
from gdntune.runtime.contracts import DTYPES

# The models of transformers 5.24 whose step is one of these two functions.
GDN_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini")
KDA_MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
GDN_STEP, KDA_STEP = "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"
# The step's name in the kernel mapping that `use_kernels=True` looks into.
HUB_NAMES = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
PARAMETERS = (
    "query", "key", "value", "g", "beta", "initial_state", "output_final_state",
    "use_qk_l2norm_in_kernel",
)  # fmt: skip
_compiling = torch.compiler.is_compiling


def enable() -> None:
    """Makes transformers' models decode by gdntune, those that are imported later too. To call it
    again changes nothing. ToolMissing without transformers.
    """
    _map_for_hub(True)
    _PATCHES.on()


def disable() -> None:
    """Puts transformers' own functions back. Models that `use_kernels=True` has changed keep ours
    until they are kernelized anew.
    """
    _PATCHES.off()
    _map_for_hub(False)


def replaced() -> dict[str, Function]:
    """Our functions that stand in transformers' place now, by name."""
    return _PATCHES.replaced()


def fault(
    op: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    state: Tensor | None,
    rest: dict[str, Any],
) -> str | None:  # fmt: skip
    """Why a step is not served; None where it is. Looks at nothing but types and sizes, so that
    torch.compile can follow it.
    """
    if rest.get("cu_seqlens") is not None:
        return "packed sequences (cu_seqlens)"
    if query.device.type not in ("cpu", "cuda"):
        return f"tensors on {query.device.type}"
    B, T, H, K = query.shape
    HV, V = value.shape[2:]
    if not 1 <= T <= MAX_TOKENS:
        return f"{T} tokens a request: 1 to {MAX_TOKENS} are served"
    if K not in HEAD_SIZES_K or V % 32 or not 32 <= V <= 512:
        return f"head sizes K={K}, V={V}"
    if HV % H:
        return f"{HV} value heads for {H} key heads"
    if not query.dtype == key.dtype == value.dtype:
        return f"q, k and v of {query.dtype}, {key.dtype} and {value.dtype}"
    if unknown := [x.dtype for x in (query, g, beta) if x.dtype not in DTYPES]:
        return f"tensors of {unknown[0]}"
    if state is not None and (state.dtype not in DTYPES or state.shape != (B, HV, K, V)):
        return f"a state {tuple(state.shape)} of {state.dtype}"
    if op == "kda_decode" and tuple(g.shape) != (B, T, HV, K):
        return f"a gate of shape {tuple(g.shape)}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, g, beta)):
        return "gradients are on: decode has none; call under torch.no_grad()"
    return None


def step(
    op: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    state: Tensor | None,
    output_final_state: bool, use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Decodes query, key [B, T, H, K], value [B, T, HV, V] with log decay g and beta; returns the
    output [B, T, HV, V] and the state [B, HV, K, V], which is `state` itself, updated.
    """
    keep = output_final_state
    # What a state starts as: zeros, in fp32 as theirs.
    if state is None:
        B, _, HV, V = value.shape
        state = value.new_zeros((B, HV, query.shape[3], V), dtype=torch.float32)
    decode = ops.gated_delta_rule_decode if op == "gdn_decode" else ops.kda_decode
    output = decode(
        query, key, value, g=g, beta=beta, initial_state=state, state_layout="v_last",
        use_qk_l2norm=use_qk_l2norm, disable_state_update=not keep,
    )  # fmt: skip
    return output, state if keep else None


def _make(op: str, name: str) -> Callable[[Function], Function]:
    def make(theirs: Function) -> Function:
        counts = Counts()

        def ours(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
            initial_state: Tensor | None = None, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
            return _served(
                op, name, theirs, counts, query, key, value, g, beta, initial_state,
                output_final_state, use_qk_l2norm_in_kernel, kwargs,
            )  # fmt: skip

        ours.__name__ = ours.__qualname__ = getattr(theirs, "__name__", name)
        ours.counts = counts  # type: ignore[attr-defined]
        return ours

    return make


def _served(
    op: str, name: str, theirs: Function, counts: Counts, query: Tensor, key: Tensor, value: Tensor,
    g: Tensor, beta: Tensor, state: Tensor | None, keep: bool, l2norm: bool, rest: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    reason = fault(op, query, key, value, g, beta, state, rest)
    # Neither counters nor errors there: what is traced must be one graph.
    if _compiling():
        if reason is None:
            return step(op, query, key, value, g, beta, state, keep, l2norm)
        _say_traced(name, reason)
    else:
        if reason is None:
            try:
                result = step(op, query, key, value, g, beta, state, keep, l2norm)
                counts.served += 1
                return result
            # What our functions refuse in the end, theirs may still take; a fault of the caller's
            # comes up there too.
            except NOT_SERVED as e:
                reason = str(e)
        counts.passed_on += 1
        _say(name, reason)
    return theirs(
        query, key, value, g=g, beta=beta, initial_state=state, output_final_state=keep,
        use_qk_l2norm_in_kernel=l2norm, **rest,
    )  # fmt: skip


def _say(name: str, reason: str) -> bool:
    say_once(f"transformers' {name} is served by its own function: {reason}")
    return True


# While a graph is traced: once for the graph, and no part of it.
_say_traced = torch._dynamo.assume_constant_result(_say)


def _targets() -> list[Target]:
    return [
        Target(f"transformers.models.{model}.modeling_{model}", name, _make(op, name), PARAMETERS)
        for models, name, op in (
            (GDN_MODELS, GDN_STEP, "gdn_decode"),
            (KDA_MODELS, KDA_STEP, "kda_decode"),
        )
        for model in models
    ]


_PATCHES = Patches("transformers", _targets())
_HUB_COUNTS = Counts()


class HubLayer(torch.nn.Module):
    """The recurrent step as a layer of a kernel repository. `kernels` binds its forward to the
    module which transformers has made of its function, and allows no other members here.
    """

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        theirs = functools.partial(type(self).forward, self)
        return _served(
            "kda_decode" if g.dim() == 4 else "gdn_decode", "step of use_kernels=True", theirs,
            _HUB_COUNTS, query, key, value, g, beta, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, kwargs,
        )  # fmt: skip


class HubRepository:
    """A repository of `kernels` that is this module: nothing is downloaded."""

    layer_name = "HubLayer"

    def load(self) -> type[torch.nn.Module]:
        return HubLayer

    def __str__(self) -> str:
        return "gdntune.engines.transformers (layer `HubLayer`)"


_REPOSITORY = HubRepository()
_hub_before: dict[str, Any] = {}


def _map_for_hub(ours: bool) -> None:
    """Puts ours into transformers' mapping of kernels, or what was there before."""
    try:
        from transformers.integrations import hub_kernels
    except ModuleNotFoundError as e:
        raise not_here("transformers", e) from None

    make = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
    if make is None:
        # Without `kernels` there is no use_kernels=True.
        return
    mapping, inference = make(), vars(hub_kernels)["Mode"].INFERENCE
    for name in HUB_NAMES:
        modes = mapping.setdefault(name, {}).setdefault("cuda", {})
        if ours and modes.get(inference) is not _REPOSITORY:
            _hub_before[name] = modes.get(inference)
            modes[inference] = _REPOSITORY
        elif not ours and modes.get(inference) is _REPOSITORY:
            if (before := _hub_before.pop(name, None)) is None:
                del modes[inference]
            else:
                modes[inference] = before
