"""Contracts, the names of peers' entries and what the reference makes of a case, shared by the tests of peers."""

import torch
from fakes import library

from gdntune.problem import Contract

BF16, FP32 = Contract(), Contract(state_dtype="fp32")
MTP = FP32.replace(tokens=4)
KDA = Contract(op="kda_decode", gate="softplus")
SLOTS = {"mode": "frozen", "intermediate": "slots"}
TRITON = ("fused_sigmoid_gating_delta_rule_update",)
PACKED, GIVEN = (
    "fused_recurrent_gated_delta_rule_packed_decode",
    ("fused_recurrent_gated_delta_rule",),
)
PACKED_KDA = "fused_recurrent_kda_packed_decode"
OP, BEHIND = "fused_gdn_decode_post_conv_mtp", "ours_then_rms_norm_gated"
KDA_RAW, KDA_GIVEN = ("fused_recurrent_kda",), ("fused_recurrent_kda_fwd",)
OUTPUTS_KDA = ("kda_wy_output_only", "kda_recoverssm_verify")
GDN, KDA_IN_PLACE = ("fused_recurrent_gated_delta_rule",), ("fused_recurrent_kda",)
PRETRANSPOSE, WY = "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp_wy_output_only"
RING = "gated_delta_rule_mtp_ucache_flush"


def compare_with_reference(case):
    """The reference's result, written into the case."""
    found = library.decode(case.contract, dtype=torch.float32, **case.tensors()).stored(
        case.contract
    )
    case.state.copy_(found.state)
    if case.intermediate is not None:
        case.intermediate.copy_(found.intermediate)
    return found
