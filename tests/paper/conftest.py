"""The same small data and stored results as for sweeps."""

from tests.sweep.conftest import forbid_work, no_figures_of_runs, one_thread, root, store

__all__ = ["forbid_work", "no_figures_of_runs", "one_thread", "root", "store"]
