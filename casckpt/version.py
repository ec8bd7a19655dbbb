"""The release, in one place: pyproject.toml reads it from here, and stores record it."""

__version__ = "0.1.0"
