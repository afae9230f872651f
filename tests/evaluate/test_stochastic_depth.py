"""Stochastic depth against timm's own, and that it goes when it should."""

import pytest
import timm
import torch
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from pmae.evaluate.finetune_step import stochastic_depth


def dropping(net: nn.Module) -> list[float]:
    return [module.drop_prob for module in net.modules() if isinstance(module, DropPath)]


def test_inside_it_is_timms_and_after_it_is_gone() -> None:
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 0}
    reference, net = VisionTransformer(drop_path_rate=0.6, **shape), VisionTransformer(**shape)  # type: ignore[arg-type]
    net.load_state_dict(reference.state_dict())
    keys, x = list(net.state_dict()), torch.randn(8, 3, 8, 8)
    with stochastic_depth(net, 0.6):
        assert dropping(net) == pytest.approx([0.0, 0.0, 0.3, 0.3, 0.6, 0.6])
        assert list(net.state_dict()) == keys
        torch.manual_seed(0)
        ours = net.train()(x)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, reference.train()(x))
        assert torch.equal(net.eval()(x), reference.eval()(x))
    assert dropping(net) == []


def test_what_was_there_before_comes_back_even_after_an_error() -> None:
    net = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.2)
    before = dropping(net)
    inside: list[float] = []

    def fail() -> None:
        with stochastic_depth(net, 0.5):
            inside.extend(dropping(net))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert max(inside) == 0.5
    assert dropping(net) == before
    with stochastic_depth(net, 0.0):
        assert dropping(net) == before


def test_a_convolutional_net_has_it_where_timm_gives_it_a_place() -> None:
    net = timm.create_model("convnext_atto", num_classes=0)
    with stochastic_depth(net, 0.3):
        assert max(dropping(net)) == pytest.approx(0.3)
    assert dropping(net) == []
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with stochastic_depth(plain, 0.3):
        assert dropping(plain) == []
