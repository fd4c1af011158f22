"""The calls that vLLM and SGLang make, with random arguments: for the tests here, small and on the
CPU, and for tests/gpu/engines_gpu.py, at the sizes of models.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import theirs
import torch

from gdntune.engines import vllm

Arguments = Callable[[], dict[str, Any]]


class Sizes(NamedTuple):
    """Of a call: requests, tokens of a draft, heads and their size, dtypes and device."""

    B: int = 4
    T: int = 3
    H: int = 2
    HV: int = 4
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def slots(self) -> int:
        """Enough for each draft's state, and one that is nobody's."""
        return self.B * self.T + 8

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers that depend on their shape and seed alone."""
        generator = torch.Generator().manual_seed(seed + sum(shape))
        x = torch.randn(shape, generator=generator)
        return x.to(self.device, self.dtype if dtype is None else dtype)

    def rows(self, L: int, width: int, seed: int = 0) -> torch.Tensor:
        """Rows [L, width] of a projection that is 64 wider."""
        return self.normal(L, width + 64, seed=seed)[:, :width]

    def pool(self) -> torch.Tensor:
        """States [slots, HV, V, K] whose slots are padded to pages."""
        width = self.HV * self.V * self.K
        x = self.normal(self.slots, width + 32, dtype=torch.float32)[:, :width]
        return _repaged(0.3 * x, self.state).unflatten(1, (self.HV, self.V, self.K))

    def indices(self, *values: Any) -> torch.Tensor:
        """int32 indices."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def slot_each(self, padding: int) -> torch.Tensor:
        """[B]: distinct slots, the second request on slot 0 and the last on padding."""
        slots = [1 + i * self.T for i in range(self.B)]
        slots[1:2] = [0]
        slots[-1] = padding
        return self.indices(*slots)

    def ragged(self) -> tuple[torch.Tensor, int]:
        """cu_seqlens [B+1] of drafts of 1 to T tokens, and their sum; the last request has none."""
        lengths = [self.T - i % self.T for i in range(self.B - 1)] + [0]
        bounds = [sum(lengths[:i]) for i in range(self.B + 1)]
        return self.indices(*bounds), bounds[-1]


def _repaged(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype, with the strides of a wider buffer."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 32, dtype=dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _gdn(s: Sizes, L: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """mixed_qkv of L rows, and the gates; a and b lie in one tensor, as in both engines."""
    ba = s.normal(L, 2 * s.HV, seed=1)
    return s.rows(L, 2 * s.H * s.K + s.HV * s.V), {
        "a": ba[:, : s.HV], "b": ba[:, s.HV :],
        "A_log": s.normal(s.HV, seed=2, dtype=torch.float32), "dt_bias": s.normal(s.HV, seed=3),
    }  # fmt: skip


def _kda(s: Sizes, L: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return s.rows(L, 2 * s.HV * s.K + s.HV * s.V), {
        "raw_g": s.normal(1, L, s.HV, s.K), "raw_beta": s.normal(1, L, s.HV, seed=4),
        "A_log": s.normal(s.HV, seed=2, dtype=torch.float32),
        "dt_bias": s.normal(s.HV * s.K, seed=5, dtype=torch.float32),
    }  # fmt: skip


def _unpacked(mixed: torch.Tensor, s: Sizes) -> dict[str, torch.Tensor]:
    parts = theirs.split(mixed, s.HV, s.K, s.V)
    return {name: x.unsqueeze(0) for name, x in zip("qkv", parts, strict=True)}


def of_vllm(s: Sizes) -> Iterator[tuple[str, str, str, Arguments]]:
    """A name, the module, the function, and what makes its arguments anew for each call."""
    B = s.B
    one, dense = s.slot_each(-1), s.indices(*range(B + 1))
    bounds, L = s.ragged()
    drafts = s.indices(*[[1 + n * s.T + t for t in range(s.T)] for n in range(B)])
    drafts[1, -1], drafts[-1] = 0, 0
    accepted = s.indices(*[1 + n % s.T for n in range(B)])
    accepted[1] = 1
    by_drafts = {"ssm_state_indices": drafts, "num_accepted_tokens": accepted, "cu_seqlens": bounds}
    by_request = {"ssm_state_indices": one, "cu_seqlens": dense}
    mixed, gates = _gdn(s, B)
    longer, draft_gates = _gdn(s, L)
    qwen, norm = vllm.QWEN, {"use_qk_l2norm_in_kernel": True}
    yield "packed", qwen, "fused_recurrent_gated_delta_rule_packed_decode", lambda: {
        "mixed_qkv": mixed, **gates, "scale": 0.2, "initial_state": s.pool(), **norm,
        "out": s.normal(B, 1, s.HV, s.V), "ssm_state_indices": one,
    }  # fmt: skip
    yield "sigmoid", qwen, "fused_sigmoid_gating_delta_rule_update", lambda: {
        **gates, **_unpacked(mixed, s), "initial_state": s.pool(), **by_request, **norm,
    }  # fmt: skip
    yield "sigmoid drafts", qwen, "fused_sigmoid_gating_delta_rule_update", lambda: {
        **draft_gates, **_unpacked(longer, s), "initial_state": s.pool(), **by_drafts, **norm,
    }  # fmt: skip
    for activation, given in (("silu", True), ("silu", False), ("sigmoid", True)):
        name = f"post conv {activation}{'' if given else ', output made'}"
        yield name, qwen, "fused_mtp_decode_impl", lambda activation=activation, given=given: {
            "mixed_qkv": longer, **draft_gates, "state_indices": drafts, "cu_seqlens": bounds,
            "num_accepted_tokens": accepted, "state": s.pool(),
            "output_gate": s.rows(L, s.HV * s.V, seed=6).unflatten(1, (s.HV, s.V)),
            "norm_weight": s.normal(s.V, seed=7),
            "out": s.normal(L, s.HV, s.V) if given else None, "scale": 0.1, "norm_eps": 1e-6,
            "output_gate_activation": activation,
        }  # fmt: skip
    g = -torch.rand(1, L, s.HV, device=s.device)
    beta = torch.rand(1, L, s.HV, device=s.device).to(s.dtype)
    yield "olmo", vllm.OLMO, "fused_recurrent_gated_delta_rule", lambda: {
        **_unpacked(longer, s), "g": g, "beta": beta, "initial_state": s.pool(), **by_drafts,
        **norm,
    }  # fmt: skip
    kmixed, raw = _kda(s, B)
    klonger, draft_raw = _kda(s, L)
    packed = {"mixed_qkv": kmixed, **raw, "state_indices": one}
    kda_packed = vllm.KIMI, "fused_recurrent_kda_packed_decode"
    for bound in (None, -5.0):
        yield f"kda packed {bound}", *kda_packed, lambda bound=bound: {
            **packed, "lower_bound": bound, "initial_state": s.pool(),
        }  # fmt: skip
    yield "kda packed, output given", *kda_packed, lambda: {
        **packed, "lower_bound": None, "initial_state": s.pool(), "scale": 0.3,
        "out": s.normal(1, B, s.HV, s.V),
    }  # fmt: skip
    kda = vllm.KIMI, "fused_recurrent_kda"
    yield "kda drafts", *kda, lambda: {
        **_unpacked(klonger, s), **draft_raw, "lower_bound": -5.0, "initial_state": s.pool(),
        **by_drafts, "out": s.normal(1, L, s.HV, s.V),
    }  # fmt: skip
    yield "kda one", *kda, lambda: {
        **_unpacked(kmixed, s), **raw, "lower_bound": None, "initial_state": s.pool(), **by_request,
    }  # fmt: skip
    log = -torch.rand(1, B, s.HV, s.K, device=s.device)
    each = torch.rand(1, B, s.HV, device=s.device).to(s.dtype)
    yield "bailing", vllm.BAILING, "fused_recurrent_kda", lambda: {
        **_unpacked(kmixed, s), "g": log, "beta": each, "initial_state": s.pool(), **by_request,
        "safe_gate": True, "lower_bound": -5.0,
    }  # fmt: skip


def of_sglang(op: str, s: Sizes) -> dict[str, Arguments]:
    """What makes the arguments of each method anew for each call."""
    kda, B = op == "kda", s.B
    bounds, L = s.ragged()

    def gates(n: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if not kda:
            return _gdn(s, n)
        mixed, raw = _kda(s, n)
        return mixed, {
            "a": raw["raw_g"].reshape(n, -1), "b": raw["raw_beta"][0], "dt_bias": raw["dt_bias"],
            "A_log": raw["A_log"].reshape(1, 1, -1, 1), "lower_bound": -5.0,
        }  # fmt: skip

    mixed, of_one = gates(B)
    longer, of_drafts = gates(L)
    slots = s.slot_each(-1)
    rings = {f"replayssm_{name}": None for name in ("d", "k", "g", "write_pos", "force_flush")}
    return {
        "decode": lambda: {
            **_unpacked(mixed, s), **of_one, "ssm_states": s.pool(), "cache_indices": slots,
            "query_start_loc": s.indices(*range(B + 1)),
        },
        "packed_decode": lambda: {
            "mixed_qkv": mixed, **of_one, "ssm_states": s.pool(), "cache_indices": slots,
            "scale": s.K**-0.5, "num_v_heads": s.HV, "head_v_dim": s.V, **rings,
        },
        "target_verify": lambda: {
            **_unpacked(longer, s), **of_drafts, "ssm_states": s.pool(),
            "cache_indices": torch.cat([slots, slots[:1]]), "query_start_loc": bounds,
            "intermediate_states_buffer": torch.zeros(
                B + 3, s.T, s.HV, s.V, s.K, dtype=s.state, device=s.device
            ),
            # longer than the batch, as the engine's own table is
            "intermediate_state_indices": s.indices(*range(B + 2, -1, -1)), "cache_steps": s.T,
            "retrieve_parent_token": None, "stable_rows": False,
        },
    }  # fmt: skip
