"""Pretraining: schedule, step, loop, checkpoints, journal."""
