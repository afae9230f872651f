"""The learned basis: it turns the way it says, stays orthonormal, its shares follow, and a run saves and resumes it."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file

from pmae.config import Config, SpaceConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import Interrupted, UserError
from pmae.method import build_method
from pmae.objectives import on_components, scaled
from pmae.spaces import Learned
from pmae.train.checkpoint import load_space
from pmae.train.loop import Pretraining, pretrain

SHAPE = (1, 4, 4)


def images(count: int = 400, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    size = int(np.prod(shape))
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, size, generator=generator) * torch.linspace(2, 0.2, size) + 1).unflatten(1, shape)


def fitted(towards: str = "hard", count: int = 10) -> Learned:
    space = Learned(SHAPE, SpaceConfig("learned", components=count, rotate_towards=towards))  # type: ignore[arg-type]
    space.fit([images()])
    return space


def turned(space: Learned, by: float = 1.0) -> Learned:
    with torch.no_grad():
        space.angles.copy_(by * torch.randn(space.angles.shape, generator=torch.Generator().manual_seed(1)))
    return space


def test_small_angles_turn_as_the_exponential_and_large_ones_stay_orthonormal() -> None:
    space = turned(fitted(), by=0.01)
    skew = np.zeros((10, 10))
    skew[np.triu_indices(10, 1)] = space.angles.detach().numpy()
    np.testing.assert_allclose(space.rotation.detach(), scipy.linalg.expm(skew - skew.T), atol=1e-5)
    for size in (1.0, 100.0, 1e4):
        rotation = turned(space, by=size).rotation.detach()
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(10), atol=1e-5, rtol=0)


def test_begins_as_pca_and_shares_follow_the_rotation() -> None:
    space, x = fitted(), images()
    torch.testing.assert_close(space.project(x), space.pca.project(x))
    torch.testing.assert_close(space.variance, space.pca.variance)
    with torch.no_grad():
        z, rotation = turned(space).project(x), space.rotation.double().numpy()
    spectrum = space.pca.variance[:10].double().numpy()
    np.testing.assert_allclose(space.variance[:10], np.diag(rotation @ np.diag(spectrum) @ rotation.T), rtol=1e-5)
    torch.testing.assert_close(space.variance, z.var(0), rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(space.reconstruct(z), x, atol=1e-4, rtol=0)
    assert not space.variance.requires_grad


def test_the_gradient_is_reversed_and_the_value_is_not() -> None:
    x = images(8)
    hard, easy = turned(fitted("hard")), turned(fitted("easy"))
    gradients = []
    for space in (hard, easy):
        space.project(x)[:, 0].pow(4).sum().backward()
        gradients.append(space.angles.grad)
    assert torch.equal(hard.project(x), easy.project(x))
    assert float(gradients[0].abs().sum()) > 0
    torch.testing.assert_close(gradients[0], -gradients[1])


@pytest.mark.parametrize("towards", ["hard", "easy"])
def test_turns_to_what_regression_finds_hard_or_easy(towards: str) -> None:
    """Two pixels of variance 4 and 1, one of the two components hidden, and the best linear guess of it.

    In a basis at angle t the components correlate by c^2 = (1.5 sin 2t)^2, so regression explains nothing at 0 (the
    principal axes) and most at 45 degrees.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4000, 2, generator=generator) * torch.tensor([2.0, 1.0])).unflatten(1, (1, 1, 2))
    space = Learned((1, 1, 2), SpaceConfig("learned", rotate_towards=towards))  # type: ignore[arg-type]
    space.fit([x])
    with torch.no_grad():
        space.angles.fill_(0.4)
    optimizer = torch.optim.AdamW(space.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        _unexplained_by_regression(space, x).backward()
        optimizer.step()
    rotation = space.rotation.detach()
    goal = 0.0 if towards == "hard" else np.pi / 4
    assert float(torch.atan2(rotation[0, 1], rotation[0, 0])) == pytest.approx(goal, abs=0.05)


def _unexplained_by_regression(space: Learned, x: torch.Tensor) -> torch.Tensor:
    """The loss of a model that predicts each component from the image of the other by least squares."""
    z = space.project(x)
    hidden = torch.eye(2, dtype=torch.bool).repeat_interleave(len(x), 0)
    z = z.repeat(2, 1)
    visible = space.reconstruct(z.masked_fill(hidden, 0.0)).flatten(1)
    predicted = []
    for part, target in zip(visible.chunk(2), x.flatten(1).expand(2, -1, -1), strict=True):
        weights = torch.linalg.lstsq(part.detach(), target, driver="gelsd").solution
        predicted.append(part @ weights)
    y = torch.cat(predicted).unflatten(1, space.shape)
    return scaled(on_components(space.project(y), z, hidden), "hidden", 1.0)


@pytest.mark.parametrize(("towards", "sign"), [("hard", 1), ("easy", -1)])
def test_turns_against_or_with_a_network(tiny: Config, toy: Splits, towards: str, sign: int) -> None:
    config = replace(tiny, space__name="learned", space__components=48, space__rotate_towards=towards)
    config, _ = resolve(config, len(toy.train), toy.train.shape)
    torch.manual_seed(0)
    model = build_method(config, toy.train.shape)
    x = torch.from_numpy(toy.train.images[:64]).float().sub(128).div(30)
    model.space.fit([x])
    draw = model.draw(len(x), 0.2, torch.Generator().manual_seed(1))
    networks = [*model.encoder.parameters(), *model.decoder.parameters()]
    _descend(model, x, draw, torch.optim.AdamW(networks, lr=3e-3), 30)
    before = float(model(x, draw).loss.detach())
    _descend(model, x, draw, torch.optim.AdamW(model.space.parameters(), lr=3e-3, weight_decay=0.0), 10)
    assert sign * (float(model(x, draw).loss.detach()) - before) > 0.01


def _descend(
    model: torch.nn.Module, x: torch.Tensor, draw: object, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x, draw).loss.backward()
        optimizer.step()


def test_stays_orthonormal_over_hundreds_of_steps() -> None:
    space, x = fitted(), images(16)
    optimizer = torch.optim.AdamW(space.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        optimizer.zero_grad()
        (space.project(x) * torch.randn(16, 16, generator=generator)).sum().backward()
        optimizer.step()
    rotation = space.rotation.detach()
    assert float(space.angles.detach().abs().max()) > 1
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(10), atol=1e-5, rtol=0)
    assert float(space.variance.sum()) == pytest.approx(float(space.pca.variance.sum()), rel=1e-5)


def settled(tiny: Config, toy: Splits) -> Config:
    return resolve(replace(tiny, space__name="learned", space__components=16), len(toy.train), toy.train.shape)[0]


def test_a_run_trains_saves_and_resumes_the_basis_bit_for_bit(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settled(tiny, toy)
    whole = pretrain(config, toy, tmp_path / "whole", quiet=True)
    original = Pretraining.inputs

    def inputs(self: Pretraining, *arguments: object) -> object:
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Pretraining, "inputs", inputs)
    with pytest.raises(Interrupted):
        pretrain(config, toy, tmp_path / "halves", quiet=True)
    monkeypatch.setattr(Pretraining, "inputs", original)
    resumed = pretrain(config, toy, tmp_path / "halves", resume=True, quiet=True)
    for file in ("encoder", "decoder", "optimizer", "space"):
        ours, theirs = (load_file(run.checkpoint() / f"{file}.safetensors") for run in (resumed, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert "space.angles/exp_avg" in load_file(whole.checkpoint() / "optimizer.safetensors")
    first, last = load_file(whole.checkpoint(1) / "space.safetensors")["angles"], load_space(whole)
    assert isinstance(last, Learned)
    assert 0 < float(first.abs().max()) < float(last.angles.detach().abs().max())


def test_a_checkpoint_of_another_size_names_the_tensor(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    run = pretrain(replace(settled(tiny, toy), train__epochs=1), toy, tmp_path / "run", quiet=True)
    path = run.path / "config.json"
    path.write_text(path.read_text().replace('"components": 16', '"components": 17'))
    with pytest.raises(UserError, match=r"angles must be \(136,\), got \(120,\)"):
        load_space(run)


def test_a_loss_that_is_not_relative_is_refused() -> None:
    with pytest.raises(UserError, match=r"objective\.scale must be 'constant' where space\.name is 'learned'"):
        replace(Config(), space__name="learned", objective__scale="sum")
