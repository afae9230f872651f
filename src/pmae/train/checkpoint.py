"""Checkpoints: safetensors and JSON, whole or absent; state.json lists sizes and checksums, so that damage is told."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pmae.config import Config
from pmae.data.augment import Standardize
from pmae.errors import UserError, require
from pmae.files import read_object, read_tensors, write_json, write_tensors, write_whole
from pmae.method import MaskedAutoencoder
from pmae.models import Encoder, build_encoder
from pmae.models.described import described_weights
from pmae.models.weights import require_fit, weights_in
from pmae.plugins import require_plugins
from pmae.remote import is_remote, local
from pmae.runs import Run, is_classifier, is_run, read_state
from pmae.spaces import Space, build_space
from pmae.train.given import given_images, load_given, recorded

FOR_RESUMING = ("decoder.safetensors", "optimizer.safetensors", "extra.safetensors")

Contents = Mapping[str, Mapping[str, Tensor]]  # the tensors of each file of a checkpoint


def contents(model: MaskedAutoencoder, optimizer: torch.optim.Optimizer) -> Contents:
    """What training needs to go on, file by file; the tensors are those in use, not copies."""
    files = {
        "encoder.safetensors": model.encoder.net.state_dict(),
        "decoder.safetensors": model.decoder.state_dict(),
        "optimizer.safetensors": optimizer_tensors(model, optimizer),
    }
    more = {"space.safetensors": space_state(model.space), "extra.safetensors": extra_state(model)}
    return files | {name: tensors for name, tensors in more.items() if tensors}


def space_state(space: Space) -> dict[str, Tensor]:
    """What training changes in a space: of ours the parameters, if it has any, of somebody else's maybe all."""
    learned = {key: value.detach() for key, value in space.named_parameters()}
    return learned if not learned or type(space).__module__.startswith("pmae.") else space.state_dict()


def extra_state(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """What plug-ins added to a model beside its encoder, decoder and space; fitted buffers of a space are elsewhere."""
    ours = ("encoder.net.", "decoder.", "space.")
    return {key: value for key, value in model.state_dict().items() if not key.startswith(ours)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments by parameter name: `encoder.net.norm.weight/exp_avg`."""
    named = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {f"{name}/{key}": torch.as_tensor(value) for name, state in named.items() for key, value in state.items()}


def save(run: Run, files: Contents, name: str, state: dict[str, int], keep: int) -> Path:
    """Write a checkpoint whose state says its epoch and step, and thin out those before the last `keep`.

    A loss tells of NaN one step later than weights, which after the last step would be too late.
    """
    if not all(tensor.isfinite().all() for tensor in files["encoder.safetensors"].values()):
        rule = f"finite after step {state['step']}, got NaN or infinity; {what_is_saved(run)}"
        raise UserError(f"weights must be {rule}; a lower optim.base_lr or an optim.clip_norm may help")

    def write(folder: Path) -> None:
        folder.mkdir()
        for name, tensors in files.items():
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
        sizes = {name: (folder / name).stat().st_size for name in files}
        manifest = {**state, "files": sizes, "blake2b": {name: _file_checksum(folder / name) for name in files}}
        write_json(folder / "state.json", {**manifest, "seal": _seal(manifest)})

    (run.path / "checkpoints").mkdir(exist_ok=True)
    path = run.path / "checkpoints" / name
    write_whole(path, write)
    _thin_out(run, keep)
    return path


def what_is_saved(run: Run) -> str:
    """Whether something is left of a run that failed."""
    return "the last checkpoint is intact" if run.checkpoints() else "there is no checkpoint yet"


def _thin_out(run: Run, keep: int) -> None:
    for old in run.checkpoints()[:-keep]:
        for name in FOR_RESUMING:
            (old / name).unlink(missing_ok=True)


def restore(run: Run, model: MaskedAutoencoder, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest whole checkpoint into the model and the optimizer; returns its step, 0 if there is none."""
    known = run.checkpoints()
    # Those that do not even say their step come first, to be told of.
    unknown = [path for path in sorted((run.path / "checkpoints").glob("epoch_*")) if path not in known]
    for path in (*unknown, *reversed(known)):
        found = damage(path)
        if found is None:
            load_into(model.encoder.net, path / "encoder.safetensors")
            load_into(model.decoder, path / "decoder.safetensors")
            load_trained_space(model.space, path)
            extra = path / "extra.safetensors"
            tensors = read_tensors(extra) if extra.exists() else {}
            require_fit(f"checkpoint {str(extra)!r} does not fit the plug-ins", extra_state(model), tensors)
            model.load_state_dict(tensors, strict=False)
            _load_optimizer(model, optimizer, read_tensors(path / "optimizer.safetensors"))
            _thin_out(run, run.config.train.keep)  # a run killed before it did so may have nothing left to save
            return int(read_state(path)["step"])
        warnings.warn(f"checkpoint {path.name} is damaged and the one before it is used: {found}", stacklevel=2)
    if known or unknown:
        warnings.warn(f"no checkpoint of {str(run.path)!r} is whole: its training begins anew", stacklevel=2)
    return 0


def run_or_weights(source: Run | Path | str) -> Run | Path:
    """A run, or the place of weights that timm or Hugging Face wrote; what is on the hub, hf://USER/NAME, is copied."""
    stored = is_remote(source) and not str(source).startswith("hf://")
    if isinstance(source, Run) or stored or is_run(place := local(source)):
        return Run(source)
    rule = "a folder that pretraining wrote, or weights that timm or Hugging Face did (safetensors or .pth)"
    require(bool(weights_in(place)), "run", rule, str(source))
    require(not is_classifier(place), "run", f"{rule}, not a classifier", str(source))
    return place


def load_encoder(source: Run | Path | str, epoch: int | None = None) -> tuple[Config, Encoder, Standardize]:
    """The encoder of a run, at its last checkpoint or a given epoch, with the statistics its images need.

    Weights that timm or Hugging Face wrote will do, a folder or its address, hf://USER/NAME, on the hub.
    """
    run = run_or_weights(source)
    if not isinstance(run, Run):
        require(epoch is None, "epoch", "left out for weights, which have one state", epoch)
        start = load_given(run)
        return Config(data=given_images(run).data, encoder=start.config), start.encoder, start.standardize
    path = require_whole(run.checkpoint(epoch), "encoder.safetensors")
    config, standardize = run.config, load_standardize(run)
    require_plugins(config)
    if config.encoder.name == "vit_tiny":
        # Without its memory first: damaged settings may ask for more than there is. The file has all of its weights.
        with torch.device("meta"):
            encoder = build_encoder(config.encoder, run.shape)
        require_fit(f"checkpoint {str(path)!r} does not fit the settings", encoder.net.state_dict(), read_tensors(path))
        encoder = encoder.to_empty(device="cpu")
    else:
        with torch.random.fork_rng(devices=[]):  # initial weights, which are not kept, are drawn
            encoder = build_encoder(config.encoder, run.shape)
    load_into(encoder.net, path)
    return config, encoder.eval(), standardize


def save_fitted(run: Run, standardize: Standardize, space: Space) -> None:
    """Write what was learned from the images before training: their statistics and the space."""
    tensors = {f"standardize.{key}": value for key, value in standardize.state_dict().items()}
    tensors |= {f"space.{key}": value for key, value in space.state_dict().items()}
    write_tensors(run.path / "fitted.safetensors", tensors)


def load_space(run: Run) -> Space:
    """The fitted space of a run; one that learns as it was at the last checkpoint."""
    require_plugins(run.config)
    space = build_space(run.config.space, run.shape)
    load_into(space, run.path / "fitted.safetensors", prefix="space.")
    if space_state(space):
        load_trained_space(space, require_whole(run.checkpoint(), "space.safetensors").parent)
    return space


def load_trained_space(space: Space, checkpoint: Path) -> None:
    """Load what training changed, if it changes anything; the fitted rest is in the space."""
    if expected := space_state(space):
        path = checkpoint / "space.safetensors"
        tensors = read_tensors(path)
        require_fit(f"checkpoint {str(path)!r} does not fit the settings", expected, tensors)
        space.load_state_dict(space.state_dict() | tensors)


def load_standardize(run: Run) -> Standardize:
    """The statistics of the run's training images."""
    fitted = read_tensors(run.path / "fitted.safetensors", prefix="standardize.")
    if not {"mean", "std"} <= fitted.keys():
        raise UserError(f"run {str(run.path)!r} must hold a mean and a std in fitted.safetensors, got {sorted(fitted)}")
    return Standardize(fitted["mean"], fitted["std"])


def recorded_standardize(source: str, images: tuple[int, int, int], dtype: str) -> Standardize | None:
    """The statistics per channel that an encoder's images had, where they apply to these (C, H, W) and are known."""
    place = run_or_weights(source)
    if not isinstance(place, Run):
        return recorded(described_weights(str(place)), images[0], dtype)
    alike = (place.shape[0], place.environment["data"]["dtype"]) == (images[0], dtype)
    found = load_standardize(place) if alike else None
    return found if found and found.mean[0].numel() == 1 else None


def load_into(module: nn.Module, path: Path, prefix: str = "") -> None:
    """Load a state dict that must fit exactly, or say what does not."""
    tensors = read_tensors(path, prefix)
    require_fit(f"checkpoint {str(path)!r} does not fit the settings", module.state_dict(), tensors)
    module.load_state_dict(tensors)


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    known = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in known or value.shape not in ((), known[name].shape):
            want = tuple(known[name].shape) if name in known else "nothing"
            raise UserError(f"checkpoint does not fit the settings: {key} must be {want}, got {tuple(value.shape)}")
        optimizer.state[known[name]][kind] = value.to(known[name].device)


def damage(folder: Path, only: Iterable[str] | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, or those asked for; older ones list sizes, not checksums."""
    try:
        state = read_object(folder / "state.json")
    except UserError as error:
        return str(error)
    sizes, checksums = state.get("files", {}), state.get("blake2b", {})
    seal = state.pop("seal", None)
    if not (isinstance(sizes, dict) and isinstance(checksums, dict)) or (seal is not None and seal != _seal(state)):
        return "state.json is not as it was written"
    wrong = []
    for name in sizes if only is None else [name for name in only if name in sizes]:
        try:
            is_whole = (folder / name).stat().st_size == sizes[name]
            is_whole = is_whole and checksums.get(name) in (None, _file_checksum(folder / name))
        # A name that is no name, from a file that is no manifest.
        except (OSError, ValueError):
            is_whole = False
        wrong += [] if is_whole else [name]
    return f"{', '.join(wrong)} missing or not as written" if wrong else None


def require_whole(folder: Path, name: str) -> Path:
    """The path of one file of a checkpoint, refused if it is not what was written."""
    found = damage(folder, [name])
    if found:
        raise UserError(f"checkpoint must be whole, got {str(folder)!r}: {found}; use an earlier epoch")
    return folder / name


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _seal(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
