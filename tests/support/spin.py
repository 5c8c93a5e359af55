"""A reader that never returns, for the limited process; it imports nothing."""


def spin(path: str) -> None:
    while True:
        pass
