"""From a real run through an export and back into training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import pmae
from pmae.config import Config, replace
from pmae.data.decode import decode
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.export import export
from pmae.models.weights import load_weights
from pmae.train.checkpoint import load_encoder
from pmae.train.loop import pretrain
from pmae.train.start import reading_for


def test_a_trained_run_goes_out_and_comes_back_bit_for_bit(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config, _ = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    _, encoder, _ = load_encoder(run)
    for kind, notes in (("timm", []), ("huggingface", ["left out pooler"])):
        export(run.path, kind, tmp_path / kind)
        start = load_weights(str(tmp_path / kind), encoder)
        assert start.notes[1:] == notes
        assert all(torch.equal(tensor, start.tensors[name]) for name, tensor in encoder.net.state_dict().items())


@pytest.mark.parametrize("kind", ["timm", "huggingface"])
def test_exported_encoders_of_signals_read_signals(make_run: Any, tmp_path: Path, kind: str) -> None:
    """As the run itself does: (N, C, L) could as well be pictures, so the export has to tell."""
    pytest.importorskip("transformers")
    run = make_run((3, 1, 16), "float32", layout="NCL")
    np.save(tmp_path / "signals.npy", np.random.default_rng(0).normal(size=(5, 3, 16)).astype(np.float32))
    export(run.path, kind, tmp_path / kind)
    for source, out in ((run, "own.npz"), (tmp_path / kind, "exported.npz")):
        pmae.embed(source, tmp_path / "signals.npy", tmp_path / out)
    own, exported = (np.load(tmp_path / out)["features"] for out in ("own.npz", "exported.npz"))
    np.testing.assert_allclose(exported, own, atol=2e-5)


@pytest.mark.parametrize("resize", [16, None])
def test_others_cut_a_picture_as_embed_does(make_run, tmp_path: Path, resize: int | None) -> None:  # type: ignore[no-untyped-def]
    """Also where the run's own files had one size, and one of another size comes later."""
    transformers = pytest.importorskip("transformers")
    run = make_run(resize=resize)
    smooth = np.add.outer(np.arange(32), 2 * np.arange(48)).astype(np.uint8)
    Image.fromarray(np.stack([smooth, smooth[::-1], smooth // 2], -1)).save(tmp_path / "a.png")
    _, _, standardize = load_encoder(run)
    reading = reading_for(run, str(tmp_path / "a.png"))
    ours = standardize(torch.tensor(decode(tmp_path / "a.png", reading)))
    for kind in ("timm", "huggingface"):
        export(run.path, kind, tmp_path / kind)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "huggingface")
    theirs = processor(Image.open(tmp_path / "a.png"), return_tensors="pt")["pixel_values"][0]
    net = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    by_timm = create_transform(**resolve_model_data_config(net))(Image.open(tmp_path / "a.png"))
    one_level = 1.5 / float(standardize.std.min())
    for found in (theirs, by_timm):
        torch.testing.assert_close(found, ours, rtol=0, atol=one_level)
