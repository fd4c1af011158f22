"""The signatures of what adapters call, as they are in the versions that these were written for.

A parameter with `=` has a default; those behind `*` are keywords alone.
"""

# By peer: the version, and the parameters by module and name.
SIGNATURES: dict[str, tuple[str, dict[str, str]]] = {
    "flashinfer": (
        "0.7.4",
        {
            "flashinfer.kda_kernels.fused_kda_decode:run_fused_kda_decode": (
                "x weight conv_state raw_gate raw_beta A_log dt_bias state_indices"
                " state output_gate norm_weight lower_bound= norm_eps= output= *"
                " backend= state_indices_mode= query_start_loc= packed_state_indices="
            ),
            "flashinfer.gdn_decode:gated_delta_rule_decode": (
                "q k v state A_log a dt_bias b scale= output= use_qk_l2norm= backend="
            ),
            "flashinfer.gdn_decode:gated_delta_rule_decode_pretranspose": (
                "q k v state A_log a dt_bias b scale= output= use_qk_l2norm= initial_state="
                " initial_state_indices= output_state_indices= intermediate_states_buffer="
                " disable_state_update= backend="
            ),
            "flashinfer.gdn_decode:gated_delta_rule_mtp": (
                "q k v initial_state initial_state_indices A_log a dt_bias b scale= output="
                " intermediate_states_buffer= ssm_state_indices= disable_state_update="
                " use_qk_l2norm= output_state_indices= cache_replayssm= replayssm_rawv="
                " replayssm_rawk= replayssm_g= replayssm_beta="
            ),
            "flashinfer.gdn_kernels:gated_delta_rule_mtp_ucache_flush": (
                "A_log a dt_bias softplus_beta= softplus_threshold= q= k= v= b="
                " initial_state_source= initial_state_indices= output_state_indices="
                " intermediate_states_buffer= accepted_steps= ssm_state_indices="
                " disable_state_update= use_qk_l2norm_in_kernel= scale= output="
                " disable_output= recovery_steps= k_cache= u_cache= g_cache= hist_len="
                " cache_base= flush_min= restart_hist_on_flush= pdl_trigger= backend="
                " stochastic_rounding= rand_seed= philox_rounds="
            ),
            "flashinfer.gdn_kernels:gated_delta_rule_mtp_wy_output_only": (
                "A_log a dt_bias softplus_beta= softplus_threshold= q= k= v= b="
                " initial_state_source= initial_state_indices= output_state_indices="
                " intermediate_states_buffer= accepted_steps= ssm_state_indices="
                " disable_state_update= use_qk_l2norm_in_kernel= scale= output="
                " disable_output= recovery_steps="
            ),
            "flashinfer.kda_kernels.kda_decode_wy_output_only:kda_recoverssm_verify": (
                "q k v raw_g raw_beta A_log dt_bias lower_bound checkpoint_state"
                " correction_cache kg_cache query_start_loc state_indices spec_query_len out="
                " * use_gate_in_kernel= beta_is_logit= scale= null_min="
            ),
            "flashinfer.kda_kernels.kda_decode_wy_output_only:kda_wy_output_only": (
                "q k v g beta initial_state_source initial_state_indices= A_log= dt_bias="
                " scale= use_gate_in_kernel= lower_bound= beta_is_logit= output= backend="
                " emit_corrections= corrections_out= kg_cache_out="
            ),
            "flashinfer.kda_kernels.recurrent_kda:run_recurrent_kda": (
                "q k v g beta A_log= dt_bias= scale= initial_state= output_final_state="
                " use_qk_l2norm_in_kernel= use_gate_in_kernel= lower_bound= cu_seqlens="
                " ssm_state_indices= num_spec_tokens= num_accepted_tokens= output="
                " initial_state_source= initial_state_indices= beta_is_logit= * backend="
            ),
        },
    ),
    "fla": (
        "0.6.0",
        {
            "fla.ops.gated_delta_rule.fused_recurrent:fused_recurrent_gated_delta_rule": (
                "q k v g= gk= gv= beta= scale= initial_state= output_final_state="
                " use_qk_l2norm_in_kernel= use_gate_in_kernel= A_log= dt_bias="
                " use_beta_sigmoid_in_kernel= allow_neg_eigval= state_v_first= cu_seqlens="
                " **kwargs"
            ),
            "fla.ops.kda.fused_recurrent:fused_recurrent_kda_fwd": (
                "q k v g beta A_log= dt_bias= initial_state= scale= output_final_state="
                " inplace_final_state= state_v_first= cu_seqlens= ssm_state_indices="
                " num_accepted_tokens= use_qk_l2norm_in_kernel= use_gate_in_kernel="
                " use_beta_sigmoid_in_kernel= allow_neg_eigval= lower_bound= out= **kwargs"
            ),
        },
    ),
    "sglang": (
        "0.5.23",
        {
            "sglang.kernels.ops.mamba.causal_conv1d_triton:causal_conv1d_update": (
                "x conv_state weight bias= activation= cache_seqlens="
                " conv_state_indices= num_accept_tokens= intermediate_conv_window="
                " intermediate_state_indices= retrieve_next_token="
                " retrieve_next_sibling= retrieve_parent_token= pad_slot_id= metadata="
                " validate_data="
            ),
            "sglang.kernels.ops.attention.fla.layernorm_gated:rms_norm_gated": (
                "* x weight bias z= eps= group_size= norm_before_gate= is_rms_norm= activation="
            ),
            "sglang.kernels.ops.attention.fla.fused_norm_gate:rms_norm_gated": (
                "x g weight bias activation= residual= prenorm= residual_in_fp32= eps="
            ),
            "sglang.kernels.ops.attention.fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode": (
                "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices"
                " use_qk_l2norm_in_kernel="
            ),
            "sglang.kernels.ops.attention.fla.fused_recurrent:fused_recurrent_kda_packed_decode": (
                "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices"
                " use_qk_l2norm_in_kernel= lower_bound="
            ),
            "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update": (
                "A_log a dt_bias softplus_beta softplus_threshold q k v b"
                " initial_state_source initial_state_indices scale= use_qk_l2norm_in_kernel="
                " cu_seqlens= is_kda= lower_bound= disable_state_update="
                " intermediate_states_buffer= intermediate_state_indices= cache_steps="
                " retrieve_parent_token= cache_ring= replayssm_rawv= replayssm_rawk="
                " replayssm_g= replayssm_beta= match_cutedsl_decode="
            ),
        },
    ),
    "vllm": (
        "0.33.0",
        {
            "vllm.model_executor.layers.mamba.ops.causal_conv1d:causal_conv1d_update": (
                "x conv_state weight bias= activation= conv_state_indices="
                " num_accepted_tokens= query_start_loc= max_query_len= null_block_id="
                " validate_data= out="
            ),
            "vllm.third_party.flash_linear_attention.ops.layernorm_guard:layer_norm_fwd": (
                "x weight bias eps z= out= group_size= norm_before_gate= is_rms_norm= activation="
            ),
            "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent:fused_recurrent_kda": (
                "q k v raw_g raw_beta A_log dt_bias lower_bound initial_state"
                " cu_seqlens ssm_state_indices num_accepted_tokens= out= fuse_gate="
            ),
            "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent:fused_recurrent_kda_packed_decode": (
                "mixed_qkv raw_g raw_beta A_log dt_bias lower_bound initial_state"
                " state_indices scale= out="
            ),
            "vllm.third_party.flash_linear_attention.ops.kda:fused_recurrent_kda_fwd": (
                "q k v g beta scale initial_state inplace_final_state= cu_seqlens="
                " ssm_state_indices= num_accepted_tokens= use_qk_l2norm_in_kernel="
            ),
            "vllm.model_executor.layers.mamba.ops.layernorm_gated:rms_norm_gated": (
                "x weight bias z= eps= group_size= norm_before_gate="
            ),
            "vllm.third_party.flash_linear_attention.ops.fused_recurrent:fused_recurrent_gated_delta_rule": (
                "q k v g beta= scale= initial_state= inplace_final_state= cu_seqlens="
                " ssm_state_indices= num_accepted_tokens= use_qk_l2norm_in_kernel="
            ),
            "vllm.third_party.flash_linear_attention.ops.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode": (
                "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices"
                " use_qk_l2norm_in_kernel="
            ),
            "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update": (
                "A_log a b dt_bias q k v beta= threshold= scale= initial_state="
                " inplace_final_state= cu_seqlens= ssm_state_indices= num_accepted_tokens="
                " use_qk_l2norm_in_kernel= is_kda="
            ),
        },
    ),
}
