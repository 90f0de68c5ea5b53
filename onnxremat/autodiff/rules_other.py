"""Rules of single operators outside the other topics, and the state of everything that no gradient goes through."""

from __future__ import annotations

from .registry import not_differentiable, refused, rewritten, vjp

MS = "com.microsoft"
_QUANTIZED = "quantized arithmetic has no gradient; train the float model and quantize it afterwards"
_STRINGS = "strings can't be trained through; do the text processing before the model"
_GENERATION = "it generates or caches tokens for inference; export the model for training, without a cache"

# Y = X^-1: dX = -Y' G Y'
vjp("Inverse", lambda c, g: -(c.op("MatMul", c.op("MatMul", c.y.transpose(_swapped(c.y.rank)), g), c.y.transpose(_swapped(c.y.rank)))), domain=MS)
# Linear in its first input, with a mask that is drawn elsewhere.
vjp("DropoutGrad", lambda c, g: c.op.node("DropoutGrad", g, *c.x[1:], domain=MS, like=[c.x0])[0], domain=MS)


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


# Written out when a file is imported, or refused there.
rewritten("If Loop Scan")

not_differentiable("BlackmanWindow HammingWindow HannWindow MelWeightMatrix OptionalHasElement SequenceLength SequenceEmpty")
not_differentiable("IsAllFinite Unique NGramRepeatBlock MurmurHash3 RemovePadding", domain=MS)

refused("QuantizeLinear DequantizeLinear DynamicQuantizeLinear ConvInteger MatMulInteger QLinearConv QLinearMatMul", _QUANTIZED)
refused(
    "QuantizeLinear DequantizeLinear QAttention QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool "
    "QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QEmbedLayerNormalization "
    "DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulInteger16 MatMulIntegerToFloat MatMulNBits MatMulBnb4 MatMulFpQ4 MulInteger "
    "ReduceSumInteger GatherBlockQuantized NhwcMaxPool",
    _QUANTIZED,
    domain=MS,
)
refused("StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer", _STRINGS)
refused("Tokenizer WordConvEmbedding", _STRINGS, domain=MS)
refused("ImageDecoder", "encoded images can't be trained through; decode them before the model")
refused("Optional OptionalGetElement", "optional values have no static type; export the model without them")
refused("SequenceMap", "sequences have no static shape; stack the elements into a tensor")
refused(
    "BeamSearch GreedySearch Sampling WhisperBeamSearch DecoderAttention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention "
    "GroupQueryAttention SparseAttention PagedAttention",
    _GENERATION,
    domain=MS,
)
refused(
    "PackedAttention PackedMultiHeadAttention RestorePadding LongformerAttention RelativePositionBias GatedRelativePositionBias MoE AttnLSTM "
    "GroupNorm SkipGroupNorm CDist Rfft Irfft ComplexMul ComplexMulConj UnfoldTensor TorchEmbedding SparseToDenseMatMul CropAndResize "
    "DynamicTimeWarping GemmFloat8 ConvTransposeWithDynamicPads MaxpoolWithMask",
    "this fused operator has no rule; export the model in standard operators, without ONNX Runtime's transformer optimizations",
    domain=MS,
)
