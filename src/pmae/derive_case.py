"""What the rules of `pmae.derive` look at: the data, the machine, and the settings as given and as settled so far."""

import math
import re
from dataclasses import dataclass

from pmae.config import Config, DecoderConfig, EncoderConfig, ObjectiveConfig
from pmae.config_file import is_settled, to_dict

BASE_LR, CONTRASTIVE_LR, LARGE_BATCH = 1.5e-4, 6e-4, 512
"""The paper's rate, the one that suits a contrastive loss, and the batch from which they count."""
MUON_RATE = 2.0
"""How many times AdamW's rate Muon has beside a contrastive loss; once is worse, four times a little better on CIFAR-10
after 56 epochs, and the medical sets were measured with twice."""
PHOTOGRAPH, ITS_BATCH, ITS_IMAGES = 160, 256, 2_000_000
"""Pixels of the shorter side from which images in color are taken for photographs; the batch they were measured with at
224, and how many were seen when the features of 9,469 had stopped improving, four times as many as with large patches
first (`results/photographs.md`): of many more photographs a longer run may well be better, which has not been tried."""
ALIKE = 0.8
"""Concentration of hues from which small images are not taken for photographs, whose colors gain from being distorted.
Those have 0.36 to 0.69 (CIFAR-10, Imagenette, Tiny ImageNet, flowers), blood cells, skin and H&E 0.93 to 0.98."""
PLAIN_VIT = re.compile(r"vit_tiny|vit_(tiny|small|base|large)_patch\d+(_reg\d+)?_\d+(\..*)?")
"""Names of encoders that can drop tokens, as local views need; of others it would have to be looked up."""
STAGED_RATE = 2.0
"""How many times the rate large patches first have on a CPU, with batches of 512: as they were measured."""
TOKENS_ON_CPU = 64
"""Of an image, up to which a CPU trains for the full length."""


@dataclass
class Case:
    """What rules look at: the data, the machine, the settings as given and as settled so far."""

    given: Config
    count: int
    shape: tuple[int, int, int]
    vectors: bool
    gpu: bool
    dtype: str
    hues: float | None
    goes_on: bool

    def __post_init__(self) -> None:
        self.config = self.given
        self.in_color = self.shape[0] == 3 and self.dtype in ("uint8", "uint16")
        self.pixels = math.prod(self.shape)
        self.patches = self.config.method == "mae"  # they are hidden, not components
        self.fixed = self.config.masking.ratio_schedule == "fixed"

    @property
    def fit_gigabytes(self) -> float:
        """What the exact PCA of whole images takes: four matrices in float64."""
        return 4 * 8 * self.pixels**2 / 1e9

    @property
    def whole_pca(self) -> bool:
        """Whether all components of whole images are wanted, by nobody's word and no recipe of the paper's."""
        space = self.config.space
        return space.name == "pca" and space.components is None and self.config.objective.scale == "constant"

    @property
    def adapts(self) -> bool:
        """Whether the encoder starts from weights that learned from other images."""
        return self.config.encoder.weights is not None and not self.goes_on

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches of an image."""
        patch = self.config.encoder.patch_size or 1
        return max(1, self.shape[1] // patch), max(1, self.shape[2] // patch)

    @property
    def networks_open(self) -> bool:
        """Whether nothing at all was said about the sizes of the two networks."""
        patches = self.given.encoder.patch_size, self.given.encoder.first_patch_size
        plain = EncoderConfig(patch_size=patches[0], first_patch_size=patches[1])
        return self.given.encoder == plain and self.given.decoder == DecoderConfig()

    @property
    def settled(self) -> bool:
        """Whether these are the settings of a run: what is open there was derived so, if by an older version."""
        return is_settled(to_dict(self.given))

    @property
    def two_views(self) -> bool:
        """Whether the contrastive loss takes two crops of every image."""
        return bool(self.config.objective.contrastive_weight)

    @property
    def photographs(self) -> bool:
        """Whether these are images and a training like those of `results/photographs.md`."""
        large, vit = min(self.shape[1:]) >= PHOTOGRAPH, PLAIN_VIT.fullmatch(self.config.encoder.name)
        return bool(self.in_color and large and self.gpu and self.two_views and vit and not self.adapts)

    @property
    def takes_muon(self) -> bool:
        """Whether it is a training like those in which Muon was ahead on every set: NT-Xent, from random weights."""
        begins = self.two_views and not (self.adapts or self.config.train.shard)
        return self.gpu and begins and self.takes_windows

    @property
    def takes_windows(self) -> bool:
        """Whether encoder and contrastive loss can have local views."""
        vit, nt_xent = PLAIN_VIT.fullmatch(self.config.encoder.name), ObjectiveConfig().contrastive
        return vit is not None and self.config.objective.contrastive == nt_xent

    @property
    def distorts_colors(self) -> bool | None:
        """Whether two views are to differ in color too, as those of photographs, known by their size or hues, do.

        None where it is no question: not in color, no two views, given weights, or no GPU, where it did not pay.
        """
        if not (self.in_color and self.two_views and self.gpu) or self.adapts:
            return None
        return True if self.photographs else None if self.hues is None else self.hues < ALIKE

    @property
    def batch(self) -> int:
        return self.config.train.batch_size or 1

    @property
    def epochs(self) -> int:
        return self.config.train.epochs or 1

    @property
    def steps(self) -> int:
        return max(1, self.count // self.batch)

    @property
    def images_seen(self) -> int:
        """In a whole run: longer ones pay with two views, which without a GPU halve it so as to take no longer."""
        usual = 5_000_000 if not self.two_views else 7_500_000 if self.gpu else 2_500_000
        share = 1.0 if self.gpu else min(1.0, TOKENS_ON_CPU / math.prod(self.grid))
        seen = ITS_IMAGES if self.photographs else int(usual * share)
        if not self.config.encoder.first_patch_size:
            return seen
        return seen // (4 if self.photographs else 2)  # large patches first take as long again

    @property
    def takes_stages(self) -> bool:
        """Whether large patches first are worth it: in trainings like those measured, where twice the side fits."""
        encoder, twice = self.config.encoder, 2 * (self.config.encoder.patch_size or 1)
        fits = min(self.shape[1:]) > twice and not (self.shape[1] % twice or self.shape[2] % twice)
        muon = self.takes_muon and self.config.optim.name in (None, "muon")
        measured = muon if self.gpu else self.two_views and self.takes_windows
        return measured and fits and encoder.weights is None

    @property
    def peak_lr(self) -> float:
        """That of batches of 512, for smaller ones too: steps that shrink with the batch teach a small set nothing."""
        staged = self.takes_stages and self.config.encoder.first_patch_size and self.batch >= LARGE_BATCH
        times = MUON_RATE if self.config.optim.name == "muon" else STAGED_RATE if staged else 1.0
        return (times * CONTRASTIVE_LR if self.two_views else BASE_LR) * max(self.batch, LARGE_BATCH) / 256
