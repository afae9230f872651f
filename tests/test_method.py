"""The method: PMAE against its definition in NumPy, MAE against transformers' with the same weights and noise."""

import numpy as np
import pytest
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.masking import Draw, PatchMask, hide_components, hide_patches
from pmae.method import MAE, PrincipalMAE, build_method
from pmae.models import patchify, unpatchify
from pmae.spaces import PCA

SHAPE = (3, 16, 16)


def method(config: Config, **changes: object) -> PrincipalMAE | MAE:
    resolved, _ = resolve(replace(config, **changes), 100, SHAPE)
    torch.manual_seed(0)
    built = build_method(resolved, SHAPE, _space() if resolved.space.name == "pca" else None)
    assert isinstance(built, PrincipalMAE | MAE)
    return built.eval()


def _space() -> PCA:
    generator = torch.Generator().manual_seed(0)
    space = PCA(SHAPE)
    space.fit([torch.randn(900, 768, generator=generator).mul(torch.linspace(2, 0.1, 768)).unflatten(1, SHAPE)])
    return space


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("target", ["components", "pixels"])
@pytest.mark.parametrize("per", ["image", "batch"])
@torch.no_grad()
def test_pmae_equals_its_definition(tiny: Config, x: torch.Tensor, target: str, per: str) -> None:
    model = method(tiny, objective__target=target, masking__per=per)
    draw = model.draw(len(x), 0.2, torch.Generator().manual_seed(1))
    outcome = model(x, draw)
    v, mean = model.space.components.double().numpy(), model.space.mean.double().numpy()
    flat = x.flatten(1).double().numpy()
    hidden = hide_components(draw.noise, model.space.variance_share, 0.2).numpy()
    z = (flat - mean) @ v.T
    visible = (z * ~hidden) @ v + mean
    image = torch.from_numpy(visible).float().unflatten(1, SHAPE)
    y = unpatchify(model.predict(image)[0], 4, SHAPE).flatten(1).double().numpy()
    if target == "components":
        error = ((((y - mean) @ v.T - z) * hidden) ** 2).sum(1)
        energy = ((z * hidden) ** 2).sum(1)
    else:
        error, energy = ((y - (flat - visible)) ** 2).sum(1), ((flat - visible) ** 2).sum(1)
    np.testing.assert_allclose(outcome.error, error, rtol=1e-3)
    np.testing.assert_allclose(outcome.energy, energy, rtol=1e-3)
    total = float(model.space.variance.sum())
    assert float(outcome.loss) == pytest.approx(error.mean() / (0.2 * total), rel=1e-3)
    share = (model.space.variance_share.numpy() * hidden).sum(1) * np.ones(len(x))
    np.testing.assert_allclose(outcome.masked_share, share, rtol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
@torch.no_grad()
def test_mae_equals_transformers(tiny: Config, x: torch.Tensor, normalize: bool) -> None:
    model = method(tiny, space__name="pixels", objective__normalize_patches=normalize, objective__scale="mean")
    reference = _reference(normalize)
    _copy_weights(model, reference)
    noise = torch.rand(len(x), 16, generator=torch.Generator().manual_seed(2))
    theirs = reference(pixel_values=x, noise=noise)
    ours = model(x, Draw(noise, torch.tensor(0.75), 4))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert float(ours.masked_share.mean()) == pytest.approx(float(theirs.mask.mean()))
    mask = hide_patches(noise, 4)
    hidden = theirs.logits[torch.arange(len(x))[:, None], mask.drop]
    torch.testing.assert_close(model.predict(x, mask)[0], hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [6, 1])
def test_predicting_the_hidden_patches_alone_changes_no_gradient(
    tiny: Config, x: torch.Tensor, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Predictions leave the networks in float32; here they keep all their digits.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model, x = method(tiny, space__name="pixels", decoder__depth=2, objective__scale="mean").double(), x.double()
    noise = torch.rand(rows, 16, generator=torch.Generator().manual_seed(2))
    losses = model(x, Draw(noise, torch.tensor(0.7), 5)).loss, _loss_of_all(model, x, hide_patches(noise, 5))
    parameters = [p for p in model.parameters() if p.requires_grad]
    for alone, among_all in zip(*([loss, *torch.autograd.grad(loss, parameters)] for loss in losses), strict=True):
        torch.testing.assert_close(alone, among_all, rtol=1e-9, atol=1e-12)


def _loss_of_all(model: PrincipalMAE | MAE, x: torch.Tensor, mask: PatchMask) -> torch.Tensor:
    """Every patch predicted from tokens in the grid's order; the visible ones are left out of the mean."""
    (prefix, visible), decoder = model.encoder(x, mask.keep.expand(len(x), -1)), model.decoder
    at = mask.keep[..., None].expand(len(x), -1, 32)
    tokens = decoder.mask_token.expand(len(x), 16, -1).scatter(1, at, decoder.embed(visible)) + decoder.positions
    tokens = decoder.norm(decoder.blocks(torch.cat([decoder.embed(prefix), tokens], dim=1)))
    target = patchify(x, 4)
    target = (target - target.mean(2, keepdim=True)) / (target.var(2, keepdim=True) + 1e-6).sqrt()
    errors = (decoder.head(tokens)[:, 1:] - target).square().mean(2)
    return errors[mask.hidden.expand(len(x), -1)].mean()


def _reference(normalize: bool) -> ViTMAEForPreTraining:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    config = ViTMAEConfig(
        **sizes, **decoder, decoder_intermediate_size=128, image_size=16, patch_size=4, mask_ratio=0.75,
        norm_pix_loss=normalize, layer_norm_eps=1e-6, hidden_act="gelu",
    )  # fmt: skip
    return ViTMAEForPreTraining(config).eval()


def _copy_weights(model: PrincipalMAE | MAE, reference: ViTMAEForPreTraining) -> None:
    """Our weights under transformers' names."""
    encoder, decoder = model.encoder.net.state_dict(), model.decoder.state_dict()
    theirs = reference.state_dict()
    new = {
        "vit.embeddings.cls_token": encoder["cls_token"],
        "vit.embeddings.position_embeddings": encoder["pos_embed"],
        "decoder.mask_token": decoder["mask_token"].view(1, 1, -1),
        "decoder.decoder_pos_embed": torch.cat([torch.zeros(1, 1, 32), model.decoder.positions], dim=1),
    }
    for kind in ("weight", "bias"):
        new[f"vit.embeddings.patch_embeddings.projection.{kind}"] = encoder[f"patch_embed.proj.{kind}"]
        new[f"vit.layernorm.{kind}"] = encoder[f"norm.{kind}"]
        for theirs_name, ours_name in (("decoder_embed", "embed"), ("decoder_norm", "norm"), ("decoder_pred", "head")):
            new[f"decoder.{theirs_name}.{kind}"] = decoder[f"{ours_name}.{kind}"]
    for prefix, source in ((_layers(theirs, "vit."), encoder), (_layers(theirs, "decoder."), decoder)):
        for number in range(2 if source is encoder else 1):
            new |= _block(f"{prefix}{number}.", source, f"blocks.{number}.", theirs)
    assert new.keys() == theirs.keys(), new.keys() ^ theirs.keys()
    reference.load_state_dict({key: value.reshape(theirs[key].shape) for key, value in new.items()})


def _layers(theirs: dict[str, torch.Tensor], side: str) -> str:
    """transformers has moved its blocks about over the years; find them by their first layer norm."""
    return next(k for k in theirs if k.startswith(side) and k.endswith(".0.layernorm_before.weight"))[
        : -len("0.layernorm_before.weight")
    ]


def _block(
    to: str, source: dict[str, torch.Tensor], start: str, theirs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    new = {}
    for kind in ("weight", "bias"):
        q, k, v = source[f"{start}attn.qkv.{kind}"].chunk(3)
        parts = {
            ("query", "q_proj"): q,
            ("key", "k_proj"): k,
            ("value", "v_proj"): v,
            ("attention.output.dense", "o_proj"): source[f"{start}attn.proj.{kind}"],
            ("layernorm_before",): source[f"{start}norm1.{kind}"],
            ("layernorm_after",): source[f"{start}norm2.{kind}"],
            ("intermediate.dense", "fc1"): source[f"{start}mlp.fc1.{kind}"],
            ("output.dense", "fc2"): source[f"{start}mlp.fc2.{kind}"],
        }
        inside = [name for name in theirs if name.startswith(to) and name.endswith(f".{kind}")]
        for names, value in parts.items():
            attention = names[0] == "attention.output.dense"
            found = [n for n in inside if any(n.removeprefix(to).removesuffix(f".{kind}").endswith(e) for e in names)]
            found = [n for n in found if attention or names[0] != "output.dense" or "attention" not in n]
            assert len(found) == 1, (names, found)
            new[found[0]] = value
    return new


def test_patches_and_back() -> None:
    images = torch.randn(2, 5, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 80)
    assert torch.equal(patches[0, 1].view(4, 4, 5), images[0, :, :4, 4:8].permute(1, 2, 0))
    assert torch.equal(unpatchify(patches, 4, (5, 8, 12)), images)


def test_mae_refuses_a_convolutional_encoder_in_a_sentence(tiny: Config) -> None:
    shape = {"encoder__width": None, "encoder__depth": None, "encoder__heads": None}
    with pytest.raises(UserError, match=r"must have a ViT encoder.*encoder\.name is 'resnet10t'"):
        method(tiny, space__name="pixels", encoder__name="resnet10t", **shape)


@pytest.mark.parametrize("name", ["resnet10t", "regnetx_002", "vit_tiny_patch16_224"])
def test_pmae_trains_any_encoder(tiny: Config, x: torch.Tensor, name: str) -> None:
    shape = {"encoder__width": None, "encoder__depth": None, "encoder__heads": None}
    model = method(tiny, encoder__name=name, **shape).train()
    outcome = model(x, model.draw(len(x), 0.2, torch.Generator().manual_seed(1)))
    outcome.loss.backward()
    assert bool(torch.isfinite(outcome.loss))
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.encoder.parameters() if p.grad is not None)
    # Masking is gone after training: the same image gives the same features, twice.
    features = model.eval().encoder.features(x)
    assert all(torch.equal(v, model.encoder.features(x)[k]) for k, v in features.items())
