"""Typed run files and their command-line overrides."""
