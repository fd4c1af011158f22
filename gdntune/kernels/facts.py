"""What a CUDA decode object is compiled for: a contract's static part. Contracts with equal facts share objects."""

from gdntune.kernels.spec import Facts
from gdntune.problem import Contract


def compiled_tokens(contract: Contract) -> int:
    """The largest T that a contract's object serves: T=1 is compiled apart, beyond it T is a loop to 8 or 16."""
    if contract.tokens == 1 and not contract.ragged:
        return 1
    return 8 if contract.tokens <= 8 else 16


def facts(c: Contract) -> Facts:
    """What an object is compiled for. B, H, HV, pool size, strides, scale, thresholds and null_index are dynamic."""
    return {
        "op": c.op,
        "tokens": compiled_tokens(c),
        "K": c.K,
        "V": c.V,
        "layout": c.layout,
        "input_dtype": c.input_dtype,
        "state_dtype": c.state_dtype,
        "gate_dtype": c.gate_dtype,
        "beta_dtype": c.beta_dtype,
        "A_log_dtype": c.A_log_dtype if c.has_parameters else None,
        "dt_bias_dtype": c.dt_bias_dtype if c.has_parameters else None,
        "gate": c.gate,
        "beta": c.beta,
        "mode": c.mode,
        "intermediate": c.intermediate,
        "accepted": c.accepted,
        "pool": c.pool,
        "ragged": c.ragged,
    }
