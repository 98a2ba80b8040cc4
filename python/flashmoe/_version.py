"""This package's version. Ranks compare their versions when they meet."""

__version__ = "0.2.0"
