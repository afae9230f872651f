"""Whole configurations by name, and every table and figure of the paper as a command."""
