"""Print the accuracy tables of results/RESULTS.md from the run folders in results/runs: python tools/tables.py"""

import json
from pathlib import Path

RUNS = Path(__file__).parent.parent / "results" / "runs"
SETS = ("cifar10", "dermamnist", "bloodmnist")
COLUMNS = {"linear": "linear", "mlp": "MLP", "knn": "k-NN", "finetune": "fine-tuned"}
NAMES = {"pmae": "PMAE 0.2", "mae": "MAE 0.75", "contrast": "PMAE 0.2 + contrast, patch 4"}


def scores(run: Path, preset: str, split: str) -> dict[str, dict[str, str]]:
    """Accuracy by representation and protocol, as mean and deviation over the seeds in percent."""
    rows: dict[str, dict[str, str]] = {}
    for label, found in json.loads((run / "results.json").read_text()).get("evaluation", {}).items():
        name, _, of = label.rpartition(" [")
        if of == f"{preset}]":
            for entry in (entry for entry in found["results"] if entry["split"] == split):
                rows.setdefault(f"{title(run, name)}{pooled(entry)}", {})[entry["protocol"]] = shown(entry)
    return rows


def title(run: Path, label: str) -> str:
    """A run's own encoder by method and epochs; a baseline by its name."""
    _, method, epochs = run.name.split("-")
    return f"{NAMES[method]}, {epochs} epochs" if " epoch " in label else label


def pooled(entry: dict[str, str]) -> str:
    """Which features were used, where there is a choice."""
    return f" ({entry['pooling']})" if entry["pooling"] in ("cls", "mean") else ""


def shown(entry: dict[str, dict[str, dict[str, float]]]) -> str:
    """One number, with its deviation where several seeds were run and differ in kind."""
    accuracy = entry["metrics"]["accuracy"]
    several = len(entry["runs"]) > 1 and entry["protocol"] != "knn"
    return f"{100 * accuracy['value']:.1f}" + (f" ± {100 * accuracy['std']:.1f}" if several else "")


def main() -> None:
    """Every data set, preset and split that was evaluated."""
    for data in SETS:
        for preset in ("strong", "paper"):
            for split in ("test", "val"):
                rows: dict[str, dict[str, str]] = {}
                for run in sorted(RUNS.glob(f"{data}-*"), key=lambda run: ("pmae" not in run.name, run.name)):
                    rows |= scores(run, preset, split)
                if rows:
                    print(f"\n#### {data}, preset `{preset}`, {split} split\n")
                    print(f"| representation | {' | '.join(COLUMNS.values())} |\n|---|---|---|---|---|")
                    for name, row in rows.items():
                        print(f"| {name} | {' | '.join(row.get(column, '') for column in COLUMNS)} |")


if __name__ == "__main__":
    main()
