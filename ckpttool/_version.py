"""The version of the package and of its JSON documents."""

__version__ = "0.1.0"
SCHEMA = 1  # of JSON documents; a change that breaks readers of one counts up its own
