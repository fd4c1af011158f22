"""`torch.ops.gdntune`: the public functions as operators of torch's dispatcher, for torch.compile,
torch.export and make_fx. Each writes the state and an output that the caller gives; it returns
nothing, since an operator may not return what it writes.
"""

from typing import Any

import torch

from gdntune.runtime import call, layer_call, packed

_TENSORS = (
    "Tensor(a!) initial_state, Tensor q, Tensor k, Tensor v, Tensor {gate}, Tensor beta,"
    " Tensor? A_log, Tensor? dt_bias, Tensor? initial_state_indices, Tensor? output_state_indices,"
    " Tensor? slot_indices, Tensor? num_accepted_tokens, Tensor? cu_seqlens,"
    " Tensor(b!)? intermediate_states_buffer, Tensor(c!) output"
)
_SETTINGS = (
    "str gate_form, bool beta_is_logit, bool slots_are_rows, str state_layout,"
    " bool disable_state_update, bool batch_invariant, bool dependent_launch, int? max_tokens,"
    " float? scale, float softplus_beta, float softplus_threshold, float lower_bound,"
    " bool allow_neg_eigval, int null_index, bool use_qk_l2norm"
)
_PACKED = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,"
    " Tensor(a!) initial_state, Tensor initial_state_indices, Tensor(b!) output, str state_layout,"
    " float? scale, bool use_qk_l2norm, bool allow_neg_eigval, float softplus_beta,"
    " float softplus_threshold, int null_index, bool batch_invariant, bool dependent_launch"
)
_LAYER = (
    "Tensor mixed_qkv, Tensor {gate}, Tensor beta, Tensor(a!) initial_state, Tensor? A_log,"
    " Tensor? dt_bias, Tensor? initial_state_indices, Tensor? output_state_indices,"
    " Tensor? slot_indices, Tensor? num_accepted_tokens, Tensor? cu_seqlens, Tensor(b!) output,"
    " Tensor? output_gate, Tensor? norm_weight, Tensor(c!)? conv_state, Tensor? conv_weight,"
    " Tensor? conv_bias, Tensor? conv_position"
)
_ENDS = "str norm_gate, float norm_eps, str conv_activation, str conv_input"
_LIBRARY = torch.library.Library("gdntune", "DEF")


def _gdn(*values: Any) -> None:
    call.run(values[:15], ("gdn_decode", *values[15:]), route=False)


def _kda(*values: Any) -> None:
    call.run(values[:15], ("kda_decode", *values[15:]), route=False)


def _packed(
    mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, state: Any, index: Any, output: Any,
    *settings: Any,
) -> None:  # fmt: skip
    given = (mixed_qkv, a, b, state, A_log, dt_bias, index, output)
    packed.run(given, settings, route=False)


def _gdn_layer(*values: Any) -> None:
    layer_call.run(values[:18], ("gdn_decode", *values[18:-4]), values[-4:])


def _kda_layer(*values: Any) -> None:
    layer_call.run(values[:18], ("kda_decode", *values[18:-4]), values[-4:])


def _nothing(*_: Any) -> None:
    """The operators on fake tensors: they return nothing, and what they write keeps its shape."""


for _name, _schema, _function in (
    ("gated_delta_rule_decode", f"{_TENSORS.format(gate='a_or_g')}, {_SETTINGS}", _gdn),
    ("kda_decode", f"{_TENSORS.format(gate='g')}, {_SETTINGS}", _kda),
    ("gated_delta_rule_packed_decode", _PACKED, _packed),
    (
        "gated_delta_rule_layer_decode",
        f"{_LAYER.format(gate='a')}, {_SETTINGS}, {_ENDS}",
        _gdn_layer,
    ),
    ("kda_layer_decode", f"{_LAYER.format(gate='g')}, {_SETTINGS}, {_ENDS}", _kda_layer),
):
    _LIBRARY.define(f"{_name}({_schema}) -> ()")
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _device)
    torch.library.register_fake(f"gdntune::{_name}", _nothing, lib=_LIBRARY)
