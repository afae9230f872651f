"""Tracking: the curves are the lines of metrics.jsonl, once each, also after a resume, and nothing is sent."""

import csv
import json
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmae.config import Config, replace
from pmae.data.images import Splits
from pmae.derive import resolve
from pmae.errors import UserError
from pmae.runs import Run
from pmae.train.loop import pretrain
from pmae.train.trackers import CSV

Points = dict[str, list[tuple[int, float]]]


def settled(config: Config, splits: Splits, track: str) -> Config:
    return resolve(replace(config, train__track=track, train__epochs=2), len(splits.train), splits.train.shape)[0]


def logged(run: Run) -> Points:
    """Every curve of metrics.jsonl; of two lines at one step the later counts, as in a picture."""
    points: dict[str, dict[int, float]] = {}
    for line in run.metrics():
        for name, value in line.items():
            if name != "step":
                points.setdefault(name, {})[line["step"]] = value
    return {name: sorted(curve.items()) for name, curve in points.items()}


def lose_the_last_epoch(run: Run) -> None:
    """As if the machine had died after logging the last epoch and before saving it."""
    shutil.rmtree(run.checkpoint())


def test_tensorboard_shows_what_was_logged_and_a_resume_continues_it(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settled(tiny, toy, "tensorboard")
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    lose_the_last_epoch(run)
    pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    assert len(list((run.path / "tensorboard").iterdir())) == 2
    reader = EventAccumulator(str(run.path / "tensorboard"))
    reader.Reload()
    want = logged(run)
    assert {"loss", "r2", "lr", "masked_share", "images_per_second", "held_out_r2", "epoch"} <= want.keys()
    assert sorted(reader.Tags()["scalars"]) == sorted(want)
    for name, curve in want.items():
        found = {event.step: event.value for event in reader.Scalars(name)}
        assert list(found) == [step for step, _ in curve], name
        assert list(found.values()) == pytest.approx([value for _, value in curve], rel=1e-6), name
    assert [event.step for event in reader.Scalars("loss")] == [2, 4, 6, 8]
    assert [event.step for event in reader.Images("reconstructions")] == [4, 8]
    assert "config/text_summary" in reader.Tags()["tensors"]


def test_mlflow_keeps_one_run_with_settings_curves_and_pictures(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    connected = _watch_connections(monkeypatch)
    config = replace(settled(tiny, toy, "mlflow"), train__project="faces")
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    lose_the_last_epoch(run)
    pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    client = mlflow.MlflowClient((run.path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("faces")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["encoder.width"] == "32"
    for name, curve in logged(run).items():
        points = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, name)}
        assert points == pytest.approx(dict(curve)), name
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["reconstructions.png"]
    assert [address for address in connected if not _local(address)] == []


def test_csv_is_a_table_of_every_number_once(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    config = settled(tiny, toy, "csv")
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    lose_the_last_epoch(run)
    pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    with (run.path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    want = [(line["step"], key, value) for line in run.metrics() for key, value in line.items() if key != "step"]
    assert [(int(row["step"]), row["name"], float(row["value"])) for row in rows] == want


def test_a_tracker_that_is_gone_is_refused_at_the_start_and_let_go_of_later(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="'mlflow' must be reachable, or none"):
        pretrain(settled(tiny, toy, "mlflow"), toy, tmp_path / "gone", quiet=True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    config = settled(tiny, toy, "csv")
    broken = tmp_path / "run" / "metrics.csv"
    write = CSV.write

    def fail(self: CSV, step: int, values: dict[str, float]) -> None:
        if step > 2:
            raise ConnectionError("no route to host")
        write(self, step, values)

    monkeypatch.setattr(CSV, "write", fail)
    with pytest.warns(UserWarning, match=r"the tracker failed and gets no more of this run \(no route to host\)"):
        run = pretrain(config, toy, tmp_path / "run", quiet=True)
    assert {int(line.split(",")[0]) for line in broken.read_text().splitlines()[1:]} == {2}
    assert run.metrics()[-1]["step"] == 8


def test_wandb_writes_offline_files_under_one_id_and_opens_no_connection(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    connected = _watch_connections(monkeypatch)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    config = settled(tiny, toy, "wandb")
    run = pretrain(config, toy, tmp_path / "run", quiet=True)
    lose_the_last_epoch(run)
    pretrain(config, toy, tmp_path / "run", resume=True, quiet=True)
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    started = [_records(file) for file in files]
    identity = json.loads((run.path / "wandb.json").read_text())["id"]
    assert {found["id"] for found in started} == {identity}
    assert started[0]["config"]["encoder"]["width"] == 32
    curves = {name: dict(curve) for name, curve in logged(run).items()}
    first, second = (found["points"] for found in started)
    for name, curve in curves.items():
        together = first[name] | second[name]
        assert together == pytest.approx(curve), name
    assert sorted(second["loss"]) == [6, 8]
    assert [address for address in connected if not _local(address)] == []


def _watch_connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every address that this process connects a socket to."""
    connected: list[Any] = []
    original = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        connected.append(address)
        original(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return connected


def _local(address: Any) -> bool:
    return isinstance(address, str | bytes) or address[0] in ("127.0.0.1", "::1", "localhost")


def _records(file: Path) -> dict[str, Any]:
    """The id, settings and curves in a file of Weights & Biases."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"points": {}}
    for message in _messages(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField("run"):
            found["id"] = record.run.run_id
            found["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in values.items():
                if not name.startswith("_"):
                    found["points"].setdefault(name, {})[values["_step"]] = value
    return found


def _messages(log: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: after 7 bytes of magic, blocks of 32 KiB with pieces (checksum, length, kind)."""
    at, message = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        message += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


@pytest.mark.parametrize("track", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(
    tiny: Config, toy: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, track: str
) -> None:
    monkeypatch.setitem(sys.modules, track, None)
    with pytest.raises(UserError, match=rf"train.track '{track}' needs {track}.*pip install 'pmae\[tracking\]'"):
        pretrain(settled(tiny, toy, track), toy, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_tracking_is_off_by_default_and_changes_nothing_else(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    plain = pretrain(settled(tiny, toy, "none"), toy, tmp_path / "plain", quiet=True)
    tracked = pretrain(settled(tiny, toy, "tensorboard"), toy, tmp_path / "tracked", quiet=True)
    assert Config().train.track == "none"
    assert {p.name for p in tracked.path.iterdir()} - {p.name for p in plain.path.iterdir()} == {"tensorboard"}
    weights = [(run.checkpoint() / "encoder.safetensors").read_bytes() for run in (plain, tracked)]
    assert weights[0] == weights[1]


def test_a_resumed_run_may_change_its_tracker(tiny: Config, toy: Splits, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = pretrain(settled(tiny, toy, "none"), toy, tmp_path / "run", quiet=True)
    lose_the_last_epoch(run)
    pretrain(settled(tiny, toy, "tensorboard"), toy, tmp_path / "run", resume=True, quiet=True)
    assert (run.path / "tensorboard").is_dir()
    assert run.config.train.track == "tensorboard"
