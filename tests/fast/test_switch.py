"""The switch: which functions run a model at each level, who wins, and that the networks stay timm's own."""

import copy
import pickle

import pytest
import torch
from timm.models.vision_transformer import Attention, Block, VisionTransformer

from pmae import fast, masking
from pmae.config import Config, TrainConfig, replace
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.fast import attention, blocks
from pmae.method import MaskedAutoencoder, build_method
from pmae.models import encoder as plain
from pmae.train.environment import pick_engine

CUDA = torch.device("cuda")


def model_of(config: Config, space: str = "pca") -> MaskedAutoencoder:
    torch.manual_seed(0)
    return build_method(resolve(replace(config, space__name=space), 100, (3, 16, 16))[0], (3, 16, 16))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fast.VARIABLE, raising=False)


def test_each_level_chooses_its_functions(tiny: Config) -> None:
    model = model_of(tiny)
    assert (model.encoder.run_blocks, model.decoder.run_blocks) == (plain.run_blocks, plain.run_blocks)
    for setting, run in (("all", blocks), ("attention", attention), ("none", plain)):
        fast.accelerate(model, setting)
        assert model.encoder.run_blocks is model.decoder.run_blocks is run.run_blocks
        assert (model.encoder.embed_patches is plain.embed_patches) == (setting != "all")
        assert (model.hide_components is masking.hide_components) == (setting != "all")


def test_without_a_setting_an_earlier_choice_stays(tiny: Config) -> None:
    model = model_of(tiny)
    fast.accelerate(model, "none")
    fast.accelerate(model)
    assert model.encoder.run_blocks is plain.run_blocks
    untouched = model_of(tiny)
    fast.accelerate(untouched.encoder)
    assert untouched.encoder.run_blocks is blocks.run_blocks


def test_the_environment_variable_wins(tiny: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fast.VARIABLE, "none")
    model = model_of(tiny)
    fast.accelerate(model, "all")
    assert model.encoder.run_blocks is plain.run_blocks
    assert not fast.can_capture(CUDA)
    monkeypatch.setenv(fast.VARIABLE, "some")
    with pytest.raises(UserError, match="PMAE_KERNELS must be one of all, attention, none, got 'some'"):
        fast.accelerate(model)


@pytest.mark.parametrize("space", ["pca", "pixels"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_no_level_changes_the_answer(tiny: Config, space: str, precision: torch.dtype) -> None:
    model, x = model_of(tiny, space), torch.randn(4, 3, 16, 16)
    model.precision = precision
    draw = model.draw(4, 0.5, torch.Generator().manual_seed(0))
    losses = []
    for setting in ("none", "attention", "all"):
        fast.accelerate(model, setting)
        losses.append(model(x, draw).loss.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5 if precision == torch.float32 else 2e-2)


def test_networks_are_timms_classes(tiny: Config) -> None:
    model = model_of(tiny)
    fast.accelerate(model, "all")
    net = model.encoder.net
    assert type(net) is VisionTransformer
    assert {type(block) for block in (*net.blocks, *model.decoder.blocks)} == {Block}
    assert {type(block.attn) for block in (*net.blocks, *model.decoder.blocks)} == {Attention}
    assert type(net.patch_embed.proj) is torch.nn.Conv2d


def test_copies_and_pickles_keep_the_choice(tiny: Config) -> None:
    model = model_of(tiny)
    fast.accelerate(model, "attention")
    for other in (copy.deepcopy(model.encoder), pickle.loads(pickle.dumps(model.encoder))):
        assert other.run_blocks is attention.run_blocks


def test_captured_steps_need_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert pick_engine(TrainConfig(), CUDA) == "graph"
    for setting in ("attention", "none"):
        assert pick_engine(TrainConfig(kernels=setting), CUDA) == "plain"
        with pytest.raises(UserError, match=r"train.engine must be plain or auto where train.kernels is not all"):
            TrainConfig(kernels=setting, engine="graph")
    monkeypatch.setenv(fast.VARIABLE, "none")
    assert pick_engine(TrainConfig(), CUDA) == "plain"
    with pytest.raises(UserError, match=r"train.engine must be plain or auto .*PMAE_KERNELS turns kernels off"):
        pick_engine(TrainConfig(engine="graph"), CUDA)
