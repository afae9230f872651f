"""The model card: what a stranger needs, nothing that is private, and scores of this epoch alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pmae.export import export


def scored(accuracy: float) -> dict[str, Any]:
    """What evaluation writes about one representation, shortened to what the card reads."""
    metric = {"value": accuracy, "low": accuracy - 0.02, "high": accuracy + 0.02, "std": None}
    entry = {
        "protocol": "linear",
        "pooling": "cls",
        "split": "test",
        "images": 50,
        "metrics": {"accuracy": metric},
        "runs": [{"seed": 0}],
    }
    return {"preset": "strong", "data": {"name": "toy", "classes": ["a", "b"]}, "results": [entry]}


def card(run: Any, out: Path, epoch: int | None = None) -> str:
    export(run.path, "timm", out, epoch)
    return (out / "README.md").read_text()


def test_the_card_tells_data_input_use_and_settings(make_run: Any, tmp_path: Path) -> None:
    text = card(make_run(), tmp_path / "mine")
    assert text.startswith("---\nlibrary_name: timm\n")
    assert 'timm.create_model("local-dir:mine", pretrained=True)' in text
    assert "3 x 16 x 16 (channels, height, width), trained on uint8, values 0 to 255." in text
    assert (
        "the short side to 16 (bicubic, with antialiasing), then the centre of 16 x 16. Photographs are upright" in text
    )
    assert "toy: 64 train images.\n- a note" in text
    assert "Not evaluated with labels." in text
    assert "encoder.width               16" in text
    assert "/home/somebody" not in text


@pytest.mark.parametrize(("epoch", "shown", "hidden"), [(None, "62.0 (60.0–64.0)", "51.0"), (1, "51.0", "62.0")])
def test_the_card_has_the_scores_of_its_own_epoch_and_the_baselines(
    make_run: Any, tmp_path: Path, epoch: int | None, shown: str, hidden: str
) -> None:
    run = make_run()
    found = {"pmae epoch 1 [strong]": scored(0.51), "pmae epoch 2 [strong]": scored(0.62)}
    signals = {"epoch": 2, "held_out_r2": 0.345}
    run.add_results(evaluation={**found, "random weights [strong]": scored(0.4)}, pretrain=signals)
    text = card(run, tmp_path / "out", epoch)
    assert f"pmae epoch {epoch or 2} (CLS) | linear probe | strong | toy test | {shown}" in text
    assert "| random weights (CLS) | linear probe | strong | toy test | 40.0" in text
    assert hidden not in text
    assert ("on held-out images: 0.345" in text) == (epoch is None)


def test_the_card_says_which_images_r2_is_of(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    run.add_results(pretrain={"epoch": 2, "train_r2": 0.2})
    assert "R2 of the hidden variance on training images, as none were held out: 0.200" in card(run, tmp_path / "out")


def test_no_setting_of_the_card_tells_where_files_lay(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    settings = json.loads((run.path / "config.json").read_text())
    places = {"data.source": "images", "data.root": "sets", "data.cache": "decoded", "probe.data": "labelled"}
    for name, place in {**places, "encoder.weights": "start"}.items():
        section, key = name.split(".")
        settings[section][key] = f"/home/somebody/{place}"
    (run.path / "config.json").write_text(json.dumps(settings))
    assert "/home/somebody" not in card(run, tmp_path / "out")


def test_names_and_notes_stay_text(make_run: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)> ![x](http://evil.example/x.png)\n\n# `head`"
    run = make_run()
    described = run.environment
    described["data"] |= {"name": evil, "notes": [evil], "counts": {"train": 3, evil: 3}}
    (run.path / "environment.json").write_text(json.dumps(described))
    evaluated = scored(0.6)
    evaluated["data"]["name"] = evil
    run.add_results(evaluation={"pmae epoch 2 [strong]": evaluated})
    text = card(run, tmp_path / "<b>`out`")
    assert text.count("&lt;img src=x") == 5, "title, data, counts, note, table"
    assert "<img" not in text
    assert "<b>" not in text
    assert "![x](" not in text
    assert not re.search(r"^# `", text, re.MULTILINE)
    assert 'create_model("local-dir:FOLDER"' in text
