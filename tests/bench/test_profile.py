"""The profile of a step: every kernel has a group, and the groups sum to the step."""

import pytest

from pmae.bench.profile import GAPS, REST, Event, group_of, profile_step, shares
from pmae.bench.work import Sizes, Work

KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
    "triton_tem_fused_addmm_12": "products",
    "_forward_kernel": "attention",
    "_backward_kernel_0": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128, 128, 4>>": "attention",
    "triton_per_fused__softmax_mul_3": "attention",
    "triton_per_fused__to_copy_add_native_layer_norm_7": "layer norm",
    "triton_red_fused_native_layer_norm_backward_40": "layer norm",
    "triton_poi_fused_gelu_gelu_backward_9": REST,
    "triton_poi_fused__to_copy_add_view_2": REST,
    "triton_poi_fused__to_copy_11": "copies and casts",
    "triton_poi_fused_cat_clone_4": "copies and casts",
    "Memcpy DtoD (Device -> Device)": "copies and casts",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copies and casts",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::distribution_elementwise_grid_stride_kernel<float, 4>": "random numbers, sort, mask",
    "void cub::DeviceSegmentedRadixSortKernel<float, long>": "random numbers, sort, mask",
    "aten::addmm": "products",
    "aten::mm": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten::native_layer_norm": "layer norm",
    "aten::gelu_backward": REST,
    "aten::_fused_adamw_": "optimizer",
    "aten::copy_": "copies and casts",
    "aten::t": "copies and casts",
    "aten::tanh": REST,
    "aten::sort": "random numbers, sort, mask",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_belongs_to_its_group(name: str) -> None:
    assert group_of(name) == KERNELS[name]


def test_groups_and_gaps_sum_to_the_time_on_the_clock() -> None:
    events = [Event("aten::mm", 300.0), Event("aten::mm", 100.0), Event("aten::copy_", 50.0)]
    found = {share.group: share for share in shares(events, wall=1e-3, steps=2)}
    assert sum(share.milliseconds for share in found.values()) == pytest.approx(0.5)
    assert sum(share.share for share in found.values()) == pytest.approx(1)
    assert found["products"].milliseconds == pytest.approx(0.2)
    assert found["products"].launches == 1
    assert found[GAPS].milliseconds == pytest.approx(0.275)


def test_overlapping_kernels_leave_no_gap() -> None:
    found = shares([Event("aten::mm", 900.0), Event("aten::copy_", 300.0)], wall=1e-3, steps=1)
    assert sum(share.share for share in found) == pytest.approx(1)
    assert found[-1].milliseconds == 0


def test_a_real_step_is_mostly_products() -> None:
    found, alone = profile_step(Work("pmae", 16, 8, network=Sizes(depth=2, decoder_depth=1)), "plain", steps=1, warm=1)
    assert sum(share.share for share in found) == pytest.approx(1)
    assert found[0].group == "products"
    assert {"optimizer", "attention", "layer norm", REST, GAPS} <= {share.group for share in found}
    assert alone > 0
