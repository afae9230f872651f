"""Counted operations against torch's own counter, for our step and for the peers'."""

import pytest
import torch
from benchmarks.work import Sizes, Work
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import peers
from pmae import fast
from pmae.config import Config, DecoderConfig, EncoderConfig, MaskingConfig, ObjectiveConfig, SpaceConfig, replace
from pmae.contrastive import OUT
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.flops import flops_per_image
from pmae.method import build_method
from pmae.paper.recipes import recipe

BATCH = 2
SIDES = {"patch_size": 4, "width": 24, "depth": 2, "heads": 2}
SMALL = {
    "encoder": EncoderConfig(**SIDES),
    "decoder": DecoderConfig("small", width=32, depth=3, heads=4),
}
CONFIGS = {
    "pmae": Config(**SMALL),
    "pmae on pixels": Config(**SMALL, objective=ObjectiveConfig(target="pixels")),
    "cosine": Config(**SMALL, space=SpaceConfig("cosine")),
    "mae": Config(**SMALL, space=SpaceConfig("pixels")),
    "mae 0.4": Config(**SMALL, space=SpaceConfig("pixels"), masking=MaskingConfig(masked_patches=0.4)),
    "timm": Config(encoder=EncoderConfig("vit_tiny_patch16_224", patch_size=4), decoder=SMALL["decoder"]),
}


def counted(step) -> int:
    """Operations of a forward and backward; plain attention, as fused kernels compute scores twice."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 24), (6, 8, 8)])
def test_closed_form_is_what_torch_counts(name: str, shape: tuple[int, int, int]) -> None:
    config, _ = resolve(CONFIGS[name], 64, shape)
    model = build_method(config, shape)
    fast.accelerate(model, "attention")
    ratio = config.masking.masked_patches or config.masking.masked_variance
    draw = model.draw(BATCH, ratio, torch.Generator().manual_seed(0))
    x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))
    assert counted(lambda: model(x, draw).loss) == BATCH * flops_per_image(config, shape)


@pytest.mark.parametrize(
    ("loss", "local", "of_a_pair"),
    # Similarities to the windows are of two halves.
    [("nt_xent", 0, 3 * OUT), ("nt_xent", 2, 6 * OUT), ("data2vec(momentum=0.9)", 0, 0)],
)
def test_a_contrastive_loss_counts_both_views(loss: str, local: int, of_a_pair: int) -> None:
    objective = ObjectiveConfig(contrastive_weight=1.0, contrastive=loss, local_views=local)
    config, _ = resolve(Config(**SMALL, objective=objective), 64, (3, 16, 16))
    model, views = build_method(config, (3, 16, 16)), 2 * BATCH
    fast.accelerate(model, "attention")
    draw = model.draw(views, 0.2, torch.Generator().manual_seed(0))
    similarities = 2 * views**2 * of_a_pair
    work = BATCH * flops_per_image(config, (3, 16, 16)) + similarities
    assert counted(lambda: model(torch.randn(views, 3, 16, 16), draw).loss) == work


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 24), (6, 8, 8)])
def test_simclr_maps_nothing_to_components(shape: tuple[int, int, int]) -> None:
    config, _ = resolve(replace(recipe("simclr"), **{f"encoder__{k}": v for k, v in SIDES.items()}), 64, shape)
    model, views = build_method(config, shape), 2 * BATCH
    fast.accelerate(model, "attention")
    draw = model.draw(views, 0.2, torch.Generator().manual_seed(0))
    work = BATCH * flops_per_image(config, shape) + 2 * views**2 * 3 * OUT
    assert counted(lambda: model(torch.randn(views, *shape), draw).loss) == work


@pytest.mark.parametrize("peer", ["transformers", "lightly"])
@pytest.mark.parametrize("method", ["pmae", "mae"])
def test_peers_do_the_same_work_and_predict_every_patch(peer: str, method: str) -> None:
    pytest.importorskip(peer)
    work = Work(method, 32, BATCH, network=Sizes(depth=2, decoder_depth=2))
    model = peers.network(peer)(work)
    model = model if method == "mae" else peers.HidingComponents(model, work, torch.device("cpu"))
    x = torch.randn(BATCH, *work.shape)
    # transformers' head serves [CLS] too, lightly's the hidden tokens alone: 1 part in 100.
    expected = BATCH * flops_per_image(work.config, work.shape, whole=True)
    assert counted(lambda: model(x)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", ["resnet18", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_other_networks_are_refused(name: str) -> None:
    config = Config(encoder=EncoderConfig(name, patch_size=16))
    with pytest.raises(UserError, match="operations are counted for a"):
        flops_per_image(config, (3, 32, 32))
