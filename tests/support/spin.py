"""A reader that never returns, for the limited process; it imports nothing."""


def spin(path: str) -> None:
    """Stand in for a library on a file that it does not come to an end on."""
    while True:
        pass
