"""The version of the package and of its JSON documents."""

__version__ = "0.1.0"
SCHEMA = (
    1  # of every JSON document that a command prints; incremented by a change that breaks readers
)
