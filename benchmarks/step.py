"""Training steps against transformers' ViTMAE in a standard loop with a torchvision loader, in one run.

    python benchmarks/step.py [--side 32] [--batch 512] [--steps 100] [--workers 8]

Same encoder and decoder (ViT-T/8 with 12 heads; 512 wide, 8 deep), same crops and flips, AdamW. The peer is what the
released code trains with: float32 by default, bfloat16 autocast with --peer-bfloat16. Needs transformers.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from pmae.config import Config, replace
from pmae.data.images import ImageSet, Splits
from pmae.derive import resolve
from pmae.experiments.recipes import recipe
from pmae.train.environment import pick_device
from pmae.train.loop import Trainer, create_run


def ours(space: str, engine: str, images: np.ndarray, batch: int, device: torch.device) -> Callable[[int], None]:
    """A function that takes so many steps of our training."""
    base: Config = recipe("paper" if space == "pca" else "mae")
    changed = replace(
        base, masking__per="image", objective__scale="constant", decoder__name="released", train__batch_size=batch,
        train__engine=engine, train__device=str(device),
    )  # fmt: skip
    config, _ = resolve(changed, len(images), images.shape[1:])
    splits = Splits("noise", ImageSet(images))
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(config, splits, create_run(folder / "run", config, {}), device)

    order = trainer._order(0)

    def steps(count: int) -> None:
        for number in range(count):
            epoch, position = divmod(number, trainer.steps)
            trainer.stepper(trainer.inputs(epoch, position, order, 3e-4))

    return steps


class Pictures(Dataset[torch.Tensor]):
    """What a torchvision user writes: one image at a time, augmented on a worker."""

    def __init__(self, images: np.ndarray) -> None:
        side = images.shape[-1]
        self.images = torch.from_numpy(images)
        self.augment = v2.Compose(
            [
                v2.RandomResizedCrop(side, scale=(0.2, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        augmented: torch.Tensor = self.augment(self.images[index])
        return augmented


def peer(images: np.ndarray, batch: int, workers: int, half: bool, device: torch.device) -> Callable[[int], None]:
    """The same for transformers' ViTMAE."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 768}
    decoder = {"decoder_hidden_size": 512, "decoder_num_hidden_layers": 8, "decoder_num_attention_heads": 16}
    config = ViTMAEConfig(**sizes, **decoder, image_size=images.shape[-1], patch_size=8, norm_pix_loss=True)
    model = ViTMAEForPreTraining(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, betas=(0.9, 0.95))
    loader = DataLoader(
        Pictures(images), batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )  # fmt: skip

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    stream = endless()

    def steps(count: int) -> None:
        for _ in range(count):
            x = next(stream).to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = model(pixel_values=x).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return steps


def timed(steps: Callable[[int], None], count: int, device: torch.device) -> float:
    """Seconds a step, after a warm-up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    steps(max(2, count // 10))
    wait()
    began = time.perf_counter()
    steps(count)
    wait()
    return (time.perf_counter() - began) / count


def main() -> None:
    """Print one table."""
    device = pick_device("auto")
    cuda = device.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512 if cuda else 64)
    parser.add_argument("--steps", type=int, default=100 if cuda else 6)
    parser.add_argument("--workers", type=int, default=8 if cuda else 0)
    parser.add_argument("--peer-bfloat16", action="store_true")
    options = parser.parse_args()
    shape = (8 * options.batch, 3, options.side, options.side)
    images = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
    candidates: dict[str, Callable[[], Callable[[int], None]]] = {
        "transformers ViTMAE": partial(peer, images, options.batch, options.workers, options.peer_bfloat16, device)
    }
    for space, name in (("pixels", "MAE 0.75"), ("pca", "PMAE 0.2")):
        for engine in ("plain", "graph") if cuda else ("plain",):
            candidates[f"pmae {name}, {engine}"] = partial(ours, space, engine, images, options.batch, device)
    print(f"{device}, {options.side}x{options.side}, batch {options.batch}")
    print(f"{'':<26} {'ms/step':>9} {'images/s':>10} {'of the peer':>12}")
    reference = 0.0
    for name, build in candidates.items():
        seconds = timed(build(), options.steps, device)
        reference = reference or seconds
        print(
            f"{name:<26} {1e3 * seconds:>9.1f} {options.batch / seconds:>10,.0f} {reference / seconds:>12.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
