"""An encoder or a classifier in the formats of other libraries, each re-loaded by its library and compared first."""

import re
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token

from pmae.errors import UserError, require, require_known
from pmae.export.card import write_card
from pmae.export.formats import FORMATS
from pmae.export.source import Source, load_source
from pmae.files import disk_errors, require_empty, write_json, write_whole
from pmae.remote import reaching
from pmae.runs import Run

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest feature, that rounding in another library's kernels may make."""


def export(
    run: Run | Path | str,
    kind: str,
    out: Path | str,
    epoch: int | None = None,
    data_licence: str | None = None,
    repo: str | None = None,
) -> float:
    """Write the folder `out`, new or empty, whole or not at all; returns the largest difference that was found.

    The model card names the licence of the images, and loads the model from `repo`, USER/NAME on the Hugging Face hub,
    where the folder is to be uploaded (`push`).
    """
    require_known("format", [kind], FORMATS)
    out = Path(out).expanduser().resolve()
    require_empty(out)
    source, difference = load_source(run, epoch), 0.0

    def write(folder: Path) -> None:
        nonlocal difference
        folder.mkdir()
        difference = _write(source, kind, folder)
        write_json(folder / "preprocessing.json", source.preprocessing())
        # A name that Python or Markdown would read otherwise is left for the reader to fill in.
        name = repo or (out.name if re.fullmatch(r"[\w .=+-]+", out.name) else "FOLDER")
        write_card(source, folder, kind, name, difference, data_licence, on_hub=repo is not None)

    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, write)
    return difference


def _write(source: Source, kind: str, folder: Path) -> float:
    """Write the files of a format, and compare what its library makes of them."""
    try:
        FORMATS[kind].write(source, folder)
        return _compare(source, kind, folder)
    except (UserError, OSError):
        raise
    # Each library knows not every network and raises what it likes, onnxruntime even exceptions of its own kind.
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        name, others = source.network.name, ", ".join(other for other in FORMATS if other != kind)
        told = f"format {kind!r} does not work for encoder.name {name!r}: {reason}; other formats: {others}"
        raise UserError(told) from error


def _compare(source: Source, kind: str, folder: Path) -> float:
    images = source.images()
    ours, theirs = source.features(images), FORMATS[kind].features(source, folder, images)
    if ours.keys() != theirs.keys():
        raise UserError(f"format {kind!r} does not give the same features: {sorted(theirs)} instead of {sorted(ours)}")
    # As tensors, whose maximum is NaN where one of them is.
    largest = float(torch.stack([(ours[name] - theirs[name]).abs().max() for name in ours]).max())
    allowed = TOLERANCE * max(1.0, float(torch.stack(list(ours.values())).abs().max()))
    if not largest <= allowed:
        raise UserError(f"format {kind!r} must give features within {allowed:.1g} of the encoder's, got {largest:.1g}")
    return largest


def require_hub(repo: str, token: bool = True) -> None:
    """Refuse a name that is none, and a machine without a token if one is needed, before anything is written."""
    require(re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is not None, "push", "a repository, USER/NAME", repo)
    if token and get_token() is None:
        rule = "needs a token of the Hugging Face hub: `hf auth login`, or the variable HF_TOKEN"
        raise UserError(f"push to {repo!r} {rule}")


def files_in(folder: Path | str) -> list[str]:
    """What an upload would send, a line a file with its size."""
    root = Path(folder).expanduser()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [f"  {path.stat().st_size:>12,} bytes  {path.relative_to(root).as_posix()}" for path in files]


def push(folder: Path | str, repo: str, public: bool = False) -> str:
    """Upload a folder that `export` wrote to the Hugging Face hub, into a private repository if it is new."""
    require_hub(repo)
    folder = Path(folder).expanduser()
    require((folder / "preprocessing.json").is_file(), "folder", "one that export wrote", str(folder))
    with reaching(f"the repository {repo}"):
        hub = HfApi(library_name="pmae")
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="pmae export")
        return f"{hub.endpoint}/{repo}"
