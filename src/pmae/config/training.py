"""Settings of the optimizer, the run and how it is watched."""

from dataclasses import dataclass
from typing import Literal

from pmae.config.checks import at_least
from pmae.errors import require


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    base_lr: float | None = None
    """Rate for a batch of 256; the peak rate is base_lr x batch_size / 256. If not given, 1.5e-4 for batches of 512 and
    more, and for smaller ones what keeps the peak rate from falling."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = 0.05
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["cosine", "released", "constant"] = "cosine"
    """Linear warm-up then cosine; the released code's 10^-(warmup - epoch) then cosine; or warm-up then constant."""
    warmup_epochs: float | None = None
    """Length of the warm-up; 5% of the epochs if not given."""
    warmup_steps: int | None = None
    """The same in steps, instead of epochs (the paper's text says 40 steps)."""
    clip_norm: float | None = None
    """Largest norm of the gradient; no clipping if not given."""

    def __post_init__(self) -> None:
        require(self.base_lr is None or self.base_lr > 0, "optim.base_lr", "above 0", self.base_lr)
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", "two numbers in [0, 1)", self.betas)
        at_least("optim.weight_decay", 0, self.weight_decay)
        at_least("optim.warmup_epochs", 0, self.warmup_epochs)
        at_least("optim.warmup_steps", 0, self.warmup_steps)
        both = self.warmup_epochs is not None and self.warmup_steps is not None
        require(not both, "optim.warmup_steps", "unset where optim.warmup_epochs is set", self.warmup_steps)
        require(self.clip_norm is None or self.clip_norm > 0, "optim.clip_norm", "above 0", self.clip_norm)


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch, seed and machine."""

    epochs: int | None = None
    """Passes over the images; derived from their number if not given."""
    batch_size: int | None = None
    """Images in a step; derived from their number if not given."""
    seed: int = 0
    """All randomness is a function of the seed, the epoch and the step."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the networks; auto is bfloat16 on CUDA and on CPUs with AMX, float32 elsewhere."""
    engine: Literal["auto", "plain", "graph"] = "auto"
    """plain: eager, readable, the reference; graph: compiled, the whole step in one CUDA graph; auto: graph on CUDA."""
    shard: bool = False
    """Divide weights, gradients and moments among the processes of torchrun (FSDP2), for encoders that outgrow a card;
    the plain engine alone."""
    deterministic: bool = False
    """On a GPU, only kernels that give the same bits every time: slower, the plain engine alone. CPUs always do."""
    log_every: int | None = None
    """Steps between two lines of metrics.jsonl; about ten lines an epoch, at most every 50 steps, if not given."""
    checkpoint_every: int | None = None
    """Epochs between checkpoints; a tenth of the epochs if not given."""
    keep: int = 2
    """How many checkpoints keep decoder and optimizer for resuming; older ones keep the encoder alone."""
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """Draw the metrics in TensorBoard or Weights & Biases (offline) too, in the run folder."""

    def __post_init__(self) -> None:
        for key in ("epochs", "batch_size", "log_every", "checkpoint_every", "keep"):
            at_least(f"train.{key}", 1, getattr(self, key))
        at_least("train.seed", 0, self.seed)
        for key in ("shard", "deterministic"):
            rule = f"plain or auto where train.{key} is on"
            require(not getattr(self, key) or self.engine != "graph", "train.engine", rule, self.engine)


@dataclass(frozen=True)
class ProbeConfig:
    """How the encoder is watched while it learns; labels are used for this alone."""

    every: int | None = None
    """Epochs between two looks; a tenth of the epochs if not given."""
    data: str | None = None
    """A labelled set to probe on, if not the one that is trained on: a name or a path."""

    def __post_init__(self) -> None:
        at_least("probe.every", 1, self.every)
