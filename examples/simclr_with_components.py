"""SimCLR, from lightly, with masked components instead of random crops as its views of an image.

    pip install lightly
    python examples/simclr_with_components.py --steps 100

A small convolutional network learns from crops of photographs that ship with scikit-image; its features are scored by
k-NN before and after: which photograph is a crop of the held-out part from? `--views crops` has the usual crops.
"""

import argparse
from collections.abc import Callable

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import Tensor, nn

from pmae import ComponentMask
from pmae.config import AugmentConfig
from pmae.data.augment import crop, draw_boxes
from pmae.data.images import ImageSet
from pmae.data.named import load_photos
from pmae.evaluate.probes import probe_accuracies

WIDTH = 128


def network() -> nn.Sequential:
    """Three strided convolutions and the mean over what they leave: (B, 3, 32, 32) to (B, 128)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, WIDTH)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def augmentation(views: str, images: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a view of each of a batch of images in [0, 1]: hidden components or a crop, then perhaps a flip."""
    mask = ComponentMask.fit(images, masked_variance=(0.1, 0.9)) if views == "components" else nn.Identity()
    config = AugmentConfig(crop=views == "crops")

    def view(batch: Tensor) -> Tensor:
        height, width = batch.shape[-2:]
        boxes = draw_boxes(len(batch), height, width, config, torch.default_generator, batch.device)
        return crop(mask(batch), boxes)

    return view


def train(backbone: nn.Module, images: Tensor, views: str, steps: int, batch: int) -> float:
    """Pull two views of an image together and those of different images apart; the last loss."""
    augment, head = augmentation(views, images), SimCLRProjectionHead(WIDTH, WIDTH, 64)
    criterion, loss = NTXentLoss(temperature=0.2), torch.zeros(())
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=2e-3)
    backbone.train()
    for step in range(steps):
        chosen = images[torch.randperm(len(images))[:batch]]
        first, second = (head(backbone(augment(chosen))) for _ in range(2))
        loss = criterion(first, second)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:4d}   loss {float(loss.detach()):.3f}", flush=True)
    return float(loss.detach())


@torch.no_grad()
def score(backbone: nn.Module, train_part: ImageSet, test_part: ImageSet) -> dict[str, float]:
    """Test accuracy of k-NN and of a linear classifier on the features of plain images."""
    backbone.eval()
    parts = [(backbone(_in_unit_range(part)), torch.as_tensor(part.labels)) for part in (train_part, test_part)]
    return probe_accuracies(*parts[0], *parts[1])


def _in_unit_range(part: ImageSet) -> Tensor:
    return torch.from_numpy(part.images).float() / 255


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and print the scores before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", choices=("components", "crops"), default="components")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    photos, backbone = load_photos(), network()
    if photos.test is None:
        raise SystemExit("the photographs have no held-out part")
    before = score(backbone, photos.train, photos.test)
    loss = train(backbone, _in_unit_range(photos.train), options.views, options.steps, options.batch)
    after = score(backbone, photos.train, photos.test)
    print(f"k-NN {100 * before['knn']:.1f}% -> {100 * after['knn']:.1f}%", end="   ")
    print(f"linear {100 * before['linear']:.1f}% -> {100 * after['linear']:.1f}%")
    return {"loss": loss, "knn": after["knn"]}


if __name__ == "__main__":
    main()
