"""Setting up a run: the lock on its folder, what is fitted to the images before training, and the initial weights."""

import contextlib
import errno
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pmae import fast
from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.data.batches import Batches, Standardized, fit_standardize
from pmae.errors import UserError, require
from pmae.files import clear_stale, disk_errors, is_at, locked_file, read_tensors, write_json, write_whole
from pmae.method import MaskedAutoencoder, build_method
from pmae.models import Decoder
from pmae.models.described import pixels_note
from pmae.models.encoder import run_blocks_checkpointed, set_drop_path
from pmae.models.weights import Pretrained, load_weights
from pmae.plugins import plugin_errors, require_plugins
from pmae.remote import local
from pmae.runs import Run
from pmae.spaces import Learned, Space, build_space
from pmae.spaces.moments import DistributedFit
from pmae.system import available_bytes, lacks_float64, take_lock
from pmae.train import checkpoint
from pmae.train.distributed import AllGather, World
from pmae.train.environment import pick_engine, pick_precision
from pmae.train.trackers import require_tracker

FIT_RATE = {"cpu": 1e11, "cuda": 2e13}
"""Operations a second of a fit, roughly: two cores in float32, a large GPU in float64."""
LONG_FIT = 10.0  # seconds of a fit that are worth a line
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""What a file system says that knows no locks; a system may know none either."""


def dry_build(config: Config, shape: tuple[int, int, int], device: torch.device) -> MaskedAutoencoder:
    """The model without memory: what does not fit the data or the machine is refused before anything is written."""
    pick_engine(config.train, device)
    require_tracker(config.train.track)
    require_plugins(config)
    with torch.device("meta"), plugin_errors(config, lambda: "when it was built"):
        model = build_method(config, shape)
    staged, rule = config.encoder.first_patch_size, "0 unless encoder.name is a ViT"
    require(not staged or model.encoder.is_vit, "encoder.first_patch_size", rule, staged)
    # Whose rotation is solved for in every step.
    narrow = lacks_float64(device) and isinstance(model.space, Learned)
    require(not narrow, "train.device", f"one with float64, as cpu, for the space {config.space.name!r}", device.type)
    return model


def given_weights(path: str, model: MaskedAutoencoder) -> Pretrained:
    """The weights that training starts from, told with how their pixels were standardized."""
    place = local(path)
    last = Run(place).checkpoint() if (place / "checkpoints").is_dir() else None
    if last:
        checkpoint.require_whole(last, "encoder.safetensors")
    found, decoder = load_weights(path, model.encoder), decoder_of(last, model.decoder) if last else {}
    new = ", ".join(sorted(_parts(model.decoder.state_dict()) - _parts(decoder)))
    taken = ["and its decoder" + (f", but a new {new}" if new else "")] if decoder else []
    return found._replace(notes=[*found.notes, *pixels_note(path), *taken], decoder=decoder)


def decoder_of(last: Path, decoder: Decoder) -> dict[str, Tensor]:
    """Those parts of a checkpoint's decoder, the heads of its losses among them, that fit this one in all tensors."""
    if not (last / "decoder.safetensors").exists():
        return {}
    known = read_tensors(checkpoint.require_whole(last, "decoder.safetensors"))
    shapes = ({(name, each.shape) for name, each in tensors.items()} for tensors in (known, decoder.state_dict()))
    other = _parts(name for name, _ in set.symmetric_difference(*shapes))
    return {name: each for name, each in known.items() if name.split(".")[0] not in other}


def _parts(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def expected_fit(space: Space, images: int, device: torch.device) -> list[str]:
    """Refuse a fit that memory is too small for, with the bytes; of a long one, a line that says so."""
    need, operations = space.fit_cost(images)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    what = f"the fit of space {space.config.name!r} to {images:,} images"
    if need > free:
        raise UserError(f"{what} needs {need:,} bytes, and {free:,} are free on {device}; {space.way_out}")
    seconds = operations / FIT_RATE["cuda" if device.type == "cuda" else "cpu"]
    about = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} minutes"
    return [f"{what} takes about {about} and {need / 1e9:.1f} GB on {device}"] if seconds > LONG_FIT else []


def threads_note(out: Path, device: torch.device) -> list[str]:
    """A line where a run goes on with another number of CPU threads: sums then round differently in their last bits."""
    before, now = Run(out).environment.get("threads"), torch.get_num_threads()
    note = f"the run began with {before} threads and goes on with {now}: results agree to rounding, not bit for bit"
    return [note] if device.type == "cpu" and before not in (None, now) else []


def require_shapes(space: Space, x: Tensor) -> None:
    """Refuse a space of somebody's own that gives other shapes than its contract says."""
    z = space.project(x)
    name, expected = f"space {space.config.name!r}", (len(x), *space.variance.shape)
    require(tuple(z.shape) == expected, name, f"one that projects to {expected}, as its variance says", tuple(z.shape))
    y = space.reconstruct(z)
    require(y.shape == x.shape, name, f"one that reconstructs {tuple(x.shape)}", tuple(y.shape))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold a folder, made if need be, for this process alone; yields a check that it was not moved since."""
    path, made = folder / ".lock", not folder.exists()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked_file(path, lambda handle: _lock(handle, path)) as handle:
            clear_stale(folder)
            clear_stale(folder / "checkpoints")
            rule = "left where it is while a run trains into it; it was renamed, deleted or replaced, so it stops"
            yield lambda: require(is_at(handle, path), "out", rule, str(folder))
    finally:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _lock(handle: int, path: Path) -> None:
    """By the system's lock, which it lets go of when the process dies, with the process written in the file."""
    try:
        take_lock(handle, wait=False)
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
        rule = f"a run that no other process is training, got {str(path.parent)!r}, held by process {holder}"
        raise UserError(f"out must be {rule}") from error
    except (ImportError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise
        warnings.warn(f"{str(path.parent)!r} cannot be locked: start no second process on it", stacklevel=2)


def take_fit(run: Run, source: Path) -> None:
    """Copy what was fitted to the same images in the folder of another run, if it is there and none is here."""
    theirs, mine = (folder / "fitted.safetensors" for folder in (source, run.path))
    if theirs.exists() and not mine.exists():
        told = {key: value for key, value in Run(source).environment.items() if key == "fit_seconds"}
        write_json(run.path / "environment.json", {**run.environment, **told})
        write_whole(mine, lambda temporary: shutil.copyfile(theirs, temporary))


def fit_or_load(
    config: Config, run: Run, batches: Batches, shape: tuple[int, int, int], world: World
) -> tuple[Standardize, Space]:
    """Statistics and space, from the run folder if they are there, else fitted and saved."""
    path, device = run.path / "fitted.safetensors", batches.device
    if lacks_float64(device) and not path.exists():
        fit_or_load(config, run, batches.on(torch.device("cpu")), shape, world)
    space = build_space(config.space, shape).to(device)
    if path.exists():
        checkpoint.load_into(space, path, prefix="space.")
        return checkpoint.load_standardize(run).to(device), space
    standardize = fit_standardize(batches, config.data.standardize, world.part, world.all_reduce).to(device)
    mine = Standardized(batches, standardize, world.part)
    began = time.monotonic()
    space.fit_distributed(Standardized(batches, standardize), DistributedFit(lambda whole: mine, world.all_reduce))
    if not type(space).__module__.startswith("pmae."):
        require_shapes(space, standardize(batches.take(torch.arange(2, device=device))))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - began
    with world.all_agree():
        if world.main:
            # With the machine, which it says something about: what goes into the results is the same on all.
            write_json(run.path / "environment.json", {**run.environment, "fit_seconds": round(seconds, 6)})
            checkpoint.save_fitted(run, standardize, space)
    # The others take what the first one wrote, so that all have the same bits.
    return (standardize, space) if world.main else fit_or_load(config, run, batches, shape, world)


def build_model(
    config: Config, space: Space, pretrained: Pretrained | None, device: torch.device, world: World
) -> MaskedAutoencoder:
    """The model as its first step finds it: initial weights follow from the seed and the given ones."""
    train = config.train
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(train.seed)
        model = build_method(config, space.shape, space, pretrained.tensors if pretrained else None)
        if pretrained:
            model.decoder.load_state_dict(pretrained.decoder, strict=False)
    set_drop_path(model.encoder, config.encoder.drop_path)  # after a teacher was copied, which drops nothing
    # A model to be divided waits on the host: whole, it may not fit on the device.
    model.to("cpu" if train.shard else device)
    model.precision = pick_precision(train.precision, device)
    fast.accelerate(model, train.kernels)
    if train.activation_checkpointing:
        checkpoint_activations(model)
    if world.size > 1 and model.contrastive and model.contrastive.gathers:
        model.contrastive.gather = lambda features: AllGather.apply(features, world)
    return model


def match_pixels(model: MaskedAutoencoder, standardize: Standardize, dtype: str) -> None:
    """Let a finished teacher see images as those that it learned from, where their mean and deviation are known."""
    device = standardize.mean.device
    if not (distill := model.contrastive and model.contrastive.distill):
        return
    fast.accelerate(distill.teacher.to(device), model.config.train.kernels)
    if theirs := checkpoint.recorded_standardize(distill.path, model.space.shape, dtype):
        theirs.to(device)
        distill.scale, distill.shift = standardize.std / theirs.std, (standardize.mean - theirs.mean) / theirs.std


def checkpoint_activations(model: MaskedAutoencoder) -> None:
    """Let blocks of encoder and decoder be computed again in the backward pass; timm's others do it themselves."""
    model.decoder.run_blocks = run_blocks_checkpointed
    if model.encoder.is_vit:
        model.encoder.run_blocks = run_blocks_checkpointed
        return
    turn_on = getattr(model.encoder.net, "set_grad_checkpointing", None)
    try:
        require(turn_on is not None, "train.activation_checkpointing", "off for this encoder", True)
        turn_on()  # type: ignore[misc]
    except AssertionError as error:  # what timm says where a network has none
        raise UserError(f"train.activation_checkpointing must be off for this encoder: {error}") from error
