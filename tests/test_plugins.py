"""Code of somebody's own, used by name: what docs/extend.md shows, resumed, changed, missing and broken."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.docs.pages import PAGES, files_of

import pmae
from pmae import plugins
from pmae.cli import main
from pmae.config import Config, SpaceConfig, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.files import read_tensors
from pmae.method import build_method
from pmae.plugins import load
from pmae.spaces import build_space
from pmae.sweep.grid import grid_specs
from pmae.train.checkpoint import load_encoder, load_space
from pmae.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("registry", "no_figures")
FILES = files_of(PAGES["extend.md"])
MINE = {
    "space__name": "random_basis(seed=3)",
    "objective__loss": "huber(delta=2.0)",
    "objective__contrastive": "teacher",
    "objective__contrastive_weight": 0.5,
    "augment__extra": ("jitter(strength=0.2)",),
    "encoder__name": "convnet(width=16)",
    "encoder__width": None,
    "encoder__depth": None,
    "encoder__heads": None,
    "train__callbacks": ("early_stop(patience=9)", "move_teacher(momentum=0.5)"),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the current folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settled(config: Config, splits: Splits) -> Config:
    return resolve(config, len(splits.train), splits.train.shape, gpu=False)[0]


def everything(tiny: Config, toy: Splits) -> Config:
    for name in FILES:
        load(name)
    return settled(replace(tiny, **MINE), toy)


def test_the_files_are_short() -> None:
    assert FILES.keys() >= {f"my_{kind}.py" for kind in plugins.GROUPS}
    assert all(len(text.strip().splitlines()) <= 30 for text in FILES.values())


def test_all_of_it_at_once_is_recorded_and_a_stopped_run_equals_a_whole_one(
    files: Path, tiny: Config, toy: Splits
) -> None:
    config = everything(tiny, toy)
    whole = pretrain(config, toy, files / "whole", quiet=True)
    recorded = json.loads((whole.path / "config.json").read_text())
    assert recorded["space"]["name"] == "random_basis(seed=3)"
    lines = recorded["train"]["plugins"]
    assert [line.split()[:3] for line in lines] == [
        ["space", "random_basis", "my_space.py"],
        ["objective", "huber", "my_objective.py"],
        ["encoder", "convnet", "my_encoder.py"],
        ["contrastive", "teacher", "my_teacher.py"],
        ["augmentation", "jitter", "my_augmentation.py"],
        ["callback", "early_stop", "my_callback.py"],
        ["callback", "move_teacher", "my_teacher.py"],
    ]
    pretrain(config, toy, files / "halves", quiet=True, until=1)
    halves = pretrain(config, toy, files / "halves", quiet=True, resume=True)
    last = [run.checkpoint() for run in (whole, halves)]
    for name in ("encoder", "decoder", "extra", "optimizer"):
        one, other = (read_tensors(path / f"{name}.safetensors") for path in last)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    teacher = read_tensors(last[0] / "decoder.safetensors", "projector.encoder.net.")
    student = read_tensors(last[0] / "encoder.safetensors")
    assert any(not torch.equal(teacher[key], student[key]) for key in student)
    assert load_encoder(whole)[1].width == 16


def test_each_part_does_what_it_says(files: Path, tiny: Config, toy: Splits) -> None:
    model = build_method(everything(tiny, toy), toy.train.shape)
    predicted, target = torch.tensor([[0.0, 5.0, 1.0]]), torch.zeros(1, 3)
    assert model.objective is not None
    loss = model.objective(predicted, target, torch.tensor([[True, True, False]]))
    assert loss.item() == pytest.approx(2.0 * (5.0 - 1.0))  # delta (|e| - delta / 2)
    seeds = [build_space(SpaceConfig(f"random_basis(seed={seed})"), (1, 2, 2)).basis for seed in (3, 3, 4)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


def test_losses_of_ones_own_are_trained_on(files: Path, tiny: Config, toy: Splits) -> None:
    load("my_objective.py")
    runs = [
        pretrain(settled(replace(tiny, objective__loss=loss, train__epochs=1), toy), toy, files / loss[:5], quiet=True)
        for loss in ("squared", "huber(delta=1e9)")
    ]
    # Below its threshold Huber's loss is half of the squared error; R2 is of the squared error in both.
    first = [build_method(run.config, toy.train.shape, load_space(run)) for run in runs]
    for model in first:
        model.load_state_dict(first[0].state_dict())
    x, generator = torch.randn(8, *toy.train.shape), torch.Generator().manual_seed(0)
    draw = first[0].draw(8, 0.2, generator)
    one, half = (model(x, draw) for model in first)
    assert half.loss.item() == pytest.approx(one.loss.item() / 2, rel=1e-4)
    assert torch.equal(one.error, half.error)


def test_a_callback_ends_a_run_which_can_be_resumed(files: Path, tiny: Config, toy: Splits) -> None:
    (files / "my_stop.py").write_text(
        "import pmae\n@pmae.register('callback', 'halt')\nclass Halt(pmae.Callback):\n"
        "    def __init__(self, *, at: int):\n        self.at, self.seen = at, []\n"
        "    def on_start(self, training): self.seen.append('start')\n"
        "    def on_step(self, training):\n        self.seen.append(training.step)\n"
        "        if training.step == self.at: training.stop('enough')\n"
        "    def on_epoch(self, training): self.seen.append(training.metrics['step'])\n"
        "    def on_end(self, training): (training.run.path / 'seen').write_text(str(self.seen))\n"
    )
    load("my_stop.py")
    config = settled(replace(tiny, train__callbacks=("halt(at=6)",)), toy)
    run = pretrain(config, toy, files / "run", quiet=True)
    assert (run.path / "seen").read_text() == "['start', 1, 2, 3, 4, 4, 5, 6]"
    assert run.checkpoint().name == "epoch_0001_step_000002"
    assert run.metrics()[-1]["step"] == 6
    assert "held_out_r2" in run.results["pretrain"]
    assert (run.path / "samples.safetensors").exists()
    assert pretrain(config, toy, run.path, resume=True, quiet=True).metrics()[-1]["step"] == 12


def test_a_command_to_copy_is_quoted_and_imports_what_this_one_did(files: Path) -> None:
    load("my_space.py")
    words = shlex.split(plugins.command_line("report", "runs/name=random_basis(seed=3)", "-o", "a page.html"))
    assert words == ["pmae", "report", "runs/name=random_basis(seed=3)", "-o", "a page.html", "--import", "my_space.py"]


def test_a_name_that_nobody_registered_is_refused_before_any_image_is_read(tiny: Config, tmp_path: Path) -> None:
    for setting in ("space__name", "objective__loss"):
        config = replace(tiny, **{setting: "nobody"}, data__source=str(tmp_path / "none"))
        with pytest.raises(UserError, match="unknown name 'nobody'"):
            pmae.pretrain(config, out=tmp_path / "run")
        with pytest.raises(UserError, match="unknown name 'nobody'"):
            grid_specs(tiny, {setting.replace("__", "."): ["pca" if "space" in setting else "squared", "nobody"]}, [0])
    assert not (tmp_path / "run").exists()


def test_a_run_needs_its_plug_ins_as_they_were(files: Path, tiny: Config, toy: Splits) -> None:
    load("my_space.py")
    config = settled(replace(tiny, space__name="random_basis(seed=1)", train__epochs=2), toy)
    run = pretrain(config, toy, files / "run", quiet=True, until=1)
    before = (run.path / "config.json").read_bytes()
    (files / "my_space.py").write_text(FILES["my_space.py"] + "\n# changed\n")
    with pytest.raises(UserError, match=r"space 'random_basis' must be what the run began with: 'my_space.py' has the"):
        pmae.pretrain(run.config, toy, run.path, resume=True, quiet=True)
    del plugins.TABLES["space"]["random_basis"]
    with pytest.raises(UserError, match=r"'random_basis' must be registered before this run is used: import 'my_space"):
        pmae.pretrain(run.config, toy, run.path, resume=True, quiet=True)
    with pytest.raises(UserError, match="must be registered before this run is used"):
        load_encoder(run)
    assert (run.path / "config.json").read_bytes() == before
    assert len(run.checkpoints()) == 1


@pytest.mark.parametrize(
    ("kind", "body", "settings", "message"),
    [
        ("objective", "def f(p, t, h): return (p - t).square()", "objective__loss", r"must be of shape \(32,\), got"),
        (
            "objective",
            "def f(p, t, h): return p / nothing",
            "objective__loss",
            r"'f' failed .*NameError.*my_f.py, line 3",
        ),
        ("augmentation", "def f(x, noise): return x[:1]", "augment__extra", r"keep the shape \(32, 3, 8, 8\), got"),
        (
            "callback",
            "def f(training): raise KeyError('gone')",
            "train__callbacks",
            r"KeyError: 'gone'.*my_f.py, line 3",
        ),
        (
            "contrastive",
            "class f:\n  def __init__(self, e): pass",
            "objective__contrastive",
            "'f' must be a torch module, called with features",
        ),
        ("encoder", "def f(shape): return 3", "encoder__name", "encoder.name 'f' cannot take images"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_wrong_with_a_plug_in_is_one_sentence(
    kind: str, body: str, settings: str, message: str, tmp_path: Path, tiny: Config, toy: Splits
) -> None:
    (tmp_path / "my_f.py").write_text(f"import pmae\n@pmae.register({kind!r}, 'f')\n{body}\n")
    load(str(tmp_path / "my_f.py"))
    many = settings in ("augment__extra", "train__callbacks")
    given = {**{key: None for key in MINE if key.startswith("encoder__") and kind == "encoder"}, settings: "f"}
    given |= {settings: ("f",)} if many else {}
    given |= {"objective__contrastive_weight": 1.0} if kind == "contrastive" else {}
    with pytest.raises(UserError, match=message):
        pretrain(settled(replace(tiny, **given), toy), toy, tmp_path / "run", quiet=True)
    assert kind == "callback" or not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random_basis(seed='a')", "random_basis.seed must be a whole number, got 'a'"),
        ("random_basis(sed=1)", "option of random_basis: unknown name 'sed'; did you mean 'seed'"),
        ("random_basis(3)", r"space.name must be a name, or one with options as name\(key=value\)"),
        ("random_bases", "space.name: unknown name 'random_bases'; did you mean 'random_basis'"),
    ],
)
def test_options_are_checked(files: Path, name: str, message: str) -> None:
    load("my_space.py")
    with pytest.raises(UserError, match=message):
        build_space(SpaceConfig(name), (1, 4, 4))


def test_names_are_registered_once() -> None:
    with pytest.raises(UserError, match="kind: unknown name 'spaces'"):
        pmae.register("spaces", "x")
    with pytest.raises(UserError, match="name must be one that no other space has, got 'pca'"):
        pmae.register("space", "pca")(type("PCA", (), {}))
    for name in ("nt_xent", "not a name"):
        with pytest.raises(UserError, match="name must be a new Python name"):
            pmae.register("contrastive", name)


def test_imports_that_fail_are_told(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "my_broken.py").write_text("1 / 0")
    for given, message in (
        ("my_broken.py", "import of 'my_broken.py' failed: ZeroDivisionError: division by zero"),
        ("my_gone.py", "import must be a module or a file that exists, got 'my_gone.py'"),
        ("my_gone", "import of 'my_gone' failed: ModuleNotFoundError"),
    ):
        assert main(["data", "digits", "--import", given]) == 2
        assert message in capsys.readouterr().err


def test_an_installed_package_offers_names_and_other_processes_know_imported_ones(files: Path) -> None:
    shutil.copy("my_space.py", "installed.py")
    info = files / "installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pmae.spaces]\nrandom_basis = installed:RandomBasis\n")
    code = "from pmae.spaces import build_space; from pmae.config import SpaceConfig\n"
    code += "for name in ('random_basis(seed=2)', 'other'): print(type(build_space(SpaceConfig(name), (1, 2, 2))))"
    (files / "my_other.py").write_text(FILES["my_space.py"].replace("random_basis", "other"))
    paths = os.pathsep.join([str(files), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, plugins.VARIABLE: str(files / "my_other.py")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["<class", "'installed.RandomBasis'>", "<class", "'my_other.RandomBasis'>"], (
        done.stderr
    )
