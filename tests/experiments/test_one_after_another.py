"""Many runs in one process: they share compiled steps, and each leaves the memory as it found it."""

import functools
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from pmae.config import Config, EncoderConfig, replace
from pmae.data.augment import Standardize, draw_crops
from pmae.fast.graph import compiled
from pmae.method import build_method, draw_mask
from pmae.sweep.jobs import Here, InTurn, Job, Library, carry_out
from pmae.train.loop import Trainer
from pmae.train.step import Plain, build_optimizer

from .conftest import shaded

TINY = replace(
    Config(encoder=EncoderConfig(patch_size=8, width=16, depth=1, heads=2)),
    decoder__name="small",
    decoder__width=16,
    decoder__depth=1,
    decoder__heads=2,
    train__batch_size=16,
    train__device="cpu",
    train__epochs=1,
)


def bytes_alive() -> int:
    gc.collect()
    # By exact type: a compiler of another test may have left tensors without storage.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_six_jobs_leave_no_trainer_and_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step refers to itself, as a compiled one does."""
    np.save(tmp_path / "images.npy", shaded(40, 16, 2, 0)[0])
    kept: list[weakref.ref[object]] = []
    alive: list[int] = []
    whole, train = Trainer.__init__, Here.wait

    def begin(self: Trainer, *arguments: object, **named: object) -> None:
        whole(self, *arguments, **named)
        self.stepper.__dict__["measure"] = self.stepper.measure
        kept.extend(weakref.ref(part) for part in (self, self.model, self.stepper, self.optimizer))

    def wait(self: Here) -> Path:
        gc.disable()  # The collector may come by at any time; that it is called is what counts.
        try:
            path = train(self)
            assert not any(part() for part in kept)
        finally:
            gc.enable()
        alive.append(bytes_alive())
        return path

    monkeypatch.setattr(Trainer, "__init__", begin)
    monkeypatch.setattr(Here, "wait", wait)
    base = replace(TINY, data__source=str(tmp_path / "images.npy"))
    cells = [(space, ratio) for space in ("pca", "cosine", "wavelet") for ratio in (0.2, 0.4)]
    jobs = [Job(f"{s}-{r}", replace(base, space__name=s, masking__masked_variance=r)) for s, r in cells]
    folder = tmp_path / "runs"
    assert len(carry_out(InTurn(jobs), folder, Library([folder]), Here())) == 6
    assert len(kept) == 24
    assert alive[-1] <= alive[0]


def measured(config: Config) -> None:
    """One compiled measure of a model of these settings, on noise."""
    batch, model = 4, build_method(config, (3, 16, 16))
    standardize, generator = Standardize(torch.zeros(3, 1, 1), torch.ones(3, 1, 1)), torch.Generator()
    step = Plain(model, standardize, config, build_optimizer(model, config.optim, on_graph=False))
    images = torch.zeros(batch, 3, 16, 16, dtype=torch.uint8)
    crops = draw_crops(batch, generator, torch.device("cpu"))
    compiled(step.measure)(images, crops, draw_mask(model, batch, 0.5, generator))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """What a compiler that changes nothing was given."""
    torch.compiler.reset()
    made = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=made))
    with torch._dynamo.config.patch(recompile_limit=8):
        yield made
    torch.compiler.reset()


def test_runs_of_other_ratios_and_seeds_share_a_compiled_step(counter: CompileCounter) -> None:
    for ratio in (0.1, 0.2, 0.4):
        measured(replace(TINY, masking__masked_variance=ratio))
    assert counter.frame_count == 1
    measured(replace(TINY, space__name="cosine"))
    assert counter.frame_count == 2


def test_more_versions_of_a_step_than_torch_allows_are_all_compiled(counter: CompileCounter) -> None:
    for batch in range(2, 12):
        assert compiled(torch.square)(torch.ones(batch)).sum() == batch
    assert counter.frame_count == 10


def test_the_ratio_of_a_model_is_that_of_its_settings() -> None:
    config = replace(TINY, masking__ratio_schedule="uniform", masking__ratio_range=(0.2, 0.6))
    assert float(build_method(config, (3, 16, 16)).ratio) == pytest.approx(0.4)
    assert "ratio" not in build_method(config, (3, 16, 16)).state_dict()
