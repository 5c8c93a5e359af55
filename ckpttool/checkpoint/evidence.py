"""Questions about the contents of stored tensors, and the evidence that answers them.

Names, shapes and a strategy leave some things open, and contents decide these.  A function that
needs contents is a generator and reads nothing: it yields a question, and is sent the evidence.
Such functions call each other with ``yield from``.  `answer` runs one, and is the only reader
before the copy.  Tests run one without a file, on invented evidence.

A function yields a question only if the answers to earlier ones leave it open.  Each question is
read once: if a later function repeats it, the answer is in the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from ckpttool.concurrency import wait_result
from ckpttool.formats.local import unreadable
from ckpttool.model.tensors import StoredTensor, TensorMeta
from ckpttool.problems import CkptToolError, CombinedError, UnreadableError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Question(Struct, frozen=True):
    """Something that has to be read of several subjects, such as stored tensors.

    A worker calls ``read``, a function of a module, with one subject.
    """

    read: Callable[..., object]
    of: tuple[Hashable, ...]


class Evidence(Struct, frozen=True):
    """The answers so far: reading function to subject to answer."""

    answers: dict[Callable[..., object], dict[Hashable, object]] = {}

    def of(self, read: Callable[[K], T]) -> Mapping[K, T]:
        """Return subject to answer, of all questions with this reading function."""
        return cast("Mapping[K, T]", self.answers[read])

    def add(self, question: Question, executor: Executor) -> None:
        """Read the subjects of a question that were not read before."""
        known = self.answers.setdefault(question.read, {})
        are_samples = _is_sample(question.read)
        tasks: dict[str | int, list[Hashable]] = {}
        for subject in dict.fromkeys(question.of):
            if subject not in known:
                task: str | int = len(tasks)
                if are_samples and isinstance(subject, StoredTensor):
                    task = (
                        subject.file.path
                    )  # all samples of a file are one task, which opens it once
                tasks.setdefault(task, []).append(subject)
        futures = [
            (group, executor.submit(_read, question.read, group)) for group in tasks.values()
        ]
        unread: dict[Hashable, UnreadableError] = {}
        shared: dict[object, object] = {}  # replicas have equal samples: one object for both
        for group, future in futures:
            answers = wait_result(future)
            for subject, content in zip(group, answers, strict=True):
                if isinstance(content, UnreadableError):
                    unread[subject] = content
                else:
                    known[subject] = shared.setdefault(content, content) if are_samples else content
        if unread:
            raise UnreadEvidenceError(unread)


class UnreadEvidenceError(CombinedError):
    """Subjects that the system cannot read, each with its error."""

    def __init__(self, unread: Mapping[Hashable, UnreadableError]) -> None:
        super().__init__([*{str(error): error for error in unread.values()}.values()])
        self.args = (unread,)
        names = ((_names_of(subject), error) for subject, error in unread.items())
        self.tensors = {name: error for of, error in names for name in of}


def _names_of(subject: Hashable) -> tuple[str, ...]:
    if isinstance(subject, tuple):
        return tuple(name for part in subject for name in _names_of(part))
    meta = getattr(subject, "meta", None)
    return (meta.name if isinstance(meta, TensorMeta) else "",)


def _read(read: Callable[..., object], subjects: Sequence[Hashable]) -> Sequence[object]:
    """Read the subjects of one task, and return errors of the system; runs on a worker."""
    try:
        if _is_sample(read):
            from ckpttool.storage.sampling import take_samples

            return take_samples(
                [subject for subject in subjects if isinstance(subject, StoredTensor)]
            )
        return [read(subject) for subject in subjects]
    except OSError as error:
        if len(subjects) == 1:
            return [unreadable(str(error.filename), error)]
        return [*chain.from_iterable(_read(read, [subject]) for subject in subjects)]


def _is_sample(read: Callable[..., object]) -> bool:
    return (read.__module__, read.__name__) == ("ckpttool.storage.sampling", "sample")


Asking: TypeAlias = Generator[Question, Evidence, T]


def ask(read: Callable[[K], T], subjects: Iterable[K]) -> Asking[Mapping[K, T]]:
    """Ask for what ``read`` returns of each subject."""
    evidence = yield Question(read, tuple(subjects))
    return evidence.of(read)


def answer(steps: Asking[T], executor: Executor, evidence: Evidence | None = None) -> T:
    """Run a function that asks questions, and return its result.

    An error of reading is raised in it, where it waits for the evidence.  ``evidence`` has what
    was read before, and receives what is read now.
    """
    evidence = Evidence() if evidence is None else evidence
    try:
        question = next(steps)
        while True:
            try:
                evidence.add(question, executor)
            except CkptToolError as error:
                question = steps.throw(error)
            else:
                question = steps.send(evidence)
    except StopIteration as done:
        return cast(T, done.value)
