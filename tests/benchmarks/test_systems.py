"""What is timed: it trains, it is what it says, and it is refused when it cannot be."""

import mmap
import multiprocessing

import numpy as np
import pytest
import torch
from benchmarks.work import DEVIATION, MEAN, Sizes, Work, random_space
from torchvision import transforms

from benchmarks import machine, ours, peers
from pmae.errors import UserError

TINY = Sizes(width=24, depth=2, heads=2, decoder_width=32, decoder_depth=1, decoder_heads=4)


@pytest.mark.parametrize("method", ["pmae", "mae"])
def test_our_steps_are_those_of_the_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = []
    make = ours._trainer
    monkeypatch.setattr(ours, "_trainer", lambda *args: trainers.append(make(*args)) or trainers[-1])
    steps = ours.build(Work(method, 16, 4, network=TINY), "plain")
    steps(3)
    values, bad = trainers[0].stepper.tally.read()
    assert bad == -1
    assert np.isfinite(values["loss"])
    assert values["masked_share"] == pytest.approx(0.75 if method == "mae" else 0.2, abs=0.1)


def test_the_compiled_engine_compiles_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile(function, **options):
        return lambda *args: calls.append(options) or function(*args)

    monkeypatch.setattr(torch, "compile", compile)
    ours.build(Work("mae", 16, 4, network=TINY), "compiled")(2)
    assert [call["dynamic"] for call in calls] == [False] * 2


@pytest.mark.parametrize("peer", ["transformers", "lightly"])
@pytest.mark.parametrize("method", ["pmae", "mae"])
def test_a_peer_learns(peer: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(peer)
    built, real = [], peers.network
    monkeypatch.setattr(peers, "network", lambda name: lambda work: built.append(real(name)(work)) or built[-1])
    steps = peers.build(Work(method, 16, 4, network=TINY), peer, 0)
    before = [p.detach().clone() for p in built[0].parameters()]
    steps(2)
    moved = [not torch.equal(p, q) for p, q in zip(built[0].parameters(), before, strict=True) if p.grad is not None]
    assert len(moved) > 40
    assert np.mean(moved) > 0.95


def test_the_peers_data_set_is_torchvisions_pipeline() -> None:
    images = Work("mae", 16, 4).noise()
    expected = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([MEAN / 255] * 3, [DEVIATION / 255] * 3)]
    )
    pictures = peers.Pictures(images)
    pictures.transform.transforms = [t for t in pictures.transform.transforms if "Random" not in type(t).__name__]
    assert len(pictures) == 32
    torch.testing.assert_close(pictures[3], expected(images[3].transpose(1, 2, 0)))


def test_a_loader_with_workers_goes_on_past_the_last_image_and_leaves_none_behind() -> None:
    work = Work("mae", 16, 4)
    before = set(multiprocessing.active_children())
    batches = peers._endless(work, 2, pin=False)
    shapes = {next(batches).shape for _ in range(3 * work.images // work.batch)}
    assert shapes == {(4, 3, 16, 16)}
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("side", [64, 96])
def test_beyond_64_pmae_keeps_leading_components(side: int) -> None:
    config = Work("pmae", side, 4).config
    assert config.space.components == (3072 if side == 96 else None)
    assert Work("mae", side, 4).config.space.components is None


def test_many_images_are_few_again_and_again() -> None:
    images = Work("mae", 16, 4, images=4100).noise()
    assert images.shape == (4100, 3, 16, 16)
    np.testing.assert_array_equal(images[4096:], images[:4])


def test_random_directions_keep_the_norm_of_an_image() -> None:
    work = Work("pmae", 16, 2)
    space = random_space(work.config, work.shape, torch.device("cpu"))
    x = torch.randn(8, *work.shape)
    ratio = space.project(x).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert ratio.mean() == pytest.approx(1, abs=0.1)
    assert space.variance_share.sum() == pytest.approx(1, abs=1e-4)


def test_the_limit_is_the_best_rate_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(machine, "seconds", lambda steps, count, device: next(clock) * count)
    assert machine.limit(torch.device("cpu"), "float32", side=64, repeats=3) == 2 * 64**3 / 0.25


def test_peak_memory_grows_with_what_is_held() -> None:
    device = torch.device("cpu")
    machine.forget_peak(device)
    before = machine.peak_bytes(device)
    # From the system itself: an allocator may have kept as much of what other tests freed.
    held = np.frombuffer(mmap.mmap(-1, 256 * 2**20), np.uint8)
    held[:] = 1
    assert machine.peak_bytes(device) - before > 200 * 2**20


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ({"method": "pmea"}, "methods: unknown name 'pmea'; did you mean 'pmae'"),
        ({"side": 36}, r"sizes must be multiples of the patch size \(8\), two patches or more, got 36"),
        ({"side": 8}, "two patches or more, got 8"),
        ({"batch": 1}, "batch must be at least 2, got 1"),
    ],
)
def test_impossible_work_is_refused(work: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Work(**{"method": "mae", "side": 32, "batch": 4, **work})
