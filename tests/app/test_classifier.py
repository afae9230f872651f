"""The page of a classifier: what it says of a dropped image is what `pmae predict` says, and why."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity
from tests.classify.conftest import CLASSES, make_run, stripes, write_folder

import pmae
from pmae.app import explorer
from pmae.app.classifier import Explained, answer, build, evidence, labelled_images
from pmae.classify import FinetuneConfig
from pmae.cli import main
from pmae.data.images import as_tensor
from pmae.errors import UserError
from pmae.models.maps import token_maps

from .test_explorer import TEXT, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, the images it learned from, and new ones."""
    place = tmp_path_factory.mktemp("classifier")
    write_folder(place / "labelled", 12)
    write_folder(place / "new", 1, seed=7)
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(place / "new/noise.png")
    config = FinetuneConfig(method="linear")
    pmae.finetune(make_run(place / "run"), place / "labelled", place / "clf", config, device="cpu")
    return place


@pytest.fixture(scope="module")
def material(folder: Path) -> Explained:
    classifier = pmae.load_classifier(folder / "clf", "cpu")
    return Explained(classifier, labelled_images(str(folder / "clf"), classifier, None, print))


def test_it_says_what_predict_says(folder: Path, material: Explained, tmp_path: Path) -> None:
    words = ["predict", str(folder / "clf"), "--data", str(folder / "new"), "-o", str(tmp_path / "p.csv")]
    assert main([*words, "--device", "cpu"]) == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        said = answer(material, str(folder / "new" / row["file"]))
        assert f"{row['label']}: {100 * float(row['probability']):.1f}%" in said
        assert ("unlike the training images" in said) == (row["drifted"] == "1")
    assert {row["drifted"] for row in rows if row["file"] == "noise.png"} == {"1"}


def test_neighbours_are_the_nearest_labelled_images(folder: Path, material: Explained) -> None:
    path = folder / "new/down/001.png"
    said = answer(material, str(path))
    assert material.labelled is not None
    images = np.concatenate(
        [np.asarray(material.labelled.images.images), np.asarray(Image.open(path)).transpose(2, 0, 1)[None]]
    )
    features = material.classifier.embedder(images)
    like = cosine_similarity(features[-1:], features[:-1])[0]
    order = np.argsort(-like)[:12]
    captions = re.findall(r"<figcaption>([^<]*)</figcaption>", said)[2:]
    assert captions == [f"{like[i]:.2f} {CLASSES[material.labelled.targets[i]]}" for i in order]


def test_evidence_adds_up_to_the_logits(material: Explained) -> None:
    own = material.classifier
    image = stripes(np.array([1]), seed=3).transpose(0, 3, 1, 2)
    with torch.no_grad():
        maps = token_maps(own.encoder, own.embedder.standardize(as_tensor(image)))
    logits, bias = own.logits(own.embedder(image))[0], own.head[1].numpy()
    for label in range(3):
        expected = (logits - bias)[label] - (logits - bias).mean()
        assert evidence(own, maps, label).mean() == pytest.approx(expected, abs=1e-4)


def test_other_sizes_are_converted_and_other_files_refused(folder: Path, material: Explained, tmp_path: Path) -> None:
    Image.open(folder / "new/down/001.png").resize((80, 80)).save(tmp_path / "large.jpg", quality=95)
    assert material.read(tmp_path / "large.jpg").shape == (3, 8, 8)
    assert "down: " in answer(material, str(tmp_path / "large.jpg"))
    (tmp_path / "words.png").write_text("no image")
    assert "upload must be an image" in answer(material, str(tmp_path / "words.png"))
    assert "Drop an image" in answer(material, None)


def test_without_labelled_images_a_picture_has_its_own_colours(folder: Path) -> None:
    alone = Explained(pmae.load_classifier(folder / "clf", "cpu"))
    image = alone.read(folder / "new/down/001.png")
    np.testing.assert_allclose(alone.pictures(image[None])[0], image.transpose(1, 2, 0) / 255)


def test_labelled_images_that_moved_are_done_without_and_others_refused(folder: Path, tmp_path: Path) -> None:
    classifier, said = pmae.load_classifier(folder / "clf", "cpu"), list[str]()
    classifier.save(tmp_path / "c")
    assert labelled_images(str(tmp_path / "c"), classifier, None, said.append) is None
    (tmp_path / "c/results.json").write_text('{"data": {"source": "/nowhere"}}')
    assert labelled_images(str(tmp_path / "c"), classifier, None, said.append) is None
    assert said[0].startswith("no neighbours: ")
    assert "--data" in answer(Explained(classifier), str(folder / "new/noise.png"))
    with pytest.raises(UserError, match="the classifier's classes and shape"):
        labelled_images(str(tmp_path / "c"), classifier, "digits", print)


@pytest.fixture
def address(material: Explained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gradio", reason="gradio is not installed")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    page, address = explorer.open_page(material, None, False, build)
    yield address
    page.close(verbose=False)


def test_an_image_is_dropped_in_a_browser(address: str, browser: Any, folder: Path) -> None:
    browser.get(address)
    until(lambda: "Drop an image" in browser.execute_script(TEXT, "#answer"), "the page")
    field = browser.find_element("css selector", "#drop input[type=file]")
    field.send_keys(str(folder / "new/down/001.png"))
    until(lambda: "down: " in browser.execute_script(TEXT, "#answer"), "the answer")
    assert browser.execute_script("return document.querySelectorAll('#answer figure img').length") == 2 + 12
