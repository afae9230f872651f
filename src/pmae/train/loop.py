"""Pretraining from top to bottom: fit, step, log, save."""

import random
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pmae import masking
from pmae.config import Config
from pmae.data.augment import Boxes, Standardize, draw_boxes
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.data.images import Splits
from pmae.errors import Interrupted, UserError
from pmae.method import MaskedAutoencoder, build_method, draw_mask
from pmae.models import Encoder
from pmae.runs import Run, write_whole
from pmae.spaces import Space, build_space
from pmae.spaces.together import Together
from pmae.train import checkpoint
from pmae.train.distributed import ALONE, World, joined, placed, require_divisible, restarted
from pmae.train.environment import pick_device, pick_engine, pick_precision
from pmae.train.journal import Journal
from pmae.train.memory import memory_errors
from pmae.train.opening import opened
from pmae.train.samples import save_samples
from pmae.train.schedule import rate
from pmae.train.signals import hidden_r2
from pmae.train.start import Start, load_start
from pmae.train.step import Graph, Inputs, Plain, build_optimizer
from pmae.train.tracking import open_tracker, require_tracker

Watch = Callable[[Encoder, Standardize, torch.device], dict[str, float]]


def pretrain(
    config: Config,
    splits: Splits,
    out: Path | str,
    resume: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
) -> Run:
    """Train a resolved configuration on a data set into a run folder; `watch` scores the encoder now and then.

    In processes that `torchrun` started, all of them train one run, and the first one writes it.
    """
    device, out = placed(pick_device(config.train.device)), Path(out)
    pick_engine(config.train.engine, device)
    require_tracker(config.train.track)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    with torch.device("meta"):
        # A dry build without memory: what does not fit the data is refused before anything is written.
        model = build_method(config, splits.train.shape)
    with joined(device) as world:
        require_divisible(config, config.train.batch_size or 1, model, world.size)
        # As the first process sees it: a moment later the folder may be there.
        resume = bool(world.gather(resume or restarted(out))[0])
        start, quiet = _start(config, model.encoder, out, resume), quiet or not world.main
        if start and not quiet:
            print(f"encoder.weights: {'; '.join(start.notes)}", flush=True)
        with opened(config, splits, out, resume, device, start, world) as run:
            trainer = Trainer(config, splits, run, device, start, world)
            with memory_errors(trainer.batch_size, device):
                trainer.fit(quiet, watch)
    return run


class Trainer:
    """A run in progress: the data on its device, the model, its optimizer and the step that joins them."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        run: Run,
        device: torch.device,
        start: Start | None = None,
        world: World = ALONE,
    ) -> None:
        self.config, self.run, self.device, self.world = config, run, device, world
        train = config.train
        settled = (train.epochs, train.batch_size, train.log_every, train.checkpoint_every, config.probe.every)
        if None in settled:
            raise UserError("config must be resolved against the data (pmae.derive.resolve) before training")
        self.epochs, self.batch_size, self.log_every, self.checkpoint_every, self.probe_every = map(int, settled)  # type: ignore[arg-type]
        self.batches = Batches(splits.train.images, device, config.data.keep_on)
        self.held_out = splits.test or splits.val
        self.shape, self.steps = splits.train.shape, len(splits.train) // self.batch_size
        self.standardize, space = _fitted(config, run, self.batches, self.shape, world)
        self.model = _seeded_model(config, self.shape, space, start).to(device)
        self.model.precision = pick_precision(train.precision, device)
        graph = pick_engine(train.engine, device) == "graph"
        self.optimizer = build_optimizer(self.model, config.optim, on_graph=graph)
        self.step = checkpoint.restore(run, self.model, self.optimizer)
        world.require_same(self.model, self.optimizer)
        self.stepper = (Graph if graph else Plain)(self.model, self.standardize, config, self.optimizer, world)
        self._stopped_by = 0

    def fit(self, quiet: bool, watch: Watch | None) -> None:
        """Train to the last epoch; on a signal, save and raise `Interrupted`."""
        handlers = (
            {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)} if _main_thread() else {}
        )
        try:
            with self._journal(quiet) as journal:
                # A run that was stopped right after an epoch owes its signals: they come first.
                self._signals(journal, watch)
                while self.step < self.epochs * self.steps:
                    self._epoch(journal)
                    self._signals(journal, watch)
            self._finish()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _journal(self, quiet: bool) -> AbstractContextManager[Journal | None]:
        """Of several processes the first one writes."""
        if not self.world.main:
            return nullcontext()
        tracker = open_tracker(self.config, self.run.path, self.step)
        return Journal(self.run.path / "metrics.jsonl", self.epochs, self.steps, self.step, quiet, tracker)

    def _epoch(self, journal: Journal | None) -> None:
        """The rest of the current epoch, from whatever step it is at."""
        epoch = self.step // self.steps
        order = self._order(epoch)
        self.model.train()
        began, since = time.monotonic(), 0
        for position in range(self.step % self.steps, self.steps):
            lr = self._rate(epoch, position)
            self.stepper(self.inputs(epoch, position, order, lr))
            self.step, since = self.step + 1, since + 1
            # Several processes agree to stop when they log: asking at every step would make them wait for each other.
            stop = self._stopped_by if self.world.size == 1 else 0
            if self.step % self.log_every == 0 or position == self.steps - 1 or stop:
                values, bad = self.stepper.tally.read(self.world)
                stop = max(self.world.gather(self._stopped_by))
                if bad >= 0:
                    self._stop_on_bad(self.step - since + bad)
                now = time.monotonic()
                speed, began = since * self.batch_size / max(now - began, 1e-9), now
                line = {
                    "epoch": self.step / self.steps,
                    "step": self.step,
                    **values,
                    "lr": lr,
                    "images_per_second": speed,
                }
                if journal:
                    journal.write(**line)
                    journal.show(line, self.step)
                since = 0
            if stop:
                self._save()
                raise Interrupted(self.run.path, stop)
        if (epoch + 1) % self.checkpoint_every == 0 or epoch + 1 == self.epochs:
            self._save()

    def inputs(self, epoch: int, position: int, order: Tensor, lr: float = 0.0, whole: bool = False) -> Inputs:
        """Everything step `position` of an epoch consumes: a function of the seed, the epoch and the position alone.

        Every process draws for the whole batch and takes its rows, so that how many there are does not matter.
        """
        number = stream(self.config.train.seed, epoch, position)
        generator = torch.Generator(self.device).manual_seed(number)
        index = order[position * self.batch_size : (position + 1) * self.batch_size]
        _, height, width = self.shape
        boxes = draw_boxes(len(index), height, width, self.config.augment, generator, self.device)
        ratio = masking.draw_ratio(self.config.masking, random.Random(number))
        draw = draw_mask(self.model, len(index), ratio, generator)
        rows = slice(None) if whole else self.world.rows(len(index))
        draw = draw if len(draw.noise) == 1 else draw._replace(noise=draw.noise[rows])
        return Inputs(self.batches.take(index[rows]), Boxes(*(each[rows] for each in boxes)), draw, lr)

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(stream(self.config.train.seed, epoch, -1))
        return torch.randperm(len(self.batches), generator=generator, device=self.device)

    def _rate(self, epoch: int, position: int) -> float:
        optim, at = self.config.optim, epoch + (position + 1) / self.steps
        # The released schedule steps once an epoch, so it is asked for the epoch that is running.
        at = epoch if optim.schedule == "released" else at
        peak = optim.base_lr * self.batch_size / 256
        warmup = optim.warmup_epochs if optim.warmup_steps is None else optim.warmup_steps / self.steps
        return peak * rate(optim.schedule, at, self.epochs, warmup or 0.0)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stopped_by = number

    def _save(self) -> None:
        epoch, position = divmod(self.step, self.steps)
        name = f"epoch_{epoch:04d}" + (f"_step_{position:06d}" if position else "")
        state = {"epoch": epoch, "step": self.step}
        with self.world.agreed():
            if self.world.main:
                checkpoint.save(self.run, self.model, self.optimizer, name, state, self.config.train.keep)

    def _signals(self, journal: Journal | None, watch: Watch | None) -> None:
        """Label-free signals on held-out images, and whatever `watch` measures, if due and not there yet."""
        epoch, position = divmod(self.step, self.steps)
        due = position == 0 and epoch > 0 and (epoch == self.epochs or epoch % self.probe_every == 0)
        if not journal or not due:
            return
        if any(line["step"] == self.step and "held_out_r2" in line for line in self.run.metrics()):
            return
        self.model.eval()
        values = hidden_r2(self.model, self.standardize, self._held_out_batches(), self.config.train.seed)
        if watch:
            values |= watch(self.model.encoder, self.standardize, self.device)
        self.run.add_results(pretrain={"epoch": epoch, **values, **self.model.space.measured()})
        # Last, because it says that this epoch's signals are there: a run killed before it measures them again.
        journal.write(epoch=float(epoch), step=self.step, **values)

    def _held_out_batches(self) -> Batches:
        return self.batches if self.held_out is None else Batches(self.held_out.images, self.device)

    def _finish(self) -> None:
        if not self.world.main:
            return
        self.model.eval()
        save_samples(self.run, self.model, self.standardize, self._held_out_batches(), self.config.train.seed)

    def _stop_on_bad(self, step: int) -> None:
        """Repeat the draw of the first non-finite step, which its number determines, and save it for inspection."""
        epoch, position = divmod(step, self.steps)
        order = self._order(epoch)
        inputs = self.inputs(epoch, position, order, whole=True)
        index = order[position * self.batch_size : (position + 1) * self.batch_size]
        images = self.standardize(inputs.images)
        finite = images.flatten(1).isfinite().all(1)
        tensors = {"images": inputs.images, "index": index, "noise": inputs.draw.noise, "ratio": inputs.draw.ratio}
        tensors |= {"hidden": self.model.hidden(inputs.draw), "finite_images": finite}
        path = self.run.path / f"failure_step_{step:08d}.safetensors"
        if self.world.main:
            kept = {name: value.contiguous().cpu() for name, value in tensors.items()}
            write_whole(path, lambda temporary: save_file(kept, temporary))
        cause = f"{int((~finite).sum())} of its images are not finite" if not finite.all() else "its images are finite"
        raise UserError(
            f"loss must be finite, got NaN or infinity at step {step} (epoch {epoch}); {cause}; batch and mask are in "
            f"{str(path)!r}; the last checkpoint is intact; a lower optim.base_lr or an optim.clip_norm may help"
        )


def stream(seed: int, epoch: int, position: int) -> int:
    """A 63-bit seed for one step of one epoch; neighbouring steps share nothing."""
    digest = blake2b(f"{seed}/{epoch}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _start(config: Config, encoder: Encoder, out: Path, resume: bool) -> Start | None:
    """The weights to start from, unless there are none or a checkpoint replaces them."""
    weights = config.encoder.weights
    return None if weights is None or (resume and Run(out).checkpoints()) else load_start(weights, encoder)


def _fitted(
    config: Config, run: Run, batches: Batches, shape: tuple[int, int, int], world: World
) -> tuple[Standardize, Space]:
    """Statistics and space, from the run folder if they are there, else fitted and saved."""
    path, device = run.path / "fitted.safetensors", batches.device
    space = build_space(config.space, shape).to(device)
    if path.exists():
        checkpoint.load_into(space, path, prefix="space.")
        return checkpoint.load_standardize(run).to(device), space
    standardize = fit_standardize(batches, config.data.standardize, world.share, world.add_up).to(device)
    mine = Standardized(batches, standardize, world.share)
    space.fit_together(Standardized(batches, standardize), Together(lambda whole: mine, world.add_up))
    with world.agreed():
        if world.main:
            checkpoint.save_fitted(run, standardize, space)
    # The others take what the first one wrote, so that all have the same bits.
    return (standardize, space) if world.main else _fitted(config, run, batches, shape, world)


def _seeded_model(config: Config, shape: tuple[int, int, int], space: Space, start: Start | None) -> MaskedAutoencoder:
    """Initial weights that depend on the seed and the given ones alone, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = build_method(config, shape, space)
    if start:
        model.encoder.net.load_state_dict(start.tensors)
    return model


def _main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()
