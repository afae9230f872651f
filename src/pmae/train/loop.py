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
from pmae.data.augment import Standardize, draw_crops
from pmae.data.batches import Batches
from pmae.data.images import Splits
from pmae.errors import Interrupted, UserError
from pmae.method import MaskedAutoencoder, build_method, draw_mask
from pmae.models import Encoder
from pmae.models.weights import Pretrained
from pmae.runs import Run, write_whole
from pmae.train import checkpoint, sharding
from pmae.train.distributed import (
    ONE_PROCESS,
    World,
    feature_gatherer,
    local_device,
    process_group,
    require_divisible,
    was_restarted,
)
from pmae.train.environment import memory_errors, pick_device, pick_engine, pick_precision, same_bits
from pmae.train.journal import Journal, open_tracker, require_tracker
from pmae.train.monitor import hidden_r2, save_samples
from pmae.train.schedule import rate
from pmae.train.setup import fitted, foretell_fit, given_weights, opened, seeded_model
from pmae.train.step import Graph, Inputs, Plain, build_optimizer

Watch = Callable[[Encoder, Standardize, torch.device], dict[str, float]]


def pretrain(
    config: Config,
    splits: Splits,
    out: Path | str,
    resume: bool = False,
    quiet: bool = False,
    watch: Watch | None = None,
    until: int | None = None,
) -> Run:
    """Train a resolved configuration on a data set into a run folder; `watch` scores the encoder now and then.

    With `until` it stops after that epoch, scored and saved; when resumed it goes on as if it had not.
    In processes that `torchrun` started, all of them train one run, and the first one writes it.
    """
    device, out = local_device(pick_device(config.train.device)), Path(out)
    pick_engine(config.train, device)
    require_tracker(config.train.track)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    with torch.device("meta"):
        # A dry build without memory: what does not fit the data is refused before anything is written.
        model = build_method(config, splits.train.shape)
    with process_group(device) as world:
        require_divisible(config, config.train.batch_size or 1, model, world.size)
        # As the first process sees it: a moment later the folder may be there.
        resume = bool(world.all_gather(resume or was_restarted(out))[0])
        start, quiet = given_weights(config, model.encoder, out, resume), quiet or not world.main
        notes = [f"encoder.weights: {'; '.join(start.notes)}"] if start else []
        with world.all_agree():
            notes += [] if resume else [foretell_fit(model.space, len(splits.train), device)]
        for note in filter(None, [] if quiet else notes):
            print(note, flush=True)
        with opened(config, splits, out, resume, device, start, world) as run:
            with same_bits(config.train.deterministic):
                trainer = Trainer(config, splits, run, device, start, world)
            with memory_errors(trainer.batch_size, device):
                trainer.fit(quiet, watch, until)
    return run


class Trainer:
    """A run in progress: the data on its device, the model, its optimizer and the step that joins them."""

    def __init__(
        self,
        config: Config,
        splits: Splits,
        run: Run,
        device: torch.device,
        start: Pretrained | None = None,
        world: World = ONE_PROCESS,
    ) -> None:
        self.config, self.run, self.device, self.world = config, run, device, world
        train = config.train
        settled = (train.epochs, train.batch_size, train.log_every, train.checkpoint_every, config.probe.every)
        if None in (*settled, config.optim.base_lr):
            raise UserError("config must be resolved against the data (pmae.derive.resolve) before training")
        self.epochs, self.batch_size, self.log_every, self.checkpoint_every, self.probe_every = map(int, settled)  # type: ignore[arg-type]
        self.batches = Batches(splits.train.images, device, config.data.keep_on)
        self.held_out = splits.test or splits.val
        self.r2_name = "train_r2" if self.held_out is None else "held_out_r2"
        self.shape, self.steps = splits.train.shape, len(splits.train) // self.batch_size
        self.standardize, space = fitted(config, run, self.batches, self.shape, world)
        # A model to be divided waits on the host: whole, it may not fit on the device.
        self.model = seeded_model(config, self.shape, space, start).to("cpu" if train.shard else device)
        self.model.precision = pick_precision(train.precision, device)
        if world.size > 1:
            self.model.gather = feature_gatherer(world)
        graph = pick_engine(train, device) == "graph"
        self.optimizer = build_optimizer(self.model, config.optim, on_graph=graph)
        self.step = checkpoint.restore(run, self.model, self.optimizer)
        world.require_same(self.model, self.optimizer)
        if train.shard:
            self.optimizer = sharding.shard(self.model, self.optimizer, config.optim, world)
        kind = Graph if graph else sharding.Sharded if train.shard else Plain
        self.stepper = kind(self.model, self.standardize, config, self.optimizer, world)
        self._peak, self._stopped_by = (config.optim.base_lr or 0.0) * self.batch_size / 256, 0
        self._last = self.epochs

    def fit(self, quiet: bool, watch: Watch | None, until: int | None = None) -> None:
        """Train to the last epoch, or `until` an earlier one; on a signal, save and raise `Interrupted`."""
        self._last = min(until or self.epochs, self.epochs)
        handlers = (
            {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)} if _main_thread() else {}
        )
        try:
            with self._journal(quiet) as journal:
                # A run that was stopped right after an epoch owes its signals: they come first.
                self._signals(journal, watch)
                while self.step < self._last * self.steps:
                    with same_bits(self.config.train.deterministic):
                        self._epoch(journal)
                    self._signals(journal, watch)
            if self.step == self.epochs * self.steps:
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
        order, first = self.order(epoch), self.step % self.steps
        coming = self.batches.each(order[first:, self.world.rank_slice(self.batch_size)])
        self.model.train()
        began, since = time.monotonic(), 0
        for position, images in enumerate(coming, first):
            lr = self._rate(epoch, position)
            self.stepper(self.inputs(epoch, position, images, lr))
            self.step, since = self.step + 1, since + 1
            # Several processes agree to stop when they log: asking at every step would make them wait for each other.
            stop = self._stopped_by if self.world.size == 1 else 0
            if self.step % self.log_every == 0 or position == self.steps - 1 or stop:
                values, bad = self.stepper.tally.read(self.world)
                stop = max(self.world.all_gather(self._stopped_by))
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
        if (epoch + 1) % self.checkpoint_every == 0 or epoch + 1 == self._last:
            self._save()

    def inputs(self, epoch: int, position: int, images: Tensor, lr: float = 0.0, whole: bool = False) -> Inputs:
        """Everything step `position` of an epoch consumes: a function of the seed, the epoch and the position alone.

        The images are those of `order`. Every process draws for the whole batch and takes its rows, so that how many
        there are does not matter.
        """
        number = stream(self.config.train.seed, epoch, position)
        generator = torch.Generator(self.device).manual_seed(number)
        count = self.batch_size * self.model.views
        crops = draw_crops(count, generator, self.device)
        ratio = masking.draw_ratio(self.config.masking, random.Random(number))
        draw = draw_mask(self.model, count, ratio, generator)
        rows = slice(None) if whole else self.world.rank_slice(self.batch_size)

        def mine(drawn: Tensor) -> Tensor:
            return drawn.unflatten(0, (self.model.views, -1))[:, rows].flatten(0, 1)

        draw = draw if len(draw.noise) == 1 else draw._replace(noise=mine(draw.noise))
        return Inputs(images, mine(crops), draw, lr)

    def order(self, epoch: int) -> Tensor:
        """Positions of the images (steps, batch) of an epoch: a function of the seed and the epoch."""
        generator = torch.Generator(self.device).manual_seed(stream(self.config.train.seed, epoch, -1))
        return self.batches.order(generator)[: self.steps * self.batch_size].view(self.steps, self.batch_size)

    def _rate(self, epoch: int, position: int) -> float:
        optim, at = self.config.optim, epoch + (position + 1) / self.steps
        # The released schedule steps once an epoch, so it is asked for the epoch that is running.
        at = epoch if optim.schedule == "released" else at
        warmup = optim.warmup_epochs if optim.warmup_steps is None else optim.warmup_steps / self.steps
        return self._peak * rate(optim.schedule, at, self.epochs, warmup or 0.0)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._stopped_by = number

    def _save(self) -> None:
        epoch, position = divmod(self.step, self.steps)
        name = f"epoch_{epoch:04d}" + (f"_step_{position:06d}" if position else "")
        state, parts = {"epoch": epoch, "step": self.step}, checkpoint.contents(self.model, self.optimizer)
        if self.config.train.shard:
            parts = {file: sharding.gathered(tensors, self.world) for file, tensors in parts.items()}
        with self.world.all_agree():
            if self.world.main:
                checkpoint.save(self.run, parts, name, state, self.config.train.keep)

    def _whole_model(self) -> MaskedAutoencoder:
        """The model for the first process to look at; all are needed to put a divided one together."""
        model = sharding.put_together(self.model, self.world) if self.config.train.shard else self.model
        return model.eval()

    def _signals(self, journal: Journal | None, watch: Watch | None) -> None:
        """Label-free signals on held-out images, and whatever `watch` measures, if due and not there yet."""
        epoch, position = divmod(self.step, self.steps)
        due = position == 0 and epoch > 0 and (epoch == self._last or epoch % self.probe_every == 0)
        if not due:
            return
        model = self._whole_model()
        if not journal:
            return
        if any(line["step"] == self.step and self.r2_name in line for line in self.run.metrics()):
            return
        values = hidden_r2(model, self.standardize, self._held_out_batches(), self.config.train.seed, self.r2_name)
        if watch:
            values |= watch(model.encoder, self.standardize, self.device)
        self.run.add_results(pretrain={"epoch": epoch, **values, **self.model.space.measured()})
        # Last, because it says that this epoch's signals are there: a run killed before it measures them again.
        journal.write(epoch=float(epoch), step=self.step, **values)

    def _held_out_batches(self) -> Batches:
        return self.batches if self.held_out is None else Batches(self.held_out.images, self.device)

    def _finish(self) -> None:
        model = self._whole_model()
        if not self.world.main:
            return
        save_samples(self.run, model, self.standardize, self._held_out_batches(), self.config.train.seed)

    def _stop_on_bad(self, step: int) -> None:
        """Repeat the draw of the first non-finite step, which its number determines, and save it for inspection."""
        epoch, position = divmod(step, self.steps)
        index = self.order(epoch)[position]
        inputs = self.inputs(epoch, position, self.batches.take(index), whole=True)
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


def _main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()
