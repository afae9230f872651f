"""EMA teachers: token targets against a plain definition, and a teacher that follows and does not learn."""

from copy import deepcopy

import pytest
import torch
from timm.layers.drop import DropPath
from torch.nn import functional

from pmae.config import Config, DecoderConfig, EncoderConfig, ObjectiveConfig, TrainConfig, replace
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.method import MaskedAutoencoder, build_method
from pmae.models import build_encoder
from pmae.teacher import Data2Vec, Teacher, token_targets
from pmae.train.distributed import ONE_PROCESS, require_shardable
from pmae.train.setup import build_model
from pmae.train.step import build_optimizer

SHAPE = (1, 8, 8)
SMALL = "data2vec(momentum=0.8, layers=2)"


def config_of(contrastive: str = SMALL, **changes: object) -> Config:
    config = Config(
        encoder=EncoderConfig(patch_size=4, width=16, depth=3, heads=2),
        decoder=DecoderConfig("small", width=16, depth=1, heads=2),
        objective=ObjectiveConfig(contrastive_weight=1.0, contrastive=contrastive),
        train=TrainConfig(epochs=1, batch_size=16, device="cpu"),
    )
    return resolve(replace(config, **changes), 64, SHAPE)[0]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(0)).cumsum(3)


@pytest.fixture
def model(x: torch.Tensor) -> MaskedAutoencoder:
    torch.manual_seed(0)
    made = build_method(config_of(), SHAPE)
    made.space.fit([x + 0.1 * torch.randn(8, *SHAPE) for _ in range(10)])
    return made.train()


def teacher_of(model: MaskedAutoencoder) -> Teacher:
    assert model.contrastive is not None
    assert isinstance(model.contrastive.module, Data2Vec)
    return model.contrastive.module.teacher


def loss_of(model: MaskedAutoencoder, x: torch.Tensor) -> torch.Tensor:
    return model(x, model.draw(len(x), 0.2, torch.Generator().manual_seed(1))).loss


@pytest.mark.parametrize(("count", "used"), [(2, [1, 2]), (9, [0, 1, 2])])
def test_token_targets_are_the_normalized_tokens_of_the_last_blocks(
    count: int, used: list[int], x: torch.Tensor
) -> None:
    """By timm's own way to intermediate layers."""
    encoder = build_encoder(config_of().encoder, SHAPE)
    tokens, layers = encoder.layers(x, count)
    net, options = encoder.net, {"output_fmt": "NLC", "intermediates_only": True}
    expected = net.forward_intermediates(x, used, norm=False, **options)  # type: ignore[operator]
    normalized = [
        (e - e.mean(2, keepdim=True)) / (e.var(2, keepdim=True, correction=0) + 1e-5).sqrt() for e in expected
    ]
    torch.testing.assert_close(token_targets(layers), sum(normalized) / len(used))
    torch.testing.assert_close(tokens, encoder(x)[1])
    assert encoder.layers(x, 0)[1] == []


def test_the_loss_is_of_masked_and_whole_tokens(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    """From the encoder's tokens on, by hand."""
    found = loss_of(model, x)
    module, contrastive = model.contrastive.module, model.contrastive  # type: ignore[union-attr]
    draw = model.draw(len(x), 0.2, torch.Generator().manual_seed(1))
    _, _, visible = model.hide(x, draw)  # type: ignore[attr-defined]
    tokens = model.encoder(visible)[1]
    target = token_targets(model.encoder.layers(x, 2)[1])  # before the first update the teacher is the student
    expected = functional.smooth_l1_loss(module.token_predictor(tokens), target)
    model.contrastive = None
    torch.testing.assert_close(found - loss_of(model, x), expected)
    assert contrastive.predicts_tokens


def test_the_teacher_is_the_moving_average_and_learns_nothing(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    teacher, optimizer = teacher_of(model), build_optimizer(model, model.config.optim, on_graph=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    slow = deepcopy(dict(model.encoder.named_parameters()))
    for _ in range(4):
        for name, p in model.encoder.named_parameters():
            slow[name] = 0.8 * slow[name] + 0.2 * p.detach()
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    for name, p in teacher.encoder.named_parameters():
        torch.testing.assert_close(p, slow[name])
        assert p.grad is None
    moved = teacher.encoder.net.blocks[0].attn.qkv.weight  # type: ignore[index, union-attr]
    assert not torch.equal(moved, model.encoder.net.blocks[0].attn.qkv.weight)  # type: ignore[index, union-attr]
    assert not {id(p) for p in teacher.parameters()} & {id(p) for g in optimizer.param_groups for p in g["params"]}


def test_the_teacher_rests_in_evaluation(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.encoder.net.cls_token.add_(1.0)  # type: ignore[operator, union-attr]
    before = deepcopy(teacher_of(model).state_dict())
    loss_of(model.eval(), x)
    teacher_of(model)(x)
    assert all(torch.equal(before[name], value) for name, value in teacher_of(model).state_dict().items())


def test_a_captured_steps_bf16_copies_follow_the_teacher(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    pytest.importorskip("triton")
    from pmae.fast.adamw import WeightCopies

    model.precision = torch.bfloat16
    copies, plain = WeightCopies(model), deepcopy(model)
    for step in range(3):
        with torch.no_grad():
            for p in [*model.encoder.parameters(), *plain.encoder.parameters()]:
                p.add_(0.01 * step)
        with copies.in_use():
            captured = loss_of(model, x)
            held = dict(teacher_of(model).named_parameters())
        torch.testing.assert_close(captured, loss_of(plain, x), rtol=0.02, atol=0)
        masters = dict(teacher_of(model).named_parameters())
        assert held["encoder.net.blocks.0.attn.qkv.weight"].dtype == torch.bfloat16
        for name, p in teacher_of(plain).named_parameters():
            assert torch.equal(masters[name], p)
            # The student's copies are the optimizer's to write, here nobody's; the teacher's follow it.
            assert torch.equal(held[name], masters[name].to(held[name].dtype))
            assert not held[name].requires_grad


def test_the_compiler_leaves_the_teacher_out_and_autocast_on(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    module, tokens = model.decoder.projector, model.encoder(x)[1].detach()
    dtypes: list[torch.dtype] = []
    teacher_of(model).encoder.net.blocks[0].attn.qkv.register_forward_hook(  # type: ignore[index, union-attr]
        lambda layer, inputs, output: dtypes.append(output.dtype)
    )
    losses = []
    for call in (module, torch.compile(module, backend="eager", dynamic=False)):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(call(tokens, x, torch.nn.Identity()).item())  # type: ignore[operator, misc]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert dtypes == [torch.bfloat16] * 2


def test_given_weights_are_the_teachers_too(model: MaskedAutoencoder) -> None:
    weights = model.encoder.net.state_dict()
    made = build_method(model.config, SHAPE, model.space, weights)
    assert all(torch.equal(weights[name], p) for name, p in teacher_of(made).encoder.net.state_dict().items())


def test_stochastic_depth_is_the_students_alone_and_of_training(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    config = replace(model.config, encoder__drop_path=0.6)
    made = build_model(config, model.space, None, torch.device("cpu"), ONE_PROCESS)
    rates = [[p.drop_prob for p in part.modules() if isinstance(p, DropPath)] for part in (made, teacher_of(made))]
    assert rates == [pytest.approx([0.0, 0.0, 0.3, 0.3, 0.6, 0.6]), []]
    losses = [loss_of(made.train(), x).item() for _ in range(2)]
    assert losses[0] != losses[1]
    assert torch.equal(loss_of(made.eval(), x), loss_of(made, x))
    with pytest.raises(UserError, match=r"encoder.drop_path must be left unset unless encoder.name is vit_tiny"):
        EncoderConfig("resnet18", drop_path=0.1)


def test_the_loss_falls(model: MaskedAutoencoder, x: torch.Tensor) -> None:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = loss_of(model, x)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("contrastive", "space", "said"),
    [
        ("data2vec(momentum=1.5)", "pca", r"data2vec.momentum must be in \[0, 1\], got 1.5"),
        ("data2vec(layers=0)", "pca", "data2vec.layers must be at least 1, got 0"),
        ("data2vec", "pixels", "without targets for tokens where space.name is 'pixels': MAE drops"),
        ("data2vek", "pca", "objective.contrastive: unknown name 'data2vek'; did you mean 'data2vec'"),
    ],
)
def test_what_cannot_be_is_one_sentence(contrastive: str, space: str, said: str) -> None:
    config = config_of(contrastive, space__name=space, objective__scale="mean" if space == "pixels" else "constant")
    with pytest.raises(UserError, match=said), torch.device("meta"):
        build_method(config, SHAPE)


def test_a_teacher_is_not_divided(model: MaskedAutoencoder) -> None:
    config = replace(model.config, train__shard=True)
    with pytest.raises(UserError, match=r"train.shard must be off with an EMA teacher"):
        require_shardable(config, model, 2)
