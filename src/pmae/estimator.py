"""The scikit-learn front door: `PMAE(masked_variance=0.2, epochs=50).fit(X).transform(X_new)`."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from pmae.config import Config, replace
from pmae.config_file import describe
from pmae.data.batches import Batches
from pmae.data.images import ImageSet, Splits, warn_of_units
from pmae.embed import Embedder, feature_names, require_pooling
from pmae.errors import Interrupted, UserError, require, require_known
from pmae.estimator_inputs import is_flat, read_images
from pmae.evaluate.probes import online_probe
from pmae.files import temporary_folder
from pmae.pretraining import resolved
from pmae.report.advice import LEARNED
from pmae.report.page import save_figures
from pmae.runs import Run
from pmae.train import loop
from pmae.train.environment import describe_environment, pick_device, pick_precision
from pmae.train.journal import say
from pmae.train.monitor import hidden_r2
from pmae.train.setup import dry_build
from pmae.train.trained import load_trained, write_finished, write_trained

POOLINGS = ("mean", "cls", "both", "last_4")
SETTINGS = {
    "space": "space__name",
    "masked_variance": "masking__masked_variance",
    "masked_patches": "masking__masked_patches",
    "encoder": "encoder__name",
    "patch_size": "encoder__patch_size",
    "epochs": "train__epochs",
    "batch_size": "train__batch_size",
    "base_lr": "optim__base_lr",
    "device": "train__device",
}
"""Which setting of a configuration each parameter is, as `config.replace` takes it."""


class PMAE(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Images to features, learned without labels by predicting hidden components from the visible ones.

    >>> model = PMAE(masked_variance=0.2, epochs=50, random_state=0)
    >>> features = model.fit(images).transform(others)

    X is (N, H, W), (N, H, W, C), (N, C, H, W), or flat (N, D) with `image_shape`, an array or a tensor, of any range.
    Flat X without `image_shape` is a table: every column is a token of its own, standardized by itself, and nothing is
    cropped or flipped; more than 256 columns are taken for a forgotten `image_shape` and refused.

    A parameter that is None is as `config` says, and what that leaves open follows from the data, as for
    `pmae pretrain`. The same `random_state` gives the same features, bit for bit on one CPU. The whole model is held on
    the CPU and pickled with the estimator. There is no `partial_fit`: the space is fitted to all images at once.

    Parameters
    ----------
    masked_variance : share of the variance that is hidden, 0.2 if not given; for every space but "pixels".
    masked_patches : share of the patches that is hidden, 0.75 if not given; for "pixels".
    space : where masking happens: "pca" (PMAE), "pixels" (MAE) or another of `config.SpaceConfig`.
    epochs, batch_size, base_lr : length and step of training; the peak rate is base_lr x batch_size / 256. Without
        base_lr, small batches have the peak rate of large ones. Without epochs, training takes minutes to hours on a
        CPU; `verbose` tells how long.
    encoder, patch_size : "vit_tiny" or a timm model, and the side of its patches in pixels. Without a GPU, and if
        `config` says nothing of their sizes, encoder and decoder are small ones.
    pooling : "mean" of the patch tokens, the "cls" token, "both" one after the other, or "last_4": the mean after each
        of the last four blocks.
    image_shape : (H, W), (H, W, C) or (C, H, W) of the rows of a flat X.
    augment : whether to crop and flip at random while training; not for tables if not given.
    warm_start : whether a further `fit` trains the weights on instead of starting anew. The statistics and the space
        stay those of the first fit; optimizer and schedule begin again.
    random_state : an int is the seed itself; a RandomState, or NumPy's own for None, draws one at every fit.
    device : "auto", "cpu", "cuda" or "cuda:N".
    out : folder in which to keep the run, with its figures; each fit needs a new one. None keeps nothing on the disk.
    config : a `pmae.Config` for every other setting; its seed is not used.
    verbose : whether to print settings and progress.

    Attributes
    ----------
    fitted_ : model, statistics, resolved settings and journal; `fitted_.model.encoder.net` is a plain timm model.
    image_shape_ : (C, H, W) of the images.
    n_features_in_ : C x H x W.
    feature_names_in_ : names of the columns, for a data frame.
    """

    def __init__(
        self,
        masked_variance: float | None = None,
        *,
        masked_patches: float | None = None,
        space: str | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        base_lr: float | None = None,
        encoder: str | None = None,
        patch_size: int | None = None,
        pooling: str = "mean",
        image_shape: tuple[int, ...] | None = None,
        augment: bool | None = None,
        warm_start: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str | None = None,
        out: str | Path | None = None,
        config: Config | None = None,
        verbose: bool = False,
    ) -> None:
        self.masked_variance = masked_variance
        self.masked_patches = masked_patches
        self.space = space
        self.epochs = epochs
        self.batch_size = batch_size
        self.base_lr = base_lr
        self.encoder = encoder
        self.patch_size = patch_size
        self.pooling = pooling
        self.image_shape = image_shape
        self.augment = augment
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.out = out
        self.config = config
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on the images; `y` is not looked at."""
        images = self._read(X, fitting=True)
        splits = Splits("array", ImageSet(images))
        table = is_flat(X) and self.image_shape is None
        settings = self._settings(table)
        config, reasons = resolved(settings, splits)
        # Before it trains: `transform` is what pools.
        require_pooling(self.pooling, dry_build(config, splits.train.shape, pick_device(config.train.device)).encoder)
        if self.verbose:
            say(describe(config, reasons))
        with self._folder() as folder:
            self.fitted_ = load_trained(self._train(config, splits, folder))
        self.image_shape_, self.n_features_in_ = self.fitted_.shape, math.prod(self.fitted_.shape)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features (N, width) of the images, float32."""
        check_is_fitted(self)
        images = self._read(X, fitting=False)
        warn_of_units(images, self.fitted_.environment["data"].get("dtype", ""), stacklevel=3)
        model, device = self.fitted_.model, self._device()
        # The fitted parts stay where they can be pickled and loaded on any machine.
        parts = (model.encoder, self.fitted_.standardize)
        encoder, standardize = parts if device.type == "cpu" else copy.deepcopy(parts)
        return Embedder(encoder, standardize, self.pooling, device)(images)

    def score(self, X: Any, y: Any = None) -> float:
        """R2 of the hidden variance on up to 2,048 images; it compares models that hide the same share."""
        check_is_fitted(self)
        images = self._read(X, fitting=False)
        device, config = self._device(), self.fitted_.config
        model, standardize = copy.deepcopy((self.fitted_.model, self.fitted_.standardize))
        model.precision = pick_precision(config.train.precision, device)
        batches = Batches(images, device, config.data.keep_on)
        found = hidden_r2(model.to(device), standardize.to(device), batches, config.train.seed, "r2")
        return found["r2"]

    def save(self, path: str | Path) -> Run:
        """Write a run folder that `load` and every command of `pmae` read; it needs no pickle."""
        check_is_fitted(self)
        return write_finished(path, self.fitted_)

    @classmethod
    def load(cls, run: Run | str | Path, **parameters: Any) -> Self:
        """The fitted estimator of a run folder, at its last checkpoint; `parameters` are those of the constructor."""
        fitted = load_trained(Run(run))
        made = cls(**{"config": fitted.config, "random_state": fitted.config.train.seed, **parameters})
        made.fitted_, made.image_shape_, made.n_features_in_ = fitted, fitted.shape, math.prod(fitted.shape)
        return made

    def _read(self, X: Any, fitting: bool) -> np.ndarray:
        require_known("pooling", [self.pooling], POOLINGS)
        return read_images(self, X, fitting, (self.config or Config()).data.layout)

    def _settings(self, table: bool) -> Config:
        changes: dict[str, Any] = {"encoder__patch_size": 1, "data__standardize": "pixel"} if table else {}
        if table or self.augment is not None:
            changes |= {"augment__crop": bool(self.augment), "augment__flip": bool(self.augment)}
        given = {name: getattr(self, parameter) for parameter, name in SETTINGS.items()}
        changes |= {name: value for name, value in given.items() if value is not None}
        seed = self.random_state
        drawn = seed if isinstance(seed, int | np.integer) else check_random_state(seed).randint(2**31 - 1)
        return replace(Config() if self.config is None else self.config, **changes, train__seed=drawn)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Where the run lives: in `out`, or in a folder that goes when the model is in memory."""
        if self.out is not None:
            yield Path(self.out)
            return
        with temporary_folder("pmae-") as folder:
            try:
                yield folder / "run"
            except Interrupted:
                # What it saved goes with the folder, so there is nothing to continue and nothing to tell.
                raise KeyboardInterrupt from None

    def _train(self, config: Config, splits: Splits, folder: Path) -> Run:
        again = self.warm_start and hasattr(self, "fitted_")
        if self.out is None:
            config = replace(config, train__checkpoint_every=config.train.epochs, train__keep=1)
        if again:
            # Weights can be trained on only in the network and the space that they belong to. They have had their
            # large patches: a first stage would train others, which nobody would go on with.
            shape, before = splits.train.shape, replace(self.fitted_.config, encoder__first_patch_size=0)
            config = replace(config, encoder__first_patch_size=0)
            if shape != self.fitted_.shape:
                raise UserError(f"X must have images of shape {self.fitted_.shape} for warm_start, got {shape}")
            for part in ("space", "encoder", "decoder"):
                old, new = getattr(before, part), getattr(config, part)
                require(old == new, f"{part} settings", f"those of the first fit for warm_start, {old}", new)
            data = describe_environment(splits, pick_device(config.train.device))
            write_trained(folder, self.fitted_._replace(config=config, environment=data))
        watch = None if self.out is None else online_probe(splits)
        run = loop.pretrain(config, splits, folder, again, not self.verbose, watch)
        if self.out is not None:
            save_figures(run)
        _warn_if_hardly_learned(run, len(splits.train))
        return run

    def _device(self) -> torch.device:
        return pick_device(self.device or self.fitted_.config.train.device)

    @property
    def _n_features_out(self) -> int:
        return len(feature_names(self.fitted_.model.encoder, self.pooling))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "fitted_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def _warn_if_hardly_learned(run: Run, count: int) -> None:
    """As scikit-learn's estimators do that stop too early: nothing else would tell, where nothing is printed."""
    config, r2 = run.config, run.results["pretrain"].get("train_r2")
    if r2 is None or r2 >= LEARNED or config.objective.contrastive_weight:  # which teaches before R2 rises
        return
    after = f"{config.train.epochs} epoch{'s' * (config.train.epochs != 1)} of {count:,} images"
    told = f"PMAE has hardly learned: R2 of what is hidden is {r2:.2f} after {after}, where 0 is a guess"
    warnings.warn(f"{told}; give it more epochs", ConvergenceWarning, stacklevel=4)
