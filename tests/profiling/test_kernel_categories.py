"""What kernels and operators do, by names libraries really use, and how a long name gets short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from trt_engine.profiling.kernel_categories import kernel_category, operator_category, short_name

TORCH = "void at::native::"
COPIES = (
    "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, "
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3})::{lambda(int)#1}>(int, float)"
)

KERNELS = [
    # from samples of Nsight Systems and Nsight Compute
    ("flash_attention_prefill_f16", "attention"),
    ("ampere_fp16_s1688gemm_fp16_64x128_sliced1x2_ldg8_f2f_tn", "matrix"),
    ("quantized_gemv_q6_k", "matrix"),
    ("fused_add_rmsnorm_f16", "normalisation"),
    ("swiglu_f16", "element-wise"),
    ("rope_f16", "element-wise"),
    ("dequant_q4_k_f16", "reformat"),
    ("convert_f32_to_f16", "reformat"),
    ("embedding_lookup_f16", "copy"),
    ("add_f16", "element-wise"),
    ("sgemm(int, int, int, float, float, const float *, const float *, float *)", "matrix"),
    ("stencil_2D(int *, int *)", "other"),
    # cuBLAS, cuDNN, CUTLASS
    ("nvjet_hsh_192x192_64x4_1x2_h_bz_coopB_TNT", "matrix"),
    ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x128x64", "matrix"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_tn_align8>(Params)", "matrix"),
    ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64>(Params)", "matrix"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float>(x)", "matrix"),
    (
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, cublasGemvParamsEx<int>>(x)",
        "matrix",
    ),
    ("void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(x)", "matrix"),
    (  # the bias of a convolution; its arguments have `reducedDivisor` and `cudnnOpTensorOp_t`
        "void op_generic_tensor_kernel<4, float, float, float, 256, (cudnnGenericOp_t)0, (cudnnNanPropagation_t)0, 0>("
        "cudnnTensorStruct, float*, cudnnTensorStruct, float const*, cudnnTensorStruct, float const*, reducedDivisorArray)",
        "element-wise",
    ),
    ("void op_tensor_kernel_alpha2_zero<4, float, float, float, 1, 256, 1, 1, (cudnnOpTensorOp_t)0>(x)", "element-wise"),
    ("void reduce_tensor_kernel_free<float, 8, 16, 1, 1, (cudnnReduceTensorOp_t)0>(cudnnReduceTensorStruct)", "reduction"),
    ("void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true>(x)", "reformat"),
    ("void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(x)", "normalisation"),
    ("void cudnn::pooling_fw_4d_kernel<float, float, cudnn::maxpooling_func<float>, 2>(x)", "reduction"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
    ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(AttentionKernel<cutlass::half_t>::Params)", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::half_t>>(Params)", "attention"),
    # PyTorch
    (TORCH + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char*>(int)", "element-wise"),
    (TORCH + COPIES, "copy"),
    (TORCH + "unrolled_elementwise_kernel<at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)>(int)", "reformat"),
    (TORCH + "(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2>, unsigned int, 4, 64>(x)", "copy"),
    (TORCH + "(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int, float)", "normalisation"),
    ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*)", "normalisation"),
    (TORCH + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(x)", "reduction"),
    # ONNX Runtime
    ("void onnxruntime::cuda::_UnaryElementWise<__half, float, onnxruntime::cuda::OP_Cast<__half>, 4>(x)", "reformat"),
    ("void onnxruntime::cuda::_BinaryElementWiseSimple<true, false, __half, OP_Mul<__half>>(x)", "element-wise"),
    ("void onnxruntime::contrib::cuda::SkipLayerNormKernelSmall<__half, 768u, 4>(x)", "normalisation"),
    ("void onnxruntime::cuda::Transpose4DKernelParallelizeMultipleElementsPerThreadInInnermostDim<2u>(x)", "reformat"),
    ("void onnxruntime::cuda::_ConcatKernelSameConcatDim<__half>(x)", "copy"),
    ("void onnxruntime::flash::flash_fwd_kernel<onnxruntime::flash::Flash_fwd_kernel_traits<64>>(x)", "attention"),
    # both, as an H200 ran them
    ("nvjet_sm90_hsh_192x192_64x3_2x1_v_bz_coopB_NNN", "matrix"),
    ("void implicit_convolve_sgemm<__half, __half, 128, 6, 7, 3, 3, 5, 1, false, false, true>(int, int)", "matrix"),
    ("void onnxruntime::cuda::cuApplyLayerNorm<__half, float, __half, false>(__half*, float*)", "normalisation"),
    ("void onnxruntime::contrib::cuda::VectorizedBiasGeluKernel<__half>(long, __half const*)", "element-wise"),
    ("void onnxruntime::cuda::_PadNCHWInputWithPaddingAlongHAndWKernel<__half, 0>(long, long)", "copy"),
    ("void onnxruntime::cuda::_GatherKernel<short>(long, long, onnxruntime::cuda::DivMod<int>)", "copy"),
    ("void onnxruntime::cuda::Transpose3DKernel<short, 32u>(long, long, long, short const*, short*)", "reformat"),
    ("void at::native::mbtopk::gatherTopK<c10::Half, unsigned int, 2>(x)", "reduction"),
    ("void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int, float)", "element-wise"),
    ("void onnxruntime::cuda::_ResizeNearestKernel<float>(int, int)", "element-wise"),
    ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16, c10::Half, long>(x)", "other"),
    ("void at::native::(anonymous namespace)::avg_pool2d_out_cuda_frame<float, float>(int)", "reduction"),
    ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(x)", "matrix"),
    ("void at::native::batch_norm_collect_statistics_kernel<at::native::Var, c10::Half>(x)", "normalisation"),
    # TensorRT and Myelin
    ("__myl_MaxrSubExpSum_myl5_4", "normalisation"),
    ("__myl_MeanSubMulMeanAddSqrtDivMulAdd_0x1f", "normalisation"),
    ("__myl_MoveConc_myl0_3", "copy"),
    ("__myl_CastReshCast_myl5_6", "reformat"),
    ("__myl_Cast_myl5_7", "reformat"),
    ("__myl_DivMulTopk_myl5_5", "reduction"),
    ("__myl_AddMulErfMul_0x2", "element-wise"),
    ("__myl_AddMax_0x2", "element-wise"),
    ("__myl_MulMaxr_0x2", "reduction"),
    ("__myl_Fc_myl0_1", "matrix"),
    ("void genericReformat::copyVectorizedKernel<double, float, __half, true>(x)", "reformat"),
    ("generatedNativePointwise", "element-wise"),
    # Triton, as Inductor names them
    ("triton_poi_fused_add_relu_0", "element-wise"),
    ("triton_poi_fused_clone_permute_3", "copy"),
    ("triton_red_fused_sum_2", "reduction"),
    ("triton_per_fused_native_layer_norm_1", "normalisation"),
    ("triton_tem_fused_mm_5", "matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "category"), KERNELS, ids=lambda value: str(value)[:60])
def test_a_kernel_is_known_by_its_name(name: str, category: str) -> None:
    assert kernel_category(name) == category


RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu-profile-h200.jsonl"


def test_every_kernel_a_vision_transformer_ran_on_a_gpu_is_known() -> None:
    found = [
        kernel["name"] for line in RECORD.read_text().splitlines() for kernel in json.loads(line)["results"]["kernels"]
    ]
    assert len(found) > 30
    assert [name for name in found if kernel_category(name) == "other"] == []


UNTOLD = frozenset(
    "AffineGrid Bernoulli BifurcationDetector BlackmanWindow CropAndResize DFT DynamicTimeWarping EPContext "
    "EfficientNMS_TRT EngramGate GatedDeltaNet GatedDeltaNetStateReplay GatedRelativePositionBias GridSample "
    "HammingWindow HannWindow HyperConnectionLowRankMix HyperConnectionPostMix HyperConnectionPreMix ImageDecoder "
    "Irfft IsAllFinite Mamba2Verify MelWeightMatrix MoEGroupRouter MultilevelCropAndResize_TRT Multinomial "
    "MurmurHash3 NGramRepeatBlock NegativeLogLikelihoodLoss NonMaxSuppression NonZero PyramidROIAlign_TRT "
    "RandomUniform RandomUniformLike RegexFullMatch RelativePositionBias Rfft RoiAlign STFT SampleOp Snpe "
    "SpeculativePrefixCommit StringConcat StringSplit TfIdfVectorizer Tokenizer Unique".split()
)
"""Operators that are none of these: draws, searches, resampling, transforms, texts."""


def test_every_operator_onnx_runtime_knows_has_a_category_or_stands_in_the_list() -> None:
    known = {
        schema.name
        for schema in get_all_operator_schema()
        if schema.domain in ("", "ai.onnx", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
        and schema.support_level == schema.support_level.COMMON
    }
    assert len(known) > 250
    assert {name for name in known if operator_category(name) == "other"} - UNTOLD == set()


OPERATORS = [
    ("FusedConv", "matrix"), ("NhwcConv", "matrix"), ("FusedMatMul", "matrix"), ("QLinearConv", "matrix"),
    ("Attention", "attention"), ("MultiHeadAttention", "attention"), ("GroupQueryAttention", "attention"),
    ("SkipLayerNormalization", "normalisation"), ("SkipSimplifiedLayerNormalization", "normalisation"),
    ("SimplifiedLayerNormalization", "normalisation"), ("RotaryEmbedding", "element-wise"), ("Softmax", "normalisation"),
    ("EmbedLayerNormalization", "normalisation"),
    ("MaxPool", "reduction"), ("GlobalAveragePool", "reduction"), ("ReduceMean", "reduction"), ("ArgMax", "reduction"),
    ("MemcpyToHost", "copy"), ("MemcpyFromHost", "copy"), ("Concat", "copy"), ("Reshape", "copy"), ("Gather", "copy"),
    ("ReorderInput", "reformat"), ("Transpose", "reformat"), ("Cast", "reformat"), ("QuantizeLinear", "reformat"),
    ("Gelu", "element-wise"), ("Add", "element-wise"), ("QuickGelu", "element-wise"), ("Mean", "element-wise"),
    ("If", "control"), ("Loop", "control"), ("Shape", "control"), ("Range", "control"), ("TopK", "reduction"),
    ("Resize", "element-wise"), ("Upsample", "element-wise"), ("", "other"),
    ("CaskConvolution", "matrix"), ("CaskGemmConvolution", "matrix"), ("CaskDeconvolutionV2", "matrix"), ("gemm", "matrix"),
    ("fusedMHAv2", "attention"), ("PointWiseV2", "element-wise"), ("kgen", "element-wise"), ("Reformat", "reformat"),
    ("Shuffle", "reformat"), ("CaskPooling", "reduction"), ("SoftMaxV2", "normalisation"), ("shape_call", "control"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "category"), OPERATORS)
def test_an_operator_is_known_by_its_kind(kind: str, category: str) -> None:
    assert operator_category(kind) == category


@pytest.mark.parametrize(
    ("name", "category"),
    [  # the layers of trtexec's tables, which tell no kind
        ("node_conv2d_myl0_1", "matrix"),
        ("node_max_pool2d", "reduction"),
        ("Reformatting CopyNode for Input Tensor 0 to {ForeignNode[node_conv2d_1...node_relu_1]}", "reformat"),
        ("{ForeignNode[node_conv2d_1...node_relu_1]}", "matrix"),
        ("__myl_MaxrSubExpSum_myl5_4", "normalisation"),
        ("/layer1/conv1/Conv + /layer1/relu/Relu", "matrix"),
        ("/attn/Transpose", "reformat"),
        ("PWN(/act/Sigmoid)", "element-wise"),
        ("node_linear_1_2_myl5_3", "matrix"),
        ("__mye59_0_myl0_0", "other"),
    ],
)
def test_a_layer_without_a_kind_is_known_by_the_name_of_what_was_fused_into_it(name: str, category: str) -> None:
    assert operator_category("", name=name) == category


def test_a_layer_that_only_moves_is_no_computation_whatever_it_is_called() -> None:
    assert operator_category("CaskConvolution", is_data_movement=True) == "reformat"
    assert (
        operator_category("Concat", is_data_movement=True) == "copy"
        and operator_category("Shape", is_data_movement=True) == "control"
    )
    assert operator_category("kgen", name="__myl_MoveConc_myl0_3", is_data_movement=True) == "copy"


def test_a_kernel_myelin_made_itself_tells_more_by_its_name_than_by_its_kind() -> None:
    assert operator_category("kgen", name="__myl_MaxrSubExpSum_myl5_4") == "normalisation"


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("kernel", "kernel"),
        (
            "void cutlass::Kernel2<cutlass_75_tensorop_f16_s1688gemm_f16_128x128_nn_align1>(cutlass_75_tensorop::Params)",
            "cutlass_75_tensorop_f16_s1688gemm_f16_128x128_nn_align1",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<(anonymous namespace)::T>>>(P)",
            "FlashAttnFwdSm90",
        ),
        ("void cutlass::Kernel2<>(x)", "Kernel2"),
        ("mult_square_matrix(int *, int *, int *, int)", "mult_square_matrix"),
        ("void <unnamed>::w13_kernel<4, 1>(const __half *, const int *)", "w13_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 8, false>(float*)", "softmax_warp_forward"),
        ("void foo<(int)3, (bool)1, (a::E)2>::bar<Baz<int>>(int) const", "bar"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, P<int>>(x)", "kernel"),
        (TORCH + COPIES, "elementwise_kernel"),
        ("Foo::operator<(Foo const&)", "operator<"),
        ("bool ns::operator<< <int>(std::ostream&)", "operator<<"),
        ("void ns::Functor<(1 >= 0)>::operator()<int>(int) const", "operator()"),
        ("ns::f<ns::A->b>(int)", "f"),
        ("_ZN11onnxruntime4cuda17Transpose3DKernelIjEEvNS0_6TArrayIlLi8EEE", "Transpose3DKernel"),
        ("_ZN12_GLOBAL__N_120softmax_warp_forwardIffEEvv", "softmax_warp_forward"),
        ("_Z3addPfS_", "add"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64", "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64"),
        ("[CUDA memcpy Host-to-Device]", "[CUDA memcpy Host-to-Device]"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_name_gets_short(name: str, own: str) -> None:
    assert short_name(name) == own
