"""The profile of a step: every kernel has a group, and the groups sum to the step."""

import pytest
import torch
from benchmarks.contest import Pace, profiles
from benchmarks.contestant import Entry
from benchmarks.profile import GAPS, REST, Event, group_of, shares, watch
from benchmarks.work import Sizes, Work

from benchmarks import ours

MASKS, NORMS = "masks, random numbers, order", "norms and residuals"
KERNELS = {
    "nvjet_sm90_tst_64x128_64x8_2x1_v_bz_NTN": "gemms",
    "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_bias_TNN": "gemms",
    "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_bias_gelu_aux_TNN": "gemms",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute": "gemms",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_execute_segment_k_off_kernel__5x_cublas": "gemms",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>": "gemms",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "gemms",
    "void cublasLt::epilogue::impl::globalKernel<8, 32, float, dgelu_bgrad>": "gemms",
    "Memset (Device)": "gemms",
    "triton_tem_fused_addmm_12": "gemms",
    "_short_forward_kernel": "attention",
    "_short_backward_kernel_0": "attention",
    "_tiled_forward_kernel": "attention",
    "_tiled_backward_kernel": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4, cutlass::bfloat16_t>>": "attention",
    "triton_per_fused__softmax_mul_3": "attention",
    "_gelu_kernel": "GELU",
    "_gelu_backward_kernel": "GELU",
    "triton_poi_fused_addmm_gelu_9": "GELU",
    "_add_norm_kernel": NORMS,
    "_norm_backward_kernel": NORMS,
    "triton_per_fused__to_copy_add_native_layer_norm_7": NORMS,
    "triton_red_fused_native_layer_norm_backward_40": NORMS,
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "_adamw_kernel": "optimizer",
    "_add_up_kernel": "sums",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, Copy<>": "rounding, clipping",
    "_hide_kernel": MASKS,
    "void at::native::distribution_elementwise_grid_stride_kernel<float, 4, normal_and_transform>": MASKS,
    "void cub::DeviceSegmentedRadixSortKernel<float, long>": MASKS,
    "triton_per_fused_expand_ge_sort_0": MASKS,
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, sum_functor<float>>": "sums",
    "triton_poi_fused__to_copy_11": REST,
    "triton_poi_fused_masked_fill_2": REST,
    "triton_red_fused_slice_sum_2": REST,
    "Memcpy DtoD (Device -> Device)": "copies and casts",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copies and casts",
    "aten::addmm": "gemms",
    "aten::mm": "gemms",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::native_layer_norm": NORMS,
    "aten::gelu_backward": "GELU",
    "aten::_fused_adamw_": "optimizer",
    "aten::copy_": "copies and casts",
    "aten::t": "copies and casts",
    "aten::tanh": REST,
    "aten::sort": MASKS,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_belongs_to_its_group(name: str) -> None:
    assert group_of(name) == KERNELS[name]


def test_groups_and_gaps_sum_to_the_time_on_the_clock() -> None:
    events = [Event("aten::mm", 300.0), Event("aten::mm", 100.0), Event("aten::copy_", 50.0)]
    found = {share.group: share for share in shares(events, wall=1e-3, steps=2)}
    assert sum(share.milliseconds for share in found.values()) == pytest.approx(0.5)
    assert sum(share.share for share in found.values()) == pytest.approx(1)
    assert found["gemms"].milliseconds == pytest.approx(0.2)
    assert found["gemms"].launches == 1
    assert found[GAPS].milliseconds == pytest.approx(0.275)


def test_overlapping_kernels_leave_no_gap() -> None:
    found = shares([Event("aten::mm", 900.0), Event("aten::copy_", 300.0)], wall=1e-3, steps=1)
    assert sum(share.share for share in found) == pytest.approx(1)
    assert found[-1].milliseconds == 0


SMALL = Work("pmae", 16, 32, network=Sizes(depth=2, decoder_depth=1))


def test_a_real_step_has_every_group_and_its_products() -> None:
    take = ours.build(SMALL, "plain")
    take(1)
    found = watch(take, 1, torch.device("cpu"))
    groups = {share.group: share for share in found.shares}
    assert sum(share.share for share in found.shares) == pytest.approx(1)
    assert {"optimizer", "attention", NORMS, "GELU", REST, GAPS} <= set(groups)
    # Three blocks of four linear layers, each one product forward and two backward.
    assert groups["gemms"].launches >= 3 * 4 * 3
    assert found.alone > 0


@pytest.mark.usefixtures("forked_contestants")
def test_a_profile_comes_out_of_its_process_and_a_failure_says_why() -> None:
    said: list[str] = []
    entries = [Entry("plain", SMALL), Entry("full", SMALL)]
    (row, profile), (failed, nothing) = profiles(entries, Pace(1, warm=1), said.append)
    assert row.note == ""
    assert profile is not None
    assert "gemms" in {share.group for share in profile.shares}
    assert nothing is None
    assert "must run on CUDA" in failed.note
    assert any("must run on CUDA" in line for line in said)
