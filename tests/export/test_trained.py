"""From a real run through an export and back into training."""

from pathlib import Path

import pytest
import torch

from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.export import export
from pmae.models.weights import load_weights
from pmae.train.checkpoint import load_encoder
from pmae.train.loop import pretrain


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
