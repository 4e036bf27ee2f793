"""The keys of `config.json` that do not affect the engine's results."""

from __future__ import annotations

_HARMLESS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
    _flash_attn_2_enabled _name_or_path attn_implementation auto_map custom_pipelines dtype
    language name_or_path pipeline_tag torch_dtype transformers_version unsloth_fixed
    unsloth_version use_flash_attn use_flash_attention use_bfloat16 torchscript use_cache
    cache_implementation cache_config internal_version pretraining_tp transformers.js_config

    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id vocab_file tokenizer_class eod_token_id im_start_id im_end_id
    im_newline_id text_start_id text_end_id video_start_id video_end_id mask_init_id
    num_media_embeds audio_token_id audio_eos_token_id codebook_pad_token_id codec_config

    accept_hidden_layer audio_start_token_id codec_bos_id codec_nothink_id codec_pad_id
    codec_think_bos_id codec_think_eos_id position_id_per_seconds speaker_id thinker_hidden_size
    audio_end_token_id seconds_per_chunk codec_think_id codec_language_id spk_id spk_is_dialect
    text_hidden_size tokenizer_type tts_model_size tts_model_type speaker_encoder_config
    thinker_config code2wav_config enable_audio_output im_start_token_id im_end_token_id
    tts_bos_token_id tts_eos_token_id tts_pad_token_id system_token_id user_token_id
    assistant_token_id

    attention_dropout attention_probs_dropout_prob classifier_dropout dropout embd_pdrop
    embedding_dropout hidden_dropout hidden_dropout_prob mlp_dropout resid_pdrop residual_dropout
    initializer_cutoff_factor initializer_factor initializer_range init_std
    rescale_prenorm_residual gradient_checkpointing use_gradient_checkpointing
    use_reentrant_checkpointing
    output_router_logits router_aux_loss_coef z_loss_coefficient max_sequence_length
    aux_loss_alpha seq_aux ep_size qk_head_dim router_jitter_noise
    model_max_length seq_length seq_len attention_softmax_in_fp32 scale_attention_softmax_in_fp32

    chunk_size_feed_forward cross_attention_hidden_size finetuning_task id2label is_decoder
    ignore_index is_llama_config label2id neftune_noise_alpha num_labels output_attentions
    output_hidden_states output_scores perceiver_config pixel_shuffle_factor use_resampler
    add_classification_head class_num skip_cls_token moe_drop_tokens
    moe_random_routing_dropped_token
    prefix problem_type pruned_heads return_dict return_dict_in_generate task_specific_params
    tf_legacy_loss tie_encoder_decoder tie_last_hidden_states

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
    suppress_tokens temperature top_k top_p typical_p

    mtp_num_hidden_layers num_mtp_layers mtp_loss_scaling_factor mlp_intermediate_size
    mtp_transformer_layers num_mtp_modules use_mtp
    n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj attn_pdrop output_past
    layer_switch use_embedding_sharing use_parallel_embedding

    _sliding_window_pattern initial_context_length
    rotary inference_runner pre_allocate_kv_cache runner_max_sequence_length validate_runner_input

    chunk_size expand init_method mamba_chunk_size moe_shared_expert_overlap
    mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep residual_in_fp32
    block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init
    conv_dim conv_dim_out conv_use_xavier_init num_heads block__name_mlp block_ffn_te_autocast
    block_ffn_use_quantized_params block_sequence_parallel_norm_across_tp ffn_te_autocast
    ffn_use_quantized_params sequence_parallel_norm_across_tp
    time_step_floor time_step_max time_step_min time_step_rank use_mamba_kernels
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that change nothing here: they concern other programs, tokens, training, other tasks,
generation and the number of draft modules."""


_TOWER_KEYS = """
    vision_config mm_tokens_per_image image_seq_length vision_feature_layer
    vision_feature_select_strategy multimodal_projector_bias projector_bias projector_hidden_act
    projector_hidden_size projector_use_layernorm spatial_merge_size scale_factor _pad_token_id
    downsample_factor do_image_splitting encoder_patch_size max_image_tokens max_num_patches
    max_pixels_tolerance max_tiles min_image_tokens min_tiles tile_size use_image_special_tokens
    use_thumbnail language_model_only audio_config vision_soft_tokens_per_image
    media_placeholder_token_id use_unified_vision_chunk video_placeholder
    projection_hidden_size projection_layer_norm_eps
"""
OF_IMAGES = (
    *_TOWER_KEYS.split(),
    *(
        f"{which}_token_{end}"
        for which in (
            "image",
            "video",
            "audio",
            "vision",
            "vision_start",
            "vision_end",
            "boi",
            "eoi",
            "boa",
            "eoa",
        )
        for end in ("id", "index")
    ),
)
"""Keys of towers and of their tokens, beside the config of a language model."""

HARMLESS_OF_ROPE = ("finetuned", "max_position_embeddings", "interleaved")
"""Keys of RoPE that do not affect its frequencies. Some give the purpose of the settings, others
how Qwen's talkers assign axes, for which their family knows only one way."""
