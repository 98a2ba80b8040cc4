"""This package's version, which ranks compare when they meet."""

__version__ = "0.2.0"
