"""The paper's number to set beside a score."""

import pytest

from pmae.config import Config, replace
from pmae.report.published import for_score
from pmae.results import Score

LINEAR = "linear/cls/test"


@pytest.mark.parametrize(
    ("data", "label", "key", "settings", "value"),
    [
        ("cifar10", "pmae epoch 800", LINEAR, {}, 59.0),
        ("CIFAR-10", "pmae epoch 800", "knn/cls/test", {"masking__ratio_schedule": "uniform"}, 41.8),
        ("bloodmnist_64", "pmae epoch 1", "mlp/cls/test", {"objective__target": "pixels"}, 91.0),
        ("dermamnist", "mae epoch 1", "finetune/cls/test", {"space__name": "pixels"}, 80.4),
        ("dermamnist", "mae epoch 1", LINEAR, {"space__name": "pixels", "masking__masked_patches": 0.5}, 73.7),
        ("cifar10", "pmae epoch 800", LINEAR, {"space__name": "kernel_pca"}, 64.1),
        ("cifar10", "pmae epoch 800", LINEAR, {"space__name": "wavelet"}, None),
        ("cifar100", "pmae epoch 800", LINEAR, {}, None),
        ("photos", "pmae epoch 800", LINEAR, {}, None),
        ("cifar10", "raw pixels", "linear/pixels/test", {}, None),
        ("cifar10", "pmae epoch 800", "linear/mean/test", {}, None),
        ("cifar10", "pmae epoch 800", "finetune/cls/test", {"objective__target": "pixels"}, None),
    ],
)
def test_published_numbers_of_the_paper(
    data: str, label: str, key: str, settings: dict[str, object], value: float | None
) -> None:
    protocol, pooling, split = key.split("/")
    method, _, epoch = label.partition(" epoch ")
    score = Score(protocol, pooling, split, 100, {}, method=method, epoch=int(epoch or 0), data=data)
    found = for_score(score, replace(Config(), **settings))
    assert (found[0] if found else None) == value
