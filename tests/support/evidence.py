"""What is read before the copy: executors that record it, or make it up."""

from __future__ import annotations

from concurrent.futures import Future

from ckpttool.concurrency import InlineExecutor
from ckpttool.storage.sampling import SAMPLE_BYTES, digest, find_least, sample


class Recorder(InlineExecutor):
    """An executor that records its tasks, and which function read which subject."""

    def __init__(self):
        self.tasks = []
        self.read = []

    def submit(self, fn, /, *args, **kwargs):
        """Run a task."""
        self.tasks.append((fn, *args))
        if fn.__module__ == "ckpttool.checkpoint.evidence":
            read, subjects = args
            self.read += [(read, one) for one in subjects]
        elif fn in (sample, digest):  # copies in other files than the index names
            self.read.append((fn, *args))
        return super().submit(fn, *args, **kwargs)

    @property
    def cost(self):
        """The number of tensors that were read, and about how many bytes."""
        read = [pair for pair in self.read if pair[0].__module__ == sample.__module__]
        return len(read), sum(nbytes_of(*pair) for pair in read)


def nbytes_of(read, subject):
    """The bytes that are read of a subject: all of a tensor, or three pages."""
    tensors = subject if isinstance(subject, tuple) else (subject,)
    nbytes = sum(one.meta.nbytes for one in tensors)
    return nbytes if read in (digest, find_least) else min(nbytes, 3 * SAMPLE_BYTES)


class MadeUp(InlineExecutor):
    """An executor that reads nothing; ``contents`` returns its answers.

    It is called with the function that should read, and with what.
    """

    def __init__(self, contents):
        self.contents = contents

    def submit(self, fn, read, subjects):
        """Make up the answers of a task."""
        future = Future()
        future.set_result([self.contents(read, one) for one in subjects])
        return future
