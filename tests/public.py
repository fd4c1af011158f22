"""What the tests of the public functions share: the devices, a case's public call, what a refusal
must be.
"""

import pytest

import gdntune
from gdntune.errors import UnsupportedProblem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def call(case, **changes):
    """The public call that asks for a case's contract."""
    c = case.contract
    arguments = {
        "initial_state": case.state,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "b" if c.beta == "logit" else "beta": case.b,
        "initial_state_indices": case.read_index,
        "output_state_indices": case.write_index,
        "intermediate_states_buffer": case.intermediate,
        "ssm_state_indices"
        if c.intermediate == "slots"
        else "intermediate_state_indices": case.slot_index,
        "num_accepted_tokens": case.accepted,
        "cu_seqlens": case.cu_seqlens,
        "disable_state_update": c.mode == "frozen" and c.intermediate != "slots",
        "state_layout": c.layout,
        "scale": case.scale,
        "use_qk_l2norm": bool(case.use_qk_l2norm),
        "allow_neg_eigval": case.beta_scale == 2.0,
        "softplus_beta": case.softplus_beta,
        "softplus_threshold": case.softplus_threshold,
        "null_index": case.null_index,
        "output": case.output,
    }
    if c.ragged:
        arguments["max_tokens"] = c.tokens
    if c.op == "kda_decode":
        if c.gate == "lower_bound":
            arguments["lower_bound"] = case.lower_bound
        return gdntune.kda_decode(case.q, case.k, case.v, case.a, **{**arguments, **changes})
    arguments["a" if c.gate == "raw" else "g"] = case.a
    return gdntune.gated_delta_rule_decode(case.q, case.k, case.v, **{**arguments, **changes})


def refused(match, function, *args, **kwargs):
    """The message of the UnsupportedProblem that a call raises."""
    with pytest.raises(UnsupportedProblem, match=match) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)
