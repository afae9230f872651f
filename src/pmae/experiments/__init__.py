"""Recipes: whole configurations by name."""
