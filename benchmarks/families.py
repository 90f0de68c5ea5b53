"""Which model families of ``transformers`` train, and how close their gradients are to torch's.

    python -m benchmarks.families [FAMILY ...]

Every model is built small from a configuration, nothing is downloaded; it is exported in training mode with dropout as configured, run for
one step on ONNX Runtime and in torch with the same dropout masks, and the worst relative error of loss, gradients and state is printed.
What is refused is printed with its reason.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.common import machine, table

IDS = "input_ids=2x8:int64:50"
#: Sizes under the names that most configurations use.
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
DECODER = SIZES | TOKENS | {"num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False}
ENCODER = SIZES | {"max_position_embeddings": 16}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 3],
    "conv_stride": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 12,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
TEXT, VISION = (
    SIZES | TOKENS | {"max_position_embeddings": 16},
    {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16, "patch_size": 8},
)
STAGES = {"num_channels": 3, "hidden_sizes": [8, 12], "depths": [1, 1]}
BACKBONE = {"model_type": "resnet", **STAGES, "embedding_size": 8, "out_features": ["stage1", "stage2"]}
SEQ2SEQ = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "use_cache": False,
    "decoder_start_token_id": 2,
    **TOKENS,
}
BOTH = (IDS, "decoder_input_ids=2x6:int64:50")
#: Which tokens are read; some models make it up in torch and not while they are traced.
MASK = "attention_mask=2x8:int64:2"
PIXELS = "pixel_values=2x3x32x32"


@dataclass(frozen=True)
class Family:
    """A model class and its configuration class, by name, with small sizes.

    Attributes:
        model: the model class.
        config: the configuration class.
        sizes: what the configuration is made with.
        inputs: the batch, named as forward's parameters.
        output: the attribute of the result that the loss (mean square of its values) reads.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: tuple[str, ...] = (IDS,)
    output: str = "logits"


FAMILIES = {
    "albert": Family("AlbertForMaskedLM", "AlbertConfig", ENCODER | {"embedding_size": 8}),
    "ast": Family("ASTForAudioClassification", "ASTConfig", VISION | {"num_mel_bins": 16, "max_length": 32}, ("input_values=2x32x16",)),
    "bart": Family("BartForConditionalGeneration", "BartConfig", SEQ2SEQ | {"forced_eos_token_id": 2}, BOTH),
    "beit": Family("BeitForImageClassification", "BeitConfig", VISION | {"image_size": 32}, (PIXELS,)),
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER),
    "big_bird": Family("BigBirdForMaskedLM", "BigBirdConfig", ENCODER | {"attention_type": "original_full"}),
    "blip": Family(
        "BlipForImageTextRetrieval",
        "BlipConfig",
        {
            "text_config": TEXT | {"encoder_hidden_size": 16},
            "vision_config": VISION | {"image_size": 32},
            "projection_dim": 8,
            "image_text_hidden_size": 8,
        },
        (IDS, PIXELS),
        "itm_score",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        TOKENS | {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.1, "use_cache": False},
    ),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": VISION | {"image_size": 32}, "projection_dim": 8},
        (IDS, PIXELS),
        "logits_per_image",
    ),
    "codegen": Family(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        TOKENS | {"vocab_size": 50, "n_positions": 16, "n_ctx": 16, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "use_cache": False},
    ),
    "cohere": Family("CohereForCausalLM", "CohereConfig", DECODER),
    "convbert": Family("ConvBertForMaskedLM", "ConvBertConfig", ENCODER | {"embedding_size": 16}),
    "convnext": Family("ConvNextForImageClassification", "ConvNextConfig", STAGES | {"num_stages": 2}, (PIXELS,)),
    "convnextv2": Family("ConvNextV2ForImageClassification", "ConvNextV2Config", STAGES | {"num_stages": 2}, (PIXELS,)),
    "cvt": Family(
        "CvtForImageClassification",
        "CvtConfig",
        {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]},
        (PIXELS,),
    ),
    "data2vec_audio": Family("Data2VecAudioForCTC", "Data2VecAudioConfig", SPEECH, ("input_values=2x160",)),
    "deberta": Family("DebertaForMaskedLM", "DebertaConfig", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM", "DebertaV2Config", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DECODER
        | {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "deit": Family("DeiTForImageClassification", "DeiTConfig", VISION | {"image_size": 32}, (PIXELS,)),
    "detr": Family(
        "DetrForObjectDetection",
        "DetrConfig",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": BACKBONE,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "num_queries": 4,
        },
        (PIXELS,),
    ),
    "dinov2": Family("Dinov2ForImageClassification", "Dinov2Config", VISION | {"image_size": 32}, (PIXELS,)),
    "dinov2_with_registers": Family("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", VISION | {"image_size": 32}, (PIXELS,)),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 16},
    ),
    "dpt": Family(
        "DPTForDepthEstimation",
        "DPTConfig",
        VISION
        | {
            "image_size": 32,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "is_hybrid": False,
        },
        (PIXELS,),
        "predicted_depth",
    ),
    "efficientnet": Family(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "drop_connect_rate": 0.0},
        (PIXELS,),
    ),
    "electra": Family("ElectraForMaskedLM", "ElectraConfig", ENCODER | {"embedding_size": 8}),
    "encodec": Family(
        "EncodecModel",
        "EncodecConfig",
        {
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_dim": 16,
            "codebook_size": 8,
            "upsampling_ratios": [4, 2],
            "target_bandwidths": [3000.0],
            "sampling_rate": 1000,
        },
        ("input_values=2x1x160",),
        "audio_values",
    ),
    "esm": Family("EsmForMaskedLM", "EsmConfig", ENCODER | {"pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "falcon": Family("FalconForCausalLM", "FalconConfig", DECODER),
    "fnet": Family("FNetForMaskedLM", "FNetConfig", SIZES | {"max_position_embeddings": 16}),
    "focalnet": Family(
        "FocalNetForImageClassification",
        "FocalNetConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "drop_path_rate": 0.0,
        },
        (PIXELS,),
    ),
    "funnel": Family(
        "FunnelForMaskedLM",
        "FunnelConfig",
        {"vocab_size": 50, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1], "num_decoder_layers": 1},
    ),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", DECODER | {"head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"head_dim": 8, "sliding_window": 4}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"head_dim": 8, "sliding_window": 4}),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Config", TOKENS | {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        TOKENS
        | {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 16,
            "window_size": 4,
            "use_cache": False,
        },
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER),
    "gpt_oss": Family(
        "GptOssForCausalLM", "GptOssConfig", DECODER | {"head_dim": 8, "sliding_window": 4, "num_local_experts": 3, "num_experts_per_tok": 2}
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        "GPTJConfig",
        TOKENS | {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "use_cache": False},
    ),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", DECODER),
    "granitemoe": Family("GraniteMoeForCausalLM", "GraniteMoeConfig", DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "hubert": Family("HubertForCTC", "HubertConfig", SPEECH, ("input_values=2x160",)),
    "layoutlm": Family("LayoutLMForMaskedLM", "LayoutLMConfig", ENCODER),
    "led": Family(
        "LEDForConditionalGeneration",
        "LEDConfig",
        {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
        | {"attention_window": 4, "max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 16},
        BOTH,
    ),
    "levit": Family(
        "LevitForImageClassification",
        "LevitConfig",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]},
        ("pixel_values=2x3x64x64",),
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DECODER | {"attention_dropout": 0.1}),
    "longformer": Family(
        "LongformerForMaskedLM", "LongformerConfig", ENCODER | {"attention_window": 4, "pad_token_id": 1, "max_position_embeddings": 18}
    ),
    "longt5": Family(
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        {
            "vocab_size": 50,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 2,
            "local_radius": 3,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        (*BOTH, MASK),
    ),
    "mamba": Family(
        "MambaForCausalLM", "MambaConfig", TOKENS | {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "use_cache": False}
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        TOKENS
        | {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "use_cache": False,
        },
    ),
    "mbart": Family("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, BOTH),
    "megatron_bert": Family("MegatronBertForMaskedLM", "MegatronBertConfig", ENCODER),
    "mistral": Family("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 4}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "mobilebert": Family("MobileBertForMaskedLM", "MobileBertConfig", ENCODER | {"embedding_size": 16, "intra_bottleneck_size": 16}),
    "mobilenet_v1": Family("MobileNetV1ForImageClassification", "MobileNetV1Config", {"image_size": 32, "depth_multiplier": 0.25}, (PIXELS,)),
    "mobilevit": Family(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {"image_size": 32, "hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 4, 8, 8, 12, 16, 16], "num_attention_heads": 2},
        (PIXELS,),
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        SIZES | TOKENS | {"max_position_embeddings": 16, "local_attention": 4, "cls_token_id": 0, "sep_token_id": 2},
    ),
    "mpnet": Family("MPNetForMaskedLM", "MPNetConfig", ENCODER | {"max_position_embeddings": 18}),
    "mpt": Family(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 50, "d_model": 16, "n_layers": 1, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 16, "use_cache": False},
    ),
    "nystromformer": Family(
        "NystromformerForMaskedLM", "NystromformerConfig", ENCODER | {"segment_means_seq_len": 8, "num_landmarks": 8, "conv_kernel_size": 3}
    ),
    "olmo": Family("OlmoForCausalLM", "OlmoConfig", DECODER),
    "olmoe": Family("OlmoeForCausalLM", "OlmoeConfig", DECODER | {"num_experts": 3, "num_experts_per_tok": 2}),
    "opt": Family(
        "OPTForCausalLM", "OPTConfig", SIZES | TOKENS | {"ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": 16, "use_cache": False}
    ),
    "patchtst": Family(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "loss": "mse",
        },
        ("past_values=2x16x2",),
        "prediction_outputs",
    ),
    "pegasus": Family("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, BOTH),
    "perceiver": Family(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        {
            "vocab_size": 50,
            "d_model": 16,
            "d_latents": 16,
            "num_latents": 4,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "max_position_embeddings": 8,
        },
        ("inputs=2x8:int64:50",),
    ),
    "phi": Family("PhiForCausalLM", "PhiConfig", DECODER | {"num_key_value_heads": 2}),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", DECODER),
    "poolformer": Family("PoolFormerForImageClassification", "PoolFormerConfig", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}, (PIXELS,)),
    "pvt": Family(
        "PvtForImageClassification",
        "PvtConfig",
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "sequence_reduction_ratios": [2, 1, 1, 1],
        },
        (PIXELS,),
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        DECODER | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | {"head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    ),
    "reformer": Family(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        TOKENS
        | {
            "vocab_size": 50,
            "hidden_size": 16,
            "attention_head_size": 8,
            "num_attention_heads": 2,
            "attn_layers": ["local"],
            "feed_forward_size": 24,
            "axial_pos_embds": False,
            "max_position_embeddings": 16,
            "local_attn_chunk_length": 4,
            "is_decoder": True,
            "use_cache": False,
        },
    ),
    "regnet": Family(
        "RegNetForImageClassification",
        "RegNetConfig",
        STAGES | {"embedding_size": 8, "groups_width": 4, "hidden_sizes": [8, 8, 12, 12], "depths": [1, 1, 1, 1]},
        (PIXELS,),
    ),
    "rembert": Family("RemBertForMaskedLM", "RemBertConfig", ENCODER | {"input_embedding_size": 8, "output_embedding_size": 12}),
    "resnet": Family("ResNetForImageClassification", "ResNetConfig", STAGES | {"embedding_size": 8}, (PIXELS,)),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", ENCODER | TOKENS | {"max_position_embeddings": 18}),
    "roformer": Family("RoFormerForMaskedLM", "RoFormerConfig", ENCODER | {"embedding_size": 16}),
    "rwkv": Family(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "attention_hidden_size": 16,
            "intermediate_size": 24,
            "context_length": 16,
            "use_cache": False,
        },
    ),
    "sam": Family(
        "SamModel",
        "SamConfig",
        {
            "vision_config": VISION
            | {"image_size": 32, "output_channels": 16, "global_attn_indexes": [0], "window_size": 2, "mlp_dim": 24, "num_pos_feats": 8},
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
        },
        (PIXELS, "input_points=2x1x2x2"),
        "pred_masks",
    ),
    "segformer": Family(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 8, 16, 16],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "drop_path_rate": 0.0,
        },
        (PIXELS,),
    ),
    "siglip": Family(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": SIZES | {"max_position_embeddings": 8}, "vision_config": VISION | {"image_size": 32}},
        (IDS, PIXELS),
        "logits_per_image",
    ),
    "speech_to_text": Family(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        SEQ2SEQ | {"max_source_positions": 32, "max_target_positions": 16, "input_feat_per_channel": 8, "conv_channels": 16},
        ("input_features=2x24x8", BOTH[1]),
    ),
    "squeezebert": Family("SqueezeBertForMaskedLM", "SqueezeBertConfig", ENCODER | {"embedding_size": 16}),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", DECODER | {"num_key_value_heads": 2}),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", DECODER),
    "swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4, "drop_path_rate": 0.0},
        (PIXELS,),
    ),
    "swinv2": Family(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4, "drop_path_rate": 0.0},
        (PIXELS,),
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "vocab_size": 50,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        (*BOTH, MASK),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "use_cache": False, "decoder_start_token_id": 0},
        BOTH,
    ),
    "videomae": Family(
        "VideoMAEForVideoClassification", "VideoMAEConfig", VISION | {"image_size": 16, "num_frames": 4}, ("pixel_values=2x4x3x16x16",)
    ),
    "vilt": Family(
        "ViltForQuestionAnswering",
        "ViltConfig",
        TEXT | VISION | {"image_size": 32, "max_image_length": 16},
        (IDS, PIXELS, "pixel_mask=2x32x32:int64:2"),
    ),
    "vit": Family("ViTForImageClassification", "ViTConfig", VISION | {"image_size": 32}, (PIXELS,)),
    "vit_mae": Family(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        VISION
        | {
            "image_size": 32,
            "decoder_hidden_size": 16,
            "decoder_num_attention_heads": 2,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 24,
        },
        (PIXELS, "noise=2x16"),
    ),
    "wav2vec2": Family("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, ("input_values=2x160",)),
    "wavlm": Family("WavLMForCTC", "WavLMConfig", SPEECH, ("input_values=2x160",)),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16},
        ("input_features=2x8x24", BOTH[1]),
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        "XGLMConfig",
        {
            "vocab_size": 50,
            "max_position_embeddings": 16,
            "d_model": 16,
            "ffn_dim": 24,
            "num_layers": 1,
            "attention_heads": 2,
            "use_cache": False,
            **TOKENS,
        },
    ),
    "xlm": Family(
        "XLMWithLMHeadModel",
        "XLMConfig",
        {"vocab_size": 50, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16, "use_cache": False},
    ),
    "xlm_roberta": Family("XLMRobertaForMaskedLM", "XLMRobertaConfig", ENCODER | TOKENS | {"max_position_embeddings": 18}),
    "xlnet": Family("XLNetLMHeadModel", "XLNetConfig", {"vocab_size": 50, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24}),
    "yolos": Family("YolosForObjectDetection", "YolosConfig", VISION | {"image_size": [32, 32], "num_detection_tokens": 3}, (PIXELS,)),
}


def build(family: Family) -> Any:
    """The model in training mode, returning one output."""
    import torch
    import transformers
    from torch import nn

    class One(nn.Module):  # type: ignore[misc]
        def __init__(self, model: nn.Module, names: tuple[str, ...], output: str) -> None:
            super().__init__()
            self.model, self.names, self.output = model, names, output

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.output)
            return found.square().mean() + found.mean()

    torch.default_generator.manual_seed(0)
    config: Any = getattr(transformers, family.config)(**family.sizes)
    make: Callable[[Any], Any] = getattr(transformers, family.model)
    return One(make(config).train(), tuple(text.partition("=")[0] for text in family.inputs), family.output)


def compare(name: str) -> list[str]:
    """A row of the table."""
    from tests.models.training import TOLERANCE, compare_training

    family, start = FAMILIES[name], time.perf_counter()
    try:
        result = compare_training(build(family), family.inputs, steps=1)
    except Exception as error:
        kind = "refused" if type(error).__name__ in ("ExportError", "DifferentiationError") else "FAILS"
        return [name, kind, "", "", f"{type(error).__name__}: " * (kind == "FAILS") + " ".join(str(error).split())[:300]]
    worst, where = result.worst
    verdict = "trains" if worst <= TOLERANCE else "WRONG"
    return [name, verdict, str(len(result.training.trainable)), f"{worst:.1e}", f"{where}, {time.perf_counter() - start:.0f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all where none is named")
    options = parser.parse_args()
    print(machine(), flush=True)
    header = ["family", "result", "parameters", "worst error", "where"]
    rows = []
    for name in options.families or FAMILIES:
        rows.append(compare(name))
        print(table(header, rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(header, rows))
    print(f"\n{sum(row[1] == 'trains' for row in rows)} of {len(rows)} train")


if __name__ == "__main__":
    main()
