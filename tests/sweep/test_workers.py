"""Many runs: in one process they share compiled steps and leave no memory behind; in several, one may be killed."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.commands import forked
from torch._dynamo.testing import CompileCounter

from pmae.cli import main
from pmae.config import Config, EncoderConfig, replace
from pmae.data.augment import Standardize, draw_crops
from pmae.errors import UserError
from pmae.fast.graph import compiled
from pmae.method import build_method
from pmae.runs import Run
from pmae.sweep import workers
from pmae.sweep.execute import InOrder, run_all
from pmae.sweep.find import RunIndex, RunSpec
from pmae.sweep.workers import LocalWorkers, Workers
from pmae.train.loop import Pretraining
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


def test_six_runs_leave_no_trainer_and_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step refers to itself, as a compiled one does."""
    np.save(tmp_path / "images.npy", shaded(40, 16, 2, 0)[0])
    kept: list[weakref.ref[object]] = []
    alive: list[int] = []
    whole, train = Pretraining.__init__, workers.train

    def begin(self: Pretraining, *arguments: object, **named: object) -> None:
        whole(self, *arguments, **named)
        self.stepper.__dict__["measure"] = self.stepper.measure
        kept.extend(weakref.ref(part) for part in (self, self.model, self.stepper, self.optimizer))

    def measured_train(path: Path, config: Config, until: int | None = None) -> int | None:
        gc.disable()  # The collector may come by at any time; that it is called is what counts.
        try:
            stopped = train(path, config, until)
            assert not any(part() for part in kept)
        finally:
            gc.enable()
        alive.append(bytes_alive())
        return stopped

    monkeypatch.setattr(Pretraining, "__init__", begin)
    monkeypatch.setattr(workers, "train", measured_train)
    base = replace(TINY, data__source=str(tmp_path / "images.npy"))
    cells = [(space, ratio) for space in ("pca", "cosine", "wavelet") for ratio in (0.2, 0.4)]
    specs = [RunSpec(f"{s}-{r}", replace(base, space__name=s, masking__masked_variance=r)) for s, r in cells]
    folder = tmp_path / "runs"
    assert len(run_all(InOrder(specs), folder, RunIndex([folder]), Workers())) == 6
    assert len(kept) == 24
    assert alive[-1] <= alive[0]


def measured(config: Config) -> None:
    """One compiled measure of a model of these settings, on noise."""
    batch, model = 4, build_method(config, (3, 16, 16))
    standardize, generator = Standardize(torch.zeros(3, 1, 1), torch.ones(3, 1, 1)), torch.Generator()
    step = Plain(model, standardize, config, build_optimizer(model, config.optim, on_graph=False))
    images = torch.zeros(batch, 3, 16, 16, dtype=torch.uint8)
    crops = draw_crops(batch, generator, torch.device("cpu"))
    compiled(step.measure)(images, crops, model.draw(batch, 0.5, generator))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """What a compiler that changes nothing was given."""
    torch.compiler.reset()
    made = CompileCounter()
    compile_ = torch.compile
    # Options are the usual compiler's.
    monkeypatch.setattr(torch, "compile", lambda call, dynamic, options: compile_(call, dynamic=dynamic, backend=made))
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


SETTINGS = [
    *("encoder.width=16", "encoder.depth=1", "encoder.heads=2", "decoder.width=16", "decoder.depth=1"),
    *("decoder.heads=2", "train.batch_size=16", "train.precision=float32"),
]


def command(*arguments: object) -> list[str]:
    return ["sweep", *map(str, arguments), "--device", "cpu", "--set", *SETTINGS]


def process_of(run: Path) -> int | None:
    """The process that trains a run right now."""
    words = (run / ".lock").read_text().split() if (run / ".lock").exists() else []
    return int(words[0]) if words else None


def until(found: Callable[[], bool], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.02)


def test_runs_at_once_are_those_of_one_after_another(root: Path, tmp_path: Path) -> None:
    for folder, flags in (("turn", []), ("once", ["--at-once", 2])):
        grid = ["ratio", "--data", "dermamnist", "--ratios", 0.1, 0.3, 0.5, "--epochs", 1, "--root", root]
        assert main(command(*grid, "--out", tmp_path / folder, *flags)) == 0
    turn, once = ({path.name: Run(path) for path in (tmp_path / f / "runs").iterdir()} for f in ("turn", "once"))
    assert len(turn) == 3
    assert turn.keys() == once.keys()
    for name, run in turn.items():
        expected = run.results["pretrain"]["held_out_r2"]
        assert once[name].results["pretrain"]["held_out_r2"] == pytest.approx(expected, abs=1e-4)


def test_a_mistake_in_a_worker_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["encoder.patch_size", 3, "--data", "digits", "--epochs", 1, "--out", tmp_path / "out", "--at-once", 1]
    assert main(command(*grid)) == 2
    said = capsys.readouterr().err
    assert "encoder.patch_size must be a divisor" in said
    assert said.count("\n") == 1


def test_a_worker_that_is_killed_is_named_and_its_run_goes_on(root: Path, tmp_path: Path) -> None:
    data = {"data__source": "dermamnist", "data__root": str(root)}
    spec = RunSpec("a", replace(TINY, **data, train__epochs=5000, train__checkpoint_every=1, probe__every=5000))
    path = tmp_path / spec.folder

    def kill() -> None:
        until(lambda: bool(list(path.glob("checkpoints/epoch_*"))) and process_of(path) is not None)
        os.kill(process_of(path) or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with closing(LocalWorkers(1)) as started, pytest.raises(UserError, match=f"the worker of {path} died"):
        run_all(InOrder([spec]), tmp_path, RunIndex([tmp_path]), started)
    killer.join()
    reached = int(Run(path).checkpoints()[-1].name.removeprefix("epoch_"))
    with closing(LocalWorkers(1)) as started:
        assert started.submit(path, spec.config, reached + 3).result() is None
    assert Run(path).results["pretrain"]["epoch"] == reached + 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_runs_save_themselves_when_their_command_is_stopped_or_killed(
    number: signal.Signals, code: int, root: Path, tmp_path: Path
) -> None:
    grid = ["ratio", "--data", "dermamnist", "--root", root, "--ratios", 0.1, 0.4, "--epochs", 9000, "--out", tmp_path]
    process = forked([*command(*grid, "--at-once", 2), "train.checkpoint_every=9000"])
    try:
        until(lambda: len(list(tmp_path.glob("runs/*/metrics.jsonl"))) == 2 or not process.is_alive())
        os.kill(process.pid or 0, number)
        process.join(120)
        assert process.exitcode == code
    finally:
        process.kill()
    runs = [Run(path) for path in (tmp_path / "runs").iterdir()]
    until(lambda: [process_of(run.path) for run in runs] == [None, None])
    assert [len(run.checkpoints()) for run in runs] == [1, 1]


@pytest.mark.parametrize(
    ("flags", "said"), [(["--at-once", "0"], "at least 1"), (["--at-once", "2", "--ray", "local"], "without --ray")]
)
def test_a_wrong_number_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "ratio", "--ratios", "0.1", "--data", "digits", *flags]) == 2
    assert said in capsys.readouterr().err
