"""Evaluations that a table needs: which of them results.json has, and doing the others."""

import dataclasses
from collections.abc import Sequence

from pmae import api
from pmae.config import replace
from pmae.evaluate.protocols import Protocols, only
from pmae.experiments.jobs import splits
from pmae.report.paper_cells import score_in
from pmae.runs import Run


@dataclasses.dataclass(frozen=True)
class Need:
    """Protocols to be scored on the test split, at the last checkpoint or at every one."""

    protocols: tuple[Protocols, ...]
    every_epoch: bool = False
    pooling: str = "cls"
    """Of what is scored, what is shown."""
    device: str = "auto"
    root: str = "data"
    """Folder of the data on this machine."""
    pictures: bool = False
    """Whether the sample pictures of a run are needed, which published results leave out."""

    def missing(self, run: Run) -> dict[Protocols, list[int]]:
        """For each set of protocols the epochs at which one of them is missing."""
        open_ = {protocols: [e for e in self._epochs(run) if _lacks(run, protocols, e)] for protocols in self.protocols}
        return {protocols: epochs for protocols, epochs in open_.items() if epochs}

    def can_be_met(self, run: Run) -> bool:
        """Whether a run has the pictures and the numbers, or the checkpoints to get those."""
        return self.has_pictures(run) and (bool(run.checkpoints()) or not self.missing(run))

    def has_pictures(self, run: Run) -> bool:
        """Whether the pictures that are needed are there."""
        return not self.pictures or (run.path / "samples.safetensors").is_file()

    def meet(self, run: Run) -> None:
        """Evaluate what is missing into the run's results.json."""
        data, seeds = replace(run.config, data__root=self.root).data, (run.config.train.seed,)
        for protocols, epochs in self.missing(run).items():
            lacking = lacking_kinds(run, protocols, epochs)
            print(f"  {run.path.name}: {', '.join(lacking)} [{protocols.name}]", flush=True)
            wanted = only(protocols, lacking)
            api.evaluate(
                run.path, wanted, splits(data), epochs, baselines=False, seeds=seeds, device=self.device, figures=False
            )

    def _epochs(self, run: Run) -> list[int]:
        last = run.config.train.epochs or 0
        whole = [p.name.removeprefix("epoch_") for p in run.checkpoints()] if self.every_epoch else []
        return sorted({last, *(int(name) for name in whole if name.isdigit())})


def lacking_kinds(run: Run, protocols: Protocols, epochs: Sequence[int]) -> list[str]:
    """The protocols of a set that a run has not been scored by at one of these epochs."""
    return [kind for kind in api.kinds(protocols) if any(_lacks(run, only(protocols, [kind]), e) for e in epochs)]


def _lacks(run: Run, protocols: Protocols, epoch: int) -> bool:
    return any(score_in(run, kind, protocols.name, "test", epoch) is None for kind in api.kinds(protocols))
