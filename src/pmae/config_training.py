"""How a run is trained and watched: optimizer, length, batch, machine and probes; for the rest see `pmae.config`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pmae.errors import require
from pmae.validation import Count, NonNegative, Positive, Proportion, Rule, Settings, WholeNumber

Name = Annotated[str, Rule("a name or a path", bool)]
Betas = Annotated[tuple[float, float], Rule("two numbers in [0, 1)", lambda b: all(0 <= x < 1 for x in b))]
Kernels = Literal["all", "attention", "none"]


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimizer and its schedule."""

    base_lr: Positive | None = None
    """Rate for a batch of 256: the peak is base_lr x batch_size / 256. If not given, the peak of batches of 512."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegative = 0.05
    """Decoupled weight decay."""
    decay_all: bool = False
    """Decay biases, norms and tokens too, as the released code, instead of matrices only."""
    schedule: Literal["cosine", "released", "constant"] = "cosine"
    """Linear warm-up then cosine to 0, or constant; released: 10^-(warmup - epoch), and a cosine that ends above 0."""
    warmup_epochs: NonNegative | None = None
    """Length of the warm-up; 5% of the epochs if not given."""
    warmup_steps: WholeNumber | None = None
    """The same in steps, instead of epochs (the paper's text says 40 steps)."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient; no clipping if not given."""
    encoder_rate: Positive | None = None
    """Share of the rate at which the encoder learns; 1 if not given, or 0.1 from weights of other images."""
    layer_decay: Proportion | None = None
    """Each block of a ViT learns at this share of the rate of the next; 1 if not given, or 0.75 in the same case."""
    frozen_blocks: WholeNumber = 0
    """How many of a ViT's first blocks, and what lies before them, do not learn at all."""
    name: Literal["adamw", "muon"] | None = None
    """AdamW; or Muon for the matrices of transformer blocks, with orthogonal steps, and AdamW for the rest. If not
    given, Muon on a GPU beside a contrastive loss."""

    def check(self) -> None:
        both = self.warmup_epochs is not None and self.warmup_steps is not None
        require(not both, "optim.warmup_steps", "unset where optim.warmup_epochs is set", self.warmup_steps)


@dataclass(frozen=True)
class TrainConfig(Settings):
    """Length, batch, seed and machine."""

    epochs: Count | None = None
    """Passes over the images; derived from their number if not given."""
    batch_size: Count | None = None
    """Images in a step; derived from their number if not given."""
    seed: WholeNumber = 0
    """All randomness is a function of the seed, the epoch and the step."""
    device: str = "auto"
    """auto (cuda or else cpu), cpu, cuda, cuda:N or mps (the GPU of a Mac)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the networks; auto is bfloat16 on CUDA and on CPUs with AMX, float32 elsewhere."""
    engine: Literal["auto", "plain", "graph", "compiled"] = "auto"
    """plain: eager, readable, the reference; graph: the whole step in one CUDA graph; compiled: fused by torch's
    compiler before that, a tenth faster after half a minute; auto: on CUDA compiled for long runs, else graph."""
    kernels: Kernels = "all"
    """Of `pmae.fast`: all, the attention kernels alone, or none (timm's own code); the variable PMAE_KERNELS wins."""
    accumulate: Count = 1
    """Take a batch in so many parts and add up their gradients: as much less memory; the plain engine alone."""
    activation_checkpointing: bool = False
    """Keep only what enters each block and compute the rest again in the backward pass; the plain engine alone."""
    bf16_gradients: bool = False
    """Send gradients between processes in bfloat16: half as many bytes; the plain engine alone."""
    shard: bool = False
    """Divide weights, gradients and moments among torchrun's processes (FSDP2); the plain engine alone."""
    deterministic: bool = False
    """On a GPU, only kernels that give the same bits every time: slower, the plain engine alone. CPUs always do."""
    log_every: Count | None = None
    """Steps between two lines of metrics.jsonl; about ten lines an epoch, at most every 50 steps, if not given."""
    checkpoint_every: Count | None = None
    """Epochs between checkpoints; a tenth of the epochs if not given."""
    keep: Count = 2
    """How many checkpoints keep decoder and optimizer for resuming; older ones keep the encoder alone."""
    track: Literal["none", "csv", "tensorboard", "wandb", "mlflow"] = "none"
    """Draw the metrics in a CSV file, TensorBoard, Weights & Biases or MLflow too, offline in the run folder."""
    project: Name = "pmae"
    """The project of Weights & Biases, or experiment of MLflow, that the run belongs to."""
    callbacks: tuple[str, ...] = ()
    """Registered callbacks that see every step and epoch and may end the run: name or name(option=value)."""
    plugins: tuple[str, ...] = ()
    """Filled in by a run: what of its settings is registered by whose file, with the file's hash."""

    def check(self) -> None:
        for why in self.needs_plain:
            require(self.engine in ("plain", "auto"), "train.engine", f"plain or auto where {why}", self.engine)
        rule = "off where train.shard is on, which sends gradients by itself"
        require(not (self.shard and self.bf16_gradients), "train.bf16_gradients", rule, self.bf16_gradients)
        rule = "1 where train.shard is on, which divides memory among processes"
        require(not self.shard or self.accumulate == 1, "train.accumulate", rule, self.accumulate)

    @property
    def needs_plain(self) -> list[str]:
        """Why steps cannot be captured, one reason each."""
        switches = ("activation_checkpointing", "bf16_gradients", "shard", "deterministic")
        why = [f"train.{name} is on" for name in switches if getattr(self, name)]
        why += ["train.accumulate is above 1"] if self.accumulate > 1 else []
        return why + (["train.kernels is not all"] if self.kernels != "all" else [])


@dataclass(frozen=True)
class ProbeConfig(Settings):
    """How the encoder is watched while it learns; labels are used for this alone."""

    every: Count | None = None
    """Epochs between two looks; a tenth of the epochs if not given."""
    data: str | None = None
    """A labelled set to probe on, if not the one that is trained on: a name, a path or a table of files beside it."""
    columns: tuple[str, ...] = ()
    """Of that table, as in label=diagnosis group=patient; file, label and split if not given."""
