"""What is read before the copy: an executor that records it."""

from __future__ import annotations

from ckpttool.checkpoint.evidence import Question
from ckpttool.concurrency import InlineExecutor


class Recorder(InlineExecutor):
    """An executor that records its tasks, and the questions in them."""

    def __init__(self):
        self.tasks = []
        self.asked: list[Question[object]] = []

    def submit(self, fn, /, *args, **kwargs):
        """Run a task."""
        self.tasks.append((fn, *args))
        self.asked += [one for one in args[0] if isinstance(one, Question)]
        return super().submit(fn, *args, **kwargs)
