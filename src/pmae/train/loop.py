"""Pretraining from top to bottom: fit, step, log, save."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from pmae.config import Config, replace
from pmae.data.augment import build_augmentations
from pmae.data.batches import Batches
from pmae.data.crops import Crops, plan_crops
from pmae.data.images import Splits
from pmae.errors import Interrupted, UserError, require
from pmae.files import folder_path
from pmae.models.weights import Pretrained
from pmae.plugins import command_line, plugin_errors
from pmae.runs import FIRST, Run
from pmae.system import lacks_float64
from pmae.train import checkpoint, distributed, setup
from pmae.train.callbacks import Callbacks
from pmae.train.distributed import ONE_PROCESS, World
from pmae.train.engines import Compiled, FastEngine, Graph
from pmae.train.environment import BY_CALLBACK, StopSignal, kept_precision, pick_engine, same_bits, stop_signals
from pmae.train.journal import Journal, say
from pmae.train.monitor import OnlineProbe, hidden_r2, not_finite, picture_of, save_samples
from pmae.train.opening import Opened, opened
from pmae.train.schedule import rate_of_step
from pmae.train.stages import operations, train_first
from pmae.train.step import Draws, Inputs, Plain, build_optimizer
from pmae.train.trackers import open_tracker


@kept_precision()
def pretrain(
    config: Config,
    splits: Splits,
    out: Path | str,
    resume: bool = False,
    quiet: bool = False,
    online_probe: OnlineProbe | None = None,
    until: int | None = None,
    on_checkpoint: Callable[[], None] = lambda: None,
    fitted: Path | None = None,
) -> Run:
    """Train a resolved configuration into a run folder to its last epoch, or `until` an earlier one.

    Statistics and space are those that the run in the folder `fitted` has of the same images, if there is one.
    """
    out, weights = folder_path(out), config.encoder.weights
    if config.encoder.first_patch_size:

        def rehearse() -> None:
            with alone(config, splits, out, quiet, fitted) as training:
                training.rehearse()

        def train(first: Config, folder: Path, again: bool) -> None:
            if not quiet and distributed.is_main():
                say(f"patches of {first.encoder.patch_size} come first, {first.train.epochs} epochs in {folder}")
            pretrain(first, splits, folder, again, quiet, online_probe, None, on_checkpoint, fitted=out)

        train_first(config, out, resume, rehearse, train)
        resume, weights, fitted = True, str(out / FIRST), out / FIRST
    with (
        opened(config, splits, out, weights, resume, quiet, fitted) as begun,
        ready(config, splits, begun, on_checkpoint) as training,
        stop_signals() as stop,
    ):
        training.fit(stop, quiet or not begun.world.main, online_probe, until)
    return begun.run


@contextmanager
def alone(
    config: Config, splits: Splits, out: Path, quiet: bool, fitted: Path | None = None
) -> Iterator["Pretraining"]:
    """A new run ready for its first step, its space fitted, without weights and callbacks that it may begin with."""
    plain = replace(config, train__callbacks=())
    begin = opened(config, splits, out, None, False, quiet, fitted)
    with kept_precision(), begin as begun, ready(plain, splits, begun) as training:
        yield training


@contextmanager
def ready(
    config: Config, splits: Splits, begun: Opened, on_checkpoint: Callable[[], None] = lambda: None
) -> Iterator["Pretraining"]:
    """A run ready for its next step; inside, errors of plug-ins are sentences."""
    with same_bits(config.train.deterministic), plugin_errors(config, lambda: "before the first step"):
        training = Pretraining(config, splits, *begun, on_checkpoint)
    with plugin_errors(config, lambda: f"after step {training.step}; the last checkpoint is intact"):
        yield training


class Pretraining:
    """A run in progress: the data on its device, the model, its optimizer and the step that joins them."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        run: Run,
        device: torch.device,
        pretrained: Pretrained | None = None,
        world: World = ONE_PROCESS,
        require_folder: Callable[[], None] = lambda: None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.run, self.device, self.world = config, run, device, world
        self._require_folder, self._on_checkpoint = require_folder, on_checkpoint
        train, optim, shape = config.train, config.optim, splits.train.shape
        settled = (train.epochs, train.batch_size, train.log_every, train.checkpoint_every, config.probe.every)
        if None in (*settled, optim.base_lr):
            raise UserError("config must be resolved against the data (pmae.derive.resolve) before training")
        self.epochs, self.batch_size, self.log_every, self.checkpoint_every, self.probe_every = map(int, settled)  # type: ignore[arg-type]
        self.peak_lr = (optim.base_lr or 0.0) * self.batch_size / 256
        self.batches = Batches(splits.train.images, device, config.data.keep_on)
        plan = plan_crops(splits.train, config, device)
        crops = Crops(plan, shape[1:], config.augment, device) if plan else None
        # Where the model is looked at: fits, R2 and probes need float64.
        self.looks = torch.device("cpu") if lacks_float64(device) else device
        self.held_out = splits.test or splits.val
        self.standardize, space = setup.fit_or_load(config, run, self.batches, shape, world)
        self.model = setup.build_model(config, space, pretrained, device, world)
        setup.match_pixels(self.model, self.standardize, splits.train.images.dtype.name)
        self.metrics: dict[str, float] = {}
        augmentations = build_augmentations(config.augment, self.standardize, splits.train.images.dtype.name)
        self.draws = Draws(config, self.model, self.batches, crops, augmentations, world)
        self.steps = self.draws.steps
        self.callbacks = Callbacks(train.callbacks)
        if train.callbacks:
            self.callbacks.start(self)
            self.model.to("cpu" if train.shard else device)
        pixels = self.epochs * self.steps * self.batch_size * self.draws.views * math.prod(shape[1:])
        self.engine = pick_engine(train, device, pixels / world.size)
        self.next_compiles = captured = self.engine != "plain"
        self.optimizer = build_optimizer(self.model, config.optim, on_graph=captured)
        self.step = checkpoint.restore(run, self.model, self.optimizer)
        world.require_same(self.model.state_dict() | checkpoint.optimizer_tensors(self.model, self.optimizer))
        if train.shard:
            distributed.shard(self.model, self.optimizer, world)
        given = (self.model, self.standardize, config, self.optimizer, world, augmentations)
        self.stepper: Plain | FastEngine
        if captured:
            fastest = Compiled if self.engine == "compiled" else Graph
            self.stepper = FastEngine(lambda kind: kind(*given), fastest, train.engine != "auto")
        else:
            self.stepper = Plain(*given)

    def rehearse(self) -> None:
        """Take a step that nobody keeps, which tells whether there is memory for it."""
        self.model.train()
        inputs = self.inputs(0, 0, next(self.draws.images(0, 0)))
        with same_bits(self.config.train.deterministic):
            self.stepper.rehearse(inputs) if isinstance(self.stepper, FastEngine) else self.stepper(inputs)

    def fit(self, stop: StopSignal, quiet: bool, online_probe: OnlineProbe | None, until: int | None = None) -> None:
        """Train to the last epoch, or `until` an earlier one; on a signal, save and raise `Interrupted`."""
        self._last, self._stop, self._online_probe = min(until or self.epochs, self.epochs), stop, online_probe
        journal: AbstractContextManager[Journal | None] = nullcontext()
        if self.world.main:  # of several processes the first one writes
            tracker = open_tracker(self.config, self.run.path, self.step)
            journal = Journal(self.run.path / "metrics.jsonl", self.epochs, self.steps, self.step, quiet, tracker)
        with journal as self._journal:
            # A run that was stopped right after an epoch was not looked at yet: that comes first.
            self._monitor()
            if self._journal and self.next_compiles and self.step < self._last * self.steps:
                cost = "the training step, about 25 s" if self.engine == "compiled" else "kernels,"
                self._journal.note(f"compiling {cost} where nothing is cached")
            while self.step < self._last * self.steps:
                with same_bits(self.config.train.deterministic):
                    self._epoch()
                self._monitor()
                if self.config.train.callbacks and self._halts_after_epoch():
                    break
        self.callbacks("on_end", self)

    def stop(self, reason: str) -> None:
        """For callbacks: save a checkpoint after this step (in several processes, the next one logged) and end."""
        if self._stop.number != BY_CALLBACK:
            self._stop.number, self._stop.reason = BY_CALLBACK, reason

    def _halts_after_epoch(self) -> bool:
        """Call `on_epoch`; whether a callback of any process, now or during the epoch, told the run to end."""
        if self._stop.number != BY_CALLBACK:
            self.callbacks("on_epoch", self)
            self._stop.number = max(self.world.all_gather(self._stop.number))
            if self._stop.number == BY_CALLBACK and self.step < self._last * self.steps:
                self._save()
                self._monitor()
        if self._stop.number == BY_CALLBACK and self._journal:
            self._journal.note(f"stopped by a callback at step {self.step}: {self._stop.reason}")
        return self._stop.number == BY_CALLBACK

    def _epoch(self) -> None:
        """The rest of the current epoch, from whatever step it is at."""
        epoch, first = divmod(self.step, self.steps)
        self._unread_from = self.step
        self._start_clock()
        self.model.train()
        for position, images in enumerate(self.draws.images(epoch, first), first):
            lr = self.peak_lr * rate_of_step(self.config.optim, self.step, self.steps, self.epochs)
            self.stepper(self.inputs(epoch, position, images, lr))
            self.step += 1
            if self.config.train.callbacks:
                self.callbacks("on_step", self)
            # Several processes agree to stop when they log: asking at every step would make them wait for each other.
            stopped = self._stop.number if self.world.size == 1 else 0
            if self.step % self.log_every == 0 or position == self.steps - 1 or stopped:
                stopped = self._log(lr)
            elif self.next_compiles:
                # The step that compiled says nothing about the speed of those after it.
                torch.cuda.synchronize(self.device)
                self.next_compiles = False
                self._start_clock()
            if stopped:
                self._save()
                if stopped == BY_CALLBACK:
                    self._stop.number = stopped
                    return
                again = command_line("pretrain", "--out", self.run.path, "--resume")
                raise Interrupted(f"continue with: {again}", stopped)
        if (epoch + 1) % self.checkpoint_every == 0 or epoch + 1 == self._last:
            self._save()

    def inputs(self, epoch: int, position: int, images: Tensor, lr: float = 0.0) -> Inputs:
        """All that a step consumes, given its images."""
        return self.draws.inputs(epoch, position, images, lr)

    def _start_clock(self) -> None:
        self._timed_from, self._began = self.step, time.monotonic()

    def _log(self, lr: float) -> int:
        """Write and show the means of the unread steps; returns the signal that stopped any process, or 0."""
        values, bad = self.stepper.tally.read(self.world)
        if not self.config.masking.enabled:  # as in SimCLR
            values = {"loss": values["loss"]}
        stopped = max(self.world.all_gather(self._stop.number))
        if bad >= 0:
            step = self._unread_from + bad
            raise not_finite(self.run, self.model, self.standardize, step, step // self.steps, *self.draws.whole(step))
        self._require_folder()
        speed = (self.step - self._timed_from) * self.batch_size / max(time.monotonic() - self._began, 1e-9)
        line = {"epoch": self.step / self.steps, "step": self.step, **values, "lr": lr, "images_per_second": speed}
        self.metrics |= line
        if self._journal:
            self._journal.write(**line)
            predicts = self.config.objective.reconstruction_weight > 0
            self._journal.show(line if predicts else {**line, "r2": None}, self.step)
        self._unread_from = self.step
        self._start_clock()
        return stopped

    def _save(self) -> None:
        epoch, position = divmod(self.step, self.steps)
        name = f"epoch_{epoch:04d}" + (f"_step_{position:06d}" if position else "")
        state, files = {"epoch": epoch, "step": self.step}, checkpoint.contents(self.model, self.optimizer)
        if self.config.train.shard:
            files = {file: distributed.gathered(tensors, self.world) for file, tensors in files.items()}
        with self.world.all_agree():
            if self.world.main:
                self._require_folder()
                checkpoint.save(self.run, files, name, state, self.config.train.keep)
                self._on_checkpoint()

    def _monitor(self) -> None:
        """R2 on held-out images and the scores of the online probe, where due and not there yet."""
        epoch, position = divmod(self.step, self.steps)
        # What given weights were worth before training is told too.
        due = epoch == self._last or epoch % self.probe_every == 0 if epoch else self.config.encoder.weights is not None
        if (position or not due) and self._stop.number != BY_CALLBACK:
            return
        # All processes are needed to put a divided model together for the first one to look at.
        model = distributed.put_together(self.model, self.world) if self.config.train.shard else self.model
        if not self._journal or any(line["step"] == self.step and "loss" not in line for line in self.run.metrics()):
            return
        model = (model if self.looks == self.device else deepcopy(model).to(self.looks)).eval()
        standardize = deepcopy(self.standardize).to(self.looks)
        held_out = self.batches.on(self.looks) if self.held_out is None else Batches(self.held_out.images, self.looks)
        looked_at = (standardize, held_out, self.config.train.seed)
        hides, name = self.config.masking.enabled, "train_r2" if self.held_out is None else "held_out_r2"
        values = hidden_r2(model, *looked_at, name) if hides else {}
        # Weights may be finite and what they make of images not: no file could hold that.
        rule = f"finite after step {self.step}: a lower optim.base_lr or an optim.clip_norm may help"
        require(all(map(math.isfinite, values.values())), "R2", rule, "NaN or infinity")
        if self._online_probe:
            values |= self._online_probe(model.encoder, standardize, self.looks)
        self._require_folder()
        save_samples(self.run, model, *looked_at, epoch)
        spent = operations(self.config, self.run.environment["data"], epoch)
        told = {} if spent is None else {"operations": spent}
        self.run.add_results(pretrain={"epoch": epoch, **values, **self.model.space.measured(), **told})
        # Last, because it says that this epoch was measured: a run killed before it does so again.
        self.metrics |= values
        self._journal.write(epoch=self.step / self.steps, step=self.step, **values)
        if hides and self.config.train.track != "none":
            self._journal.picture(self.step, "reconstructions", picture_of(self.run))
