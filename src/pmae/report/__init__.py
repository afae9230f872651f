"""Figures, tables and the report page, read from run folders."""
