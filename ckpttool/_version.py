"""The version, for every module that has to know it."""

__version__ = "0.1.0"
