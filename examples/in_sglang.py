"""What SGLang's dispatchers call with the plug-in on: packed decode, and verify of chains."""

import torch

from gdntune.engines import sglang

B, T, H, HV, K, V, slots = 2, 3, 4, 8, 128, 128, 8
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=generator).bfloat16()


pool = normal(slots, HV, V, K)
layer = {"A_log": torch.rand(HV, generator=generator), "dt_bias": normal(HV), "ssm_states": pool}
slot = torch.tensor([4, -1], dtype=torch.int32)  # a negative slot is padding

output = sglang.packed_decode(
    normal(B, 2 * H * K + HV * V), normal(B, HV), normal(B, HV), **layer, scale=K**-0.5,
    cache_indices=slot, num_v_heads=HV, head_v_dim=V, kda=False, null_index=-1,
)  # fmt: skip
print("decode", list(output.shape), "- padding gives zeros:", bool((output[0, 1] == 0).all()))

buffer = torch.zeros(B, T, HV, V, K, dtype=torch.bfloat16)
before = pool.clone()
verified = sglang.target_verify(
    q=normal(1, B * T, H, K), k=normal(1, B * T, H, K), v=normal(1, B * T, HV, V),
    a=normal(B * T, HV), b=normal(B * T, HV), **layer, cache_indices=slot,
    query_start_loc=torch.tensor([0, T, 2 * T], dtype=torch.int32),
    intermediate_states_buffer=buffer,
    intermediate_state_indices=torch.tensor([0, 1], dtype=torch.int32), cache_steps=T,
    retrieve_parent_token=None, kda=False, null_index=-1,
)  # fmt: skip
print("verify", list(verified.shape), "- pool untouched:", torch.equal(pool, before))
print("a state for each draft:", bool((buffer[0] != 0).any(-1).all()))
