"""The method on the card against definitions that borrow nothing from the package."""

import numpy as np
import pytest
import torch
from tests.conftest import smooth_images
from tests.gpu.conftest import Within

from pmae import fast
from pmae.config import Config, replace
from pmae.derive import resolve
from pmae.masking import Draw
from pmae.method import build_method
from pmae.models import unpatchify

SHAPE = (3, 16, 16)


@pytest.mark.parametrize("kernels", ["all", "none"])
@torch.no_grad()
def test_pmae_is_its_definition_in_numpy(tiny: Config, kernels: str, assert_within: Within) -> None:
    """PCA by an eigendecomposition, masks by a sort, images and loss by matrix products, all in float64."""
    rng = np.random.default_rng(0)
    data = smooth_images(1200, SHAPE).reshape(1200, -1).astype(np.float64)
    data = (data - data.mean(0)) / data.std(0)
    variance, axes = np.linalg.eigh(np.cov(data.T, bias=True))
    variance, axes = variance[::-1].clip(0), axes[:, ::-1]
    config, _ = resolve(tiny, 1200, SHAPE)
    torch.manual_seed(0)
    model = build_method(config, SHAPE)
    model.space.fit([torch.from_numpy(data).float().unflatten(1, SHAPE)])
    model = model.cuda().eval()
    fast.accelerate(model, kernels)
    x, noise, ratio = data[:32], rng.random((32, len(variance)), dtype=np.float32), 0.2
    draw = Draw(torch.from_numpy(noise).cuda(), torch.tensor(ratio, device="cuda"), 0)
    outcome = model(torch.from_numpy(x).float().cuda().unflatten(1, SHAPE), draw)
    share = variance / variance.sum()
    hidden = np.zeros_like(noise, dtype=bool)
    for row, order in zip(hidden, noise.argsort(1), strict=True):
        count = int(np.abs(np.cumsum(share[order]) - ratio).argmin()) + 1
        row[order[: min(max(count, 1), len(order) - 1)]] = True
    mean = data.mean(0)
    z = (x - mean) @ axes
    visible = (z * ~hidden) @ axes.T + mean
    seen = torch.from_numpy(visible).float().cuda().unflatten(1, SHAPE)
    y = unpatchify(model.predict(seen)[0], 4, SHAPE).flatten(1).double().cpu().numpy()
    error = ((((y - mean) @ axes - z) * hidden) ** 2).sum(1)
    energy = ((z * hidden) ** 2).sum(1)
    loss = error.mean() / (ratio * variance.sum())
    assert_within(f"PMAE's loss against NumPy, kernels {kernels}", abs(float(outcome.loss) / loss - 1), 2e-3)
    assert_within(f"PMAE's hidden energy against NumPy, kernels {kernels}",
         float(np.abs(outcome.energy.cpu().numpy() / energy - 1).max()), 5e-3)  # fmt: skip


@pytest.mark.parametrize("kernels", ["all", "none"])
@torch.no_grad()
def test_mae_is_transformers(tiny: Config, kernels: str, assert_within: Within) -> None:
    pytest.importorskip("transformers")
    from tests.test_method import _copy_weights, _reference

    changes = {"space__name": "pixels", "masking__masked_patches": 0.75, "objective__target": "patches"}
    config, _ = resolve(replace(tiny, objective__scale="mean", **changes), 100, SHAPE)
    torch.manual_seed(0)
    model = build_method(config, SHAPE).eval()
    reference = _reference(True)
    _copy_weights(model, reference)
    model, reference = model.cuda(), reference.cuda()
    fast.accelerate(model, kernels)
    x, noise = torch.randn(8, *SHAPE, device="cuda"), torch.rand(8, 16, device="cuda")
    found = model(x, Draw(noise, torch.tensor(0.75, device="cuda"), 4)).loss
    expected = reference(x, noise=noise).loss
    assert_within(f"MAE's loss against transformers, kernels {kernels}", abs(float(found / expected) - 1), 1e-4)
