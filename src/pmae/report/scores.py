"""The paper's accuracy to set beside a score."""

from pmae.config import Config
from pmae.paper import published as paper
from pmae.results import Score


def published(score: Score, config: Config) -> tuple[float, str] | None:
    """The paper's accuracy for this data, protocol and kind of method, and what it calls it; None without one."""
    if score.is_baseline or score.pooling != "cls":
        return None
    kind = _published_kind(score, config)
    value = paper.accuracy(score.protocol, kind, paper.data_name(score.data))
    return None if value is None else (value, str(paper.paper()["methods"][kind]))


def _published_kind(score: Score, config: Config) -> str:
    """Which published row is the nearest: the method from the score, the kind of ratio and loss from the settings."""
    is_mae = score.method == "mae"
    if config.masking.ratio == "uniform":
        kind = "random"
    else:
        kind = "std" if is_mae and config.masking.masked_patches in (None, 0.75) else "oracle"
    if is_mae:
        return f"mae_{kind}"
    if config.space.name != "pca":
        # The paper has kernel PCA beside PCA; its numbers say nothing about other spaces.
        return f"kmae_{kind}" if config.space.name == "kernel_pca" else "unpublished"
    return f"pmae_{kind}_{'pixels' if config.objective.target == 'pixels' else 'components'}"
