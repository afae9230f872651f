"""Starting from other weights: timm's, Hugging Face's and another run's, adapted as timm adapts them, or refused."""

import builtins
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import adapt_input_conv

from pmae import api
from pmae.config import Config, EncoderConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.models import Encoder, build_encoder
from pmae.models.weights import Pretrained, load_weights
from pmae.train.checkpoint import load_encoder
from pmae.train.loop import pretrain

VIT = EncoderConfig(patch_size=4, width=32, depth=2, heads=4)
NAMES = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 4, "img_size": (16, 16)}


def timm_vit(**changes: Any) -> Any:
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", **{**NAMES, **changes}).eval()
    torch.nn.init.normal_(net.pos_embed)
    return net


def saved(net: Any, folder: Path, config: dict[str, Any] | None = None) -> str:
    folder.mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def load(
    path: str, shape: tuple[int, int, int] = (3, 16, 16), config: EncoderConfig = VIT
) -> tuple[Encoder, Pretrained]:
    encoder = build_encoder(config, shape).eval()
    start = load_weights(path, encoder)
    encoder.net.load_state_dict(start.tensors)
    return encoder, start


def test_timms_weights_compute_what_timm_computes(tmp_path: Path) -> None:
    net, x = timm_vit(num_classes=10), torch.randn(2, 3, 16, 16)
    encoder, start = load(saved(net, tmp_path / "timm"))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(encoder(x), 1), net.forward_features(x))
    assert "left out head" in start.notes
    assert "the number of heads is not recorded beside the weights; taken to be 4" in start.notes


@pytest.mark.parametrize("kind", ["ViTModel", "ViTForImageClassification", "ViTMAEForPreTraining"])
def test_hugging_faces_weights_compute_what_transformers_computes(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    settings |= {"image_size": 16, "patch_size": 4, "layer_norm_eps": 1e-6}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    mae = "MAE" in kind
    config = transformers.ViTMAEConfig if mae else transformers.ViTConfig
    extra = {**decoder, "decoder_intermediate_size": 16, "mask_ratio": 0.0} if mae else {}
    model = getattr(transformers, kind)(config(**settings, **extra)).eval()
    model.save_pretrained(tmp_path / "hf")
    encoder, start = load(str(tmp_path / "hf"))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        body = model if kind == "ViTModel" else model.vit
        # MAE shuffles its patches; with noise that rises they stay in order.
        order = {"noise": torch.arange(16.0).expand(2, -1)} if mae else {}
        want = body(x, **order).last_hidden_state
        torch.testing.assert_close(torch.cat(encoder(x), 1), want, atol=2e-6, rtol=1e-5)
    beside = {"ViTModel": "pooler", "ViTMAEForPreTraining": "decoder", "ViTForImageClassification": "classifier"}
    assert f"left out {beside[kind]}" in start.notes


@pytest.mark.parametrize(("old", "new"), [(3, 1), (3, 5), (1, 3)])
def test_channels_are_spread_as_timm_does_it(tmp_path: Path, old: int, new: int) -> None:
    net = timm_vit(in_chans=old)
    encoder, start = load(saved(net, tmp_path / "timm"), (new, 16, 16))
    weight, spread = net.patch_embed.proj.weight, encoder.net.patch_embed.proj.weight
    if old == 3:
        torch.testing.assert_close(spread, adapt_input_conv(new, weight))
    grey = torch.randn(2, 1, 16, 16)
    if new % old == 0 or new == 1:
        ours, theirs = (n.patch_embed(grey.expand(-1, c, -1, -1)) for n, c in ((encoder.net, new), (net, old)))
        torch.testing.assert_close(ours, theirs)
    assert f"patch_embed.proj.weight spread from {old} channels to {new}" in start.notes


def test_patches_and_positions_are_resampled_as_timm_does_it(tmp_path: Path) -> None:
    source = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "pretrained_cfg": {"num_classes": 0}}
    path = saved(timm_vit(num_classes=0), tmp_path / "timm", {**source, "model_args": NAMES})
    config = EncoderConfig(patch_size=8, width=32, depth=2, heads=4)
    encoder, start = load(path, (3, 48, 32), config)
    other = timm.create_model(f"local-dir:{path}", pretrained=True, patch_size=8, img_size=(48, 32))
    for name in ("patch_embed.proj.weight", "pos_embed"):
        torch.testing.assert_close(encoder.net.state_dict()[name], other.state_dict()[name])
    assert start.notes[1:] == [
        "patches resampled from 4x4 to 8x8",
        "positions resampled from a grid of 4x4 to 6x4",
    ]


def test_the_recorded_grid_counts_where_the_numbers_agree(tmp_path: Path) -> None:
    # 2x8 and 8x2 have as many positions as 4x4: only what lies beside the weights tells them apart.
    net = timm_vit(img_size=(8, 32))
    source = {"architecture": "vit_tiny_patch16_224", "model_args": {**NAMES, "img_size": (8, 32)}}
    _, start = load(saved(net, tmp_path / "timm", source))
    assert start.notes[-1] == "positions resampled from a grid of 2x8 to 4x4"
    _, start = load(saved(net, tmp_path / "bare"))
    assert "resampled" not in " ".join(start.notes)


def test_half_precision_becomes_single(tmp_path: Path) -> None:
    net = timm_vit().half()
    _, start = load(saved(net, tmp_path / "half"))
    assert {tensor.dtype for tensor in start.tensors.values()} == {torch.float32}


def test_a_convolutional_network_keeps_its_counters(tmp_path: Path) -> None:
    net = timm.create_model("test_resnet", num_classes=5, in_chans=3)
    config = EncoderConfig("test_resnet", patch_size=8)
    encoder, start = load(saved(net, tmp_path / "conv"), (1, 32, 32), config)
    assert start.notes[1:] == ["left out fc", "conv1.0.weight spread from 3 channels to 1"]
    expected = {k: v for k, v in net.state_dict().items() if not k.startswith(("fc.", "conv1.0"))}
    assert all(torch.equal(tensor, encoder.net.state_dict()[name]) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 2}, r"encoder.heads must be those of encoder.weights \(2\), got 4"),
        ({"depth": 3}, r"blocks.2.attn.proj.bias must be nothing, got \(32,\); .* and \d+ more"),
        ({"depth": 1}, r"blocks.1.attn.proj.bias must be \(32,\), got nothing; .* and \d+ more"),
        ({"embed_dim": 64}, r"blocks.0.attn.proj.bias must be \(32,\), got \(64,\)"),
        ({"mlp_ratio": 2.5}, "must have MLPs 4 times as wide as the tokens, .* got 2.5 times as wide"),
    ],
)
def test_weights_of_another_network_are_refused_by_name(tmp_path: Path, change: dict[str, int], words: str) -> None:
    source = {"architecture": "vit_tiny_patch16_224", "model_args": {**NAMES, **change}}
    path = saved(timm_vit(num_classes=0, **change), tmp_path / "timm", source)
    with pytest.raises(UserError, match=words):
        load(path)


def test_a_checkpoint_of_maes_own_code_is_taken_without_its_decoder(tmp_path: Path) -> None:
    net = timm_vit(num_classes=0)
    decoder = {"decoder_embed.weight": torch.zeros(16, 32), "decoder_pos_embed": torch.zeros(1, 17, 16)}
    model = {**net.state_dict(), "mask_token": torch.zeros(1, 1, 16), **decoder}
    torch.save({"model": model, "epoch": 799}, tmp_path / "checkpoint-799.pth")
    _, start = load(str(tmp_path / "checkpoint-799.pth"))
    torch.testing.assert_close(start.tensors, dict(net.state_dict()))


def test_what_is_no_weights_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"a run folder, a \.safetensors, \.pth, \.pt or \.bin file or a folder with one"
    ):
        load(str(tmp_path / "nothing"))
    (tmp_path / "model.safetensors").write_text("not this")
    with pytest.raises(UserError, match="must be a readable safetensors file"):
        load(str(tmp_path))
    save_file({"pos_embed": torch.zeros(1, 8, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"must have a grid that is square, .* beside it, got 7"):
        load(str(tmp_path / "model.safetensors"))


FORBIDDEN = {
    "pretrained": True,
    "pretrained_cfg": {"url": "https://example.org/x.pth", "file": "x.pth"},
    "pretrained_cfg_overlay": {"url": "https://example.org/x.pth"},
    "cache_dir": "somewhere",
    "checkpoint_path": "x.pth",
    "scriptable": True,
    "features_only": True,
    "pretrained_strict": False,
    "block_fn": "os.system",
    "img_size": "4",
    "num_heads": 4.5,
    "patch_size": [4, 4, 4],
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_folder_cannot_make_timm_fetch_write_or_run_anything(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"architecture": "vit_tiny_patch16_224", "model_args": {**NAMES, name: FORBIDDEN[name]}}
    path = saved(timm_vit(num_classes=0), tmp_path / "timm", source)
    before = sorted(tmp_path.rglob("*"))
    with no_network_no_writing(monkeypatch), pytest.raises(UserError, match=f"{name}") as refused:
        load(path)
    assert str(tmp_path / "timm" / "config.json") in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_fetched_or_written_for_a_folder_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"architecture": "vit_tiny_patch16_224.augreg_in21k", "model_args": NAMES}
    source |= {"pretrained": True, "pretrained_cfg": {"url": "https://example.org/x.pth", "hf_hub_id": "a/b"}}
    path = saved(timm_vit(num_classes=0), tmp_path / "timm", source)
    with no_network_no_writing(monkeypatch) as created:
        load(path)
    assert created == [{"pretrained": False}]


@contextmanager
def no_network_no_writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Inside, a connection or a file opened for writing fails; gives the keywords that timm is called with."""
    created: list[dict[str, Any]] = []
    opened, create = builtins.open, timm.create_model

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"touched {arguments}")

    def read_only(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        assert set(mode) <= set("rbt"), f"opened {file} for {mode}"
        return opened(file, mode, *rest, **more)

    def build(name: str, **given: Any) -> Any:
        created.append(given)
        return create(name, **given)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", read_only)
        patch.setattr(timm, "create_model", build)
        for target in ("socket.socket.connect", "os.mkdir", "os.replace", "torch.hub.load_state_dict_from_url"):
            patch.setattr(target, refuse)
        yield created


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": 4, "image_size": 16, "patch_size": 0},
        {"num_attention_heads": 4, "image_size": 16, "patch_size": 32},
        {"num_attention_heads": 4, "image_size": "16", "patch_size": 4},
        {"num_attention_heads": "4", "image_size": 16, "patch_size": 4},
        {"num_attention_heads": 4, "image_size": [], "patch_size": 4},
        {"num_attention_heads": 4, "image_size": 10**30, "patch_size": 4},
        {"num_attention_heads": 4, "image_size": 64, "patch_size": 4},
        {"architecture": "vit_tiny_patch16_224", "model_args": [1]},
        {"num_attention_heads": 4, "image_size": [8, 16], "patch_size": [2, 4]},
        {"num_attention_heads": 4, "image_size": 16, "patch_size": 4, "hidden_act": "relu"},
    ],
)
def test_a_damaged_config_beside_the_weights_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    path = saved(timm_vit(num_classes=0), tmp_path / "timm", config)
    with pytest.raises(UserError):
        load(path)


def test_tensors_of_odd_shapes_are_refused(tmp_path: Path) -> None:
    whole = timm_vit(num_classes=0).state_dict()
    for name, tensor in whole.items():
        for odd in (tensor[:0], tensor[None], tensor[0]):
            save_file({**whole, name: odd.contiguous()}, tmp_path / "model.safetensors")
            with pytest.raises(UserError, match=r"encoder\.weights"):
                load(str(tmp_path))


def test_a_run_continues_from_another_runs_encoder(
    tiny: Config, toy: Splits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pmae")
    config, _ = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)
    first = pretrain(config, toy, tmp_path / "first", quiet=True)
    # So small a rate leaves every weight where it began.
    still = replace(config, encoder__weights=str(first.path), optim__base_lr=1e-12, train__seed=5)
    second = api.pretrain(still, toy, tmp_path / "second", figures=False)
    assert "encoder.weights: from encoder.safetensors of " in caplog.text
    place = f"from encoder.safetensors of {first.path / 'checkpoints/epoch_0001'}"
    assert second.environment["start"] == [place, "and its decoder"]
    began, ended = (load_encoder(run)[1].net.state_dict() for run in (first, second))
    assert all(torch.allclose(began[name], ended[name], atol=1e-8) for name in began)
    for name in ("encoder", "decoder"):
        file = first.checkpoint() / f"{name}.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(UserError, match=rf"checkpoint must be whole, .*{name}\.safetensors missing or not as"):
            pretrain(still, toy, tmp_path / "third", quiet=True)
        file.write_bytes(whole)
    shutil.rmtree(first.path)
    api.pretrain(second.config, toy, second.path, resume=True, quiet=True, figures=False)
    with pytest.raises(UserError, match=r"encoder\.weights must be a run folder"):
        pretrain(still, toy, tmp_path / "third", quiet=True)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_a_whole_checkpoint_starts_from_the_weights_again(
    damaged: bool, tiny: Config, toy: Splits, tmp_path: Path
) -> None:
    config, _ = resolve(replace(tiny, train__epochs=1), len(toy.train), toy.train.shape)
    weights = saved(timm_vit(num_classes=0, img_size=toy.train.shape[1:]), tmp_path / "timm")
    config = replace(config, encoder__weights=weights, optim__base_lr=1e-12)
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    if damaged:
        (run.checkpoint() / "encoder.safetensors").write_bytes(b"")
    else:
        shutil.rmtree(run.path / "checkpoints")
    with pytest.warns(UserWarning, match="its training begins anew") if damaged else nullcontext():
        pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    found, want = load_encoder(run)[1].net.state_dict(), load_file(f"{weights}/model.safetensors")
    assert all(torch.allclose(found[name], want[name], atol=1e-8) for name in found)
