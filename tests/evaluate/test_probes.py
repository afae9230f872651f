import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

from pmae.errors import UserError
from pmae.evaluate.features import batch_of, hold_out, order
from pmae.evaluate.probes import (
    Heads,
    Probes,
    ProbeTask,
    Source,
    choose,
    logistic_regression,
    probe_accuracies,
    train_probes,
)
from pmae.evaluate.protocols import PRESETS, ProbeProtocol, only, preset
from pmae.train.schedule import rate

CPU = torch.device("cpu")

FAST = ProbeProtocol(epochs=4, warmup_epochs=1, batch_size=32, augment=None)


def blobs(count: int, classes: int, width: int, spread: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian clouds, one per class, with centres that do not depend on the seed."""
    centres = np.random.default_rng(99).normal(size=(classes, width))
    x, labels = make_blobs(count, centers=centres, cluster_std=spread, random_state=seed)
    return x, labels.astype(np.int64)


def features(count: int, seed: int, classes: int = 4, width: int = 10, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Two poolings (2, N, W), the second a rotation and shift of the first."""
    x, labels = blobs(count, classes, width, spread, seed)
    turn = np.linalg.qr(np.random.default_rng(7).normal(size=(width, width)))[0]
    return torch.from_numpy(np.stack([x, 2 * x @ turn + 1]).astype(np.float32)), torch.from_numpy(labels)


def always(x: Tensor) -> Source:
    return lambda epoch: x


def task(labels: Tensor, *seeds: int) -> ProbeTask:
    return ProbeTask(labels, 4, ("cls", "mean"), 10, seeds or (0,))


def trained(source: Source, task: ProbeTask, config: ProbeProtocol = FAST) -> Probes:
    """Heads with every setting there is."""
    return train_probes(source, task, config, task.grid(config))


def test_each_head_of_a_stack_is_what_it_would_be_alone() -> None:
    x, labels = features(200, 0)
    config = dataclasses.replace(FAST, base_lrs=(0.05, 0.5), weight_decays=(0.0, 0.1))
    together = trained(always(x), task(labels, 3), config).scores(x)
    for kind in config.kinds:
        for p, pooling in enumerate(("cls", "mean")):
            for r, setting in enumerate(config.grid):
                lone = dataclasses.replace(config, kinds=(kind,))
                own, part, head = ProbeTask(labels, 4, (pooling,), 10, (3,)), x[p : p + 1], (kind, 3, pooling)
                alone = train_probes(always(part), own, lone, {head: (setting,)}).scores(part)
                assert torch.allclose(alone[head][0], together[head][r], atol=1e-4)


def test_seeds_trained_together_equal_those_trained_alone_and_share_the_passes() -> None:
    x, labels = features(96, 1)
    passes = []

    def source(epoch: int) -> torch.Tensor:
        passes.append(epoch)
        return x + 0.1 * epoch

    together = trained(source, task(labels, 0, 1)).scores(x)
    assert passes == list(range(FAST.epochs))
    for seed in (0, 1):
        for head, scores in trained(source, task(labels, seed)).scores(x).items():
            assert torch.allclose(together[head], scores, atol=1e-5)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_training_equals_torch_layers_with_torch_sgd(kind: Literal["linear", "mlp"], clip: float | None) -> None:
    x, labels = features(96, 1)
    config = dataclasses.replace(FAST, kinds=(kind,), base_lrs=(0.2,), weight_decays=(0.01,), clip_norm=clip)
    batch = batch_of(96, 32)
    own = ProbeTask(labels, 4, ("cls",), 10, (5,))
    stack = Heads(kind, x[:1], own, own.grid(config))
    linears = []
    for layer in stack.layers:
        linear = nn.Linear(layer.shape[2] - 1, layer.shape[3])
        linear.weight.data, linear.bias.data = layer[0, 0, :-1].detach().T.clone(), layer[0, 0, -1].detach().clone()
        linears += [linear, nn.ReLU()]
    model = nn.Sequential(*linears[:-1])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for epoch in range(config.epochs):
        positions = order(96, batch, 5, epoch, CPU)
        for step, index in enumerate(positions):
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * 32 / 256 * rate("cosine", epoch + step / len(positions), 4, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x[0, index]), labels[index]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    probes = trained(always(x[:1]), own, config)
    with torch.no_grad():
        expected = model(x[0]).softmax(1)
    # torch's momentum folds the rate in at the update, as ours does, so the schedules agree step by step.
    assert torch.allclose(probes.scores(x[:1])[kind, 5, "cls"][0], expected, atol=1e-4)


def test_the_strong_linear_probe_is_within_a_point_of_logistic_regression() -> None:
    x, labels = features(1500, 0, spread=2.0)
    test, truth = features(2000, 1, spread=2.0)
    config = preset("strong").probe
    assert config is not None
    config = dataclasses.replace(config, kinds=("linear",), epochs=30)
    parts = tuple(torch.from_numpy(part) for part in hold_out(labels.numpy(), 0.1))
    grid = choose(always(x), x, task(labels), parts, config)  # type: ignore[arg-type]
    probes = train_probes(always(x), task(labels), config, grid)
    for p, (head, scores) in enumerate(probes.scores(test).items()):
        reference = LogisticRegression(max_iter=1000).fit(x[p].numpy(), labels.numpy()).score(test[p].numpy(), truth)
        assert float((scores[0].argmax(1) == truth).float().mean()) == pytest.approx(reference, abs=0.01), head


def test_settings_are_chosen_where_they_are_best_and_never_a_diverged_one() -> None:
    x, labels = features(300, 2, spread=0.5)
    config = dataclasses.replace(FAST, base_lrs=(1e40, 1e-6, 0.3), weight_decays=(0.0,))
    parts = tuple(torch.from_numpy(part) for part in hold_out(labels.numpy(), 0.2))
    grid = choose(always(x), x, task(labels), parts, config)  # type: ignore[arg-type]
    assert all(chosen == [(0.3, 0.0)] for chosen in grid.values())


def test_an_mlp_learns_what_a_linear_head_cannot() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2)).astype(np.float32)
    labels = torch.from_numpy((x[:, 0] * x[:, 1] > 0).astype(np.int64))
    both = torch.from_numpy(x)[None]
    config = ProbeProtocol(epochs=60, warmup_epochs=5, batch_size=60, base_lrs=(0.5,), augment=None)
    probes = trained(always(both), ProbeTask(labels, 2, ("cls",), 32), config)
    right = {kind: float((s[0].argmax(1) == labels).float().mean()) for (kind, *_), s in probes.scores(both).items()}
    assert right["linear"] < 0.7
    assert right["mlp"] > 0.95


def test_permuted_labels_score_at_chance() -> None:
    x, labels = features(800, 3)
    test, truth = features(800, 4)
    shuffled = labels[torch.randperm(800, generator=torch.Generator().manual_seed(0))]
    probes = trained(always(x), task(shuffled))
    for scores in probes.scores(test).values():
        # Four equal classes: the deviation of chance over 800 images is 1.5 points, and classes move together.
        assert float((scores[0].argmax(1) == truth).float().mean()) == pytest.approx(0.25, abs=0.12)
    quick = probe_accuracies(x[0], shuffled, test[0], truth)
    assert quick["linear"] == pytest.approx(0.25, abs=0.12)
    assert quick["knn"] == pytest.approx(0.25, abs=0.12)


def test_new_features_are_asked_for_every_epoch() -> None:
    x, labels = features(60, 5)
    asked: list[int] = []

    def source(epoch: int) -> Tensor:
        asked.append(epoch)
        return x + 0.01 * epoch

    trained(source, task(labels))
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("standardize", [False, True])
def test_constant_features_two_images_and_missing_classes_stay_finite(standardize: bool) -> None:
    config = dataclasses.replace(FAST, standardize=standardize)
    for count in (2, 30):
        x, labels = torch.full((2, count, 10), 3.0), torch.arange(count) % 2
        for scores in trained(always(x), task(labels), config).scores(x).values():
            assert scores.isfinite().all()
            assert torch.allclose(scores.sum(-1), torch.ones(1, count))


def test_seeds_give_other_heads_and_the_same_seed_the_same() -> None:
    x, labels = features(100, 6)
    one, same, other = (trained(always(x), task(labels, seed)).scores(x)["mlp", seed, "cls"] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_quick_logistic_regression_equals_scikit_learn() -> None:
    x, labels = features(500, 0, spread=2.0)
    weights = logistic_regression(x[0].double(), labels, 4)
    reference = LogisticRegression(C=1.0, max_iter=5000, tol=1e-8).fit(x[0].double().numpy(), labels.numpy())
    ours = (x[0].double() @ weights[:-1] + weights[-1]).softmax(1).numpy()
    assert ours == pytest.approx(reference.predict_proba(x[0].double().numpy()), abs=2e-3)


def test_quick_scores_on_separable_constant_and_tiny_data() -> None:
    x, labels = features(300, 0, spread=0.2)
    test, truth = features(100, 1, spread=0.2)
    assert probe_accuracies(x[0], labels, test[0], truth) == {"linear": 1.0, "knn": 1.0}
    constant = probe_accuracies(
        torch.ones(6, 3), torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(2, 3), torch.tensor([0, 0])
    )
    assert constant == {"linear": 1.0, "knn": 1.0}
    two = probe_accuracies(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), torch.tensor([0, 1]))
    assert two["linear"] == 1.0


def test_order_is_a_permutation_without_the_rest() -> None:
    positions = order(23, 5, 0, 1, CPU)
    assert positions.shape == (4, 5)
    assert len(set(positions.flatten().tolist())) == 20
    assert not torch.equal(positions, order(23, 5, 0, 2, CPU))
    assert [batch_of(n, 512) for n in (1, 20, 100, 400, 6000)] == [1, 16, 16, 40, 512]


def test_presets_are_the_papers() -> None:
    probe, tuned, neighbours = preset("paper").probe, preset("paper").finetune, preset("paper").knn
    assert probe is not None
    assert tuned is not None
    assert neighbours is not None
    assert (probe.epochs, probe.batch_size, probe.base_lrs, probe.momentum) == (100, 512, (0.1,), 0.9)
    assert (probe.warmup_epochs, probe.weight_decays, probe.standardize) == (10, (0.0,), False)
    assert probe.augment is not None
    assert probe.augment.crop_scale == (0.2, 1.0)
    assert (tuned.base_lr, tuned.betas, tuned.weight_decay, tuned.warmup_epochs) == (1e-3, (0.9, 0.99), 0.5, 5)
    assert neighbours.ks == tuple(range(2, 21))
    other, grid = preset("released").finetune, preset("strong").probe
    assert other is not None
    assert grid is not None
    assert other.betas == (0.9, 0.999)
    assert other.weight_decay == 0.05
    assert grid.augment is None
    assert len(grid.grid) > 1
    assert {name: preset(name).name for name in PRESETS} == {name: name for name in PRESETS}


def test_only_keeps_the_named_protocols() -> None:
    assert only(preset("paper"), ["knn"]).probe is None
    assert only(preset("paper"), ["knn"]).finetune is None
    assert only(preset("paper"), ["mlp", "finetune"]).probe.kinds == ("mlp",)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="did you mean 'linear'"):
        only(preset("paper"), ["liner"])
    with pytest.raises(UserError, match="preset"):
        preset("stong")


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"base_lrs": ()}, {"base_lrs": (0.0,)}, {"momentum": 1.0}, {"warmup_epochs": 101}]
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"probe.{next(iter(wrong))}"):
        ProbeProtocol(**wrong)  # type: ignore[arg-type]
