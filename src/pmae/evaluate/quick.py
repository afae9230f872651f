"""Two scores in a second, for use while pretraining: logistic regression and k-NN on features at hand."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pmae.evaluate.neighbours import nearest, votes

NEIGHBOURS = 20


def quick_scores(
    train_features: Tensor, train_labels: Tensor, test_features: Tensor, test_labels: Tensor
) -> dict[str, float]:
    """Test accuracy of a linear classifier and of 20 nearest neighbours (cosine)."""
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    mean, std = train_features.mean(0), train_features.std(0, correction=0)
    std = torch.where(std > 1e-6 * (std.max() + mean.abs()), std, torch.ones_like(std))
    weights = logistic_regression((train_features - mean) / std, train_labels, classes)
    linear = ((test_features - mean) / std) @ weights[:-1] + weights[-1]
    k = min(NEIGHBOURS, len(train_features))
    found = votes(train_labels[nearest(train_features, test_features, k)], classes, (k,))[k]
    return {"linear": _accuracy(linear, test_labels), "knn": _accuracy(found, test_labels)}


def logistic_regression(x: Tensor, labels: Tensor, classes: int, penalty: float = 1.0, steps: int = 100) -> Tensor:
    """(W + 1, C) weights, biases last, that minimize the summed cross-entropy + penalty / 2 x |weights|^2 (L-BFGS)."""
    weights = x.new_zeros(x.shape[1] + 1, classes).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        fit = F.cross_entropy(x @ weights[:-1] + weights[-1], labels)
        loss = fit + penalty / (2 * len(x)) * weights[:-1].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return weights.detach()


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).float().mean())
