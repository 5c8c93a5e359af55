"""Pickles of plain data and of a few named classes, read without running any of what they name.

A pickle is a program for a stack machine.  This is such a machine with the instructions that Python
writes for plain data and for objects made of it, and no others.  Nothing is imported, called or
constructed: of a class only its name is kept, of an object its name and its attributes.

Bytes
-----
Protocols 2 to 5, as Python's ``pickle`` writes them.  Admitted instructions:

* ``PROTO``, ``FRAME``, ``STOP``, ``MARK``, ``MEMOIZE``, ``BINPUT``, ``LONG_BINPUT``, ``BINGET``,
  ``LONG_BINGET``
* None, booleans, integers of up to 255 bytes, floats, strings, bytes, tuples, lists, dictionaries
* ``GLOBAL`` and ``STACK_GLOBAL`` for a class that was admitted, ``NEWOBJ`` without arguments and
  ``BUILD`` with a dictionary, which is how an object without ``__reduce__`` is written
* ``REDUCE`` for an admitted class whose only argument is a tuple, and whose object stands for it
  (``torch.Size``)

Limits: the file's size, which bounds the work, as every instruction takes a byte or more; one
container in four bytes, which bounds the memory (real ones take nine).  Nothing is hashed or
compared and nothing recurses, so that parts that are shared or nested deeply cost as others do.

Source
------
CPython ``Lib/pickletools.py``, which says what every instruction does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.reading import read_file

MAX_BYTES = 200_000_000  # a hundred bytes and more for every slice of every rank
CONTAINERS = frozenset(b"]}(t\x85\x86\x87\x81")  # instructions that make one

Value = object  # None, bool, int, float, str, bytes, tuple, list, Pairs, Instance or Name


class Pairs(list[tuple[Value, Value]]):
    """A dictionary: its keys and values, in order.  Keys may repeat, as nothing hashes them."""

    def __repr__(self) -> str:  # of a hostile one the whole could be endless
        return f"<dictionary of {len(self)}>"


@dataclass(frozen=True, slots=True)
class Name:
    """A class, by module and name."""

    module: str
    name: str


@dataclass(slots=True, repr=False, eq=False)  # of a hostile one either could be endless
class Instance:
    """An object: its class and its attributes."""

    cls: Name
    attributes: dict[str, Value] = field(default_factory=dict)


class _Mark:
    """Where a tuple, list or dictionary begins on the stack."""


def read_pickle(path: str, classes: Collection[Name], tuples: Collection[Name] = ()) -> Value:
    """The value that a pickle makes.

    Parameters
    ----------
    path
        The file.
    classes
        Classes whose objects are admitted, as `Instance`.
    tuples
        Classes whose objects stand for the tuple that they are made of.

    Raises
    ------
    FormatError
        It is no pickle, or is damaged.
    UnsupportedError
        It names another class or has another instruction.
    OSError
        It cannot be opened or read.
    """
    size = Path(path).stat().st_size
    if size > MAX_BYTES:
        raise UnsupportedError(path, None, f"{size} bytes, expected at most {MAX_BYTES}")
    machine = _Machine(path, read_file(path), classes, tuples)
    return machine.run()


class _Machine:
    """The stack, the memo, and the place in the program."""

    def __init__(
        self, path: str, code: bytes, classes: Collection[Name], tuples: Collection[Name]
    ) -> None:
        self.path = path
        self.code = code
        self.at = 0
        self.classes = classes
        self.tuples = tuples
        self.stack: list[Value] = []
        self.memo: dict[int, Value] = {}

    def run(self) -> Value:
        """The value on the stack when the program stops."""
        if self.code[:1] != b"\x80" or self.code[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
            raise FormatError(self.path, 0, "no pickle of protocol 2 to 5")
        self.at, containers = 2, 0
        while True:
            start = self.at
            code = self.take(1)
            if code == b".":
                break
            containers += code[0] in CONTAINERS
            if containers > 1000 + start // 4:
                raise UnsupportedError(
                    self.path, start, "more lists and objects than real ones have"
                )
            action = _ACTIONS.get(code)
            if action is None:
                reason = f"pickle instruction {code!r}, which plain data does not need"
                raise UnsupportedError(self.path, start, f"{reason}; it is not carried out")
            try:
                action(self)
            except (IndexError, KeyError, TypeError, ValueError) as error:
                reason = f"pickle instruction {code!r} cannot be carried out: {error}"
                raise FormatError(self.path, start, reason) from error
        if len(self.stack) != 1 or isinstance(self.stack[0], _Mark):
            raise FormatError(self.path, start, f"{len(self.stack)} values are left, expected one")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """The next bytes of the program."""
        part = self.code[self.at : self.at + count]
        if len(part) < count:
            raise FormatError(self.path, self.at, f"{count} bytes expected (file cut short?)")
        self.at += count
        return part

    def number(self, spelled: str) -> int:
        """A number in the program."""
        value = struct.unpack(spelled, self.take(struct.calcsize(spelled)))[0]
        assert isinstance(value, int), "all forms that are asked for are integers"
        return value

    def line(self) -> str:
        """Text in the program, to the end of a line."""
        text = self.take(self.code.index(b"\n", self.at) - self.at)
        self.take(1)
        return text.decode()

    def pop(self) -> Value:
        """The topmost value."""
        value = self.stack.pop()
        if isinstance(value, _Mark):
            raise ValueError("no value on the stack")
        return value

    def pop_to_mark(self) -> list[Value]:
        """The values above the topmost mark, which goes as well."""
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], _Mark):  # IndexError if there is none
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def pop_tuple(self, count: int) -> None:
        """Make a tuple of the topmost values."""
        values = tuple(reversed([self.pop() for _ in range(count)]))
        self.stack.append(values)

    def memoize(self, number: int) -> None:
        """Keep the topmost value under a number."""
        self.memo[number] = self.stack[-1]

    def extend(self, values: list[Value]) -> None:
        """Add values to the list on top."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError("no list to add to")
        target.extend(values)

    def update(self, values: list[Value]) -> None:
        """Add keys and values to the dictionary on top."""
        target = self.stack[-1]
        if not isinstance(target, Pairs) or len(values) % 2:
            raise TypeError("no dictionary to add to, or no pairs")
        target.extend(zip(values[::2], values[1::2], strict=True))

    def find_class(self, module: Value, name: Value) -> None:
        """Put a class on the stack, by its name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a class is named by two strings")
        found = Name(module, name)
        if found not in self.classes and found not in self.tuples:
            reason = f"the pickle names {module[:100]}.{name[:100]}, which is none of the classes "
            reason += "of such a file; nothing of it is loaded"
            raise UnsupportedError(self.path, self.at, reason)
        self.stack.append(found)

    def new_object(self) -> None:
        """Make an object without attributes."""
        arguments, cls = self.pop(), self.pop()
        if not isinstance(cls, Name) or cls not in self.classes or arguments != ():
            raise TypeError("no object of an admitted class without arguments")
        self.stack.append(Instance(cls))

    def reduce(self) -> None:
        """Make the tuple that an object stands for."""
        arguments, cls = self.pop(), self.pop()
        if not isinstance(cls, Name) or cls not in self.tuples:
            raise TypeError("no class that stands for a tuple")
        if not isinstance(arguments, tuple) or len(arguments) != 1:
            raise TypeError("not one argument")
        if not isinstance(arguments[0], tuple):
            raise TypeError("no tuple to stand for")
        self.stack.append(arguments[0])

    def build(self) -> None:
        """Give the object on top its attributes."""
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Instance) or not isinstance(state, Pairs):
            raise TypeError("no object, or no dictionary of attributes")
        for key, value in state:
            if not isinstance(key, str):
                raise TypeError("an attribute without a name")
            target.attributes[key] = value


def _text(spelled: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(spelled)).decode())


def _bytes(spelled: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(spelled)))


def _int(spelled: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(spelled))


def _constant(value: Value) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _long(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number("B")), "little", signed=True))


def _skip_frame(machine: _Machine) -> None:
    machine.take(8)  # its length, which nobody needs who has all of it


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x95": _skip_frame,
    b"(": lambda machine: machine.stack.append(_Mark()),
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _int("B"),
    b"M": _int("<H"),
    b"J": _int("<i"),
    b"\x8a": _long,
    b"G": lambda machine: machine.stack.append(struct.unpack(">d", machine.take(8))[0]),
    b"\x8c": _text("B"),
    b"X": _text("<I"),
    b"\x8d": _text("<Q"),
    b"C": _bytes("B"),
    b"B": _bytes("<I"),
    b")": _constant(()),
    b"\x85": lambda machine: machine.pop_tuple(1),
    b"\x86": lambda machine: machine.pop_tuple(2),
    b"\x87": lambda machine: machine.pop_tuple(3),
    b"t": lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
    b"]": lambda machine: machine.stack.append([]),
    b"a": lambda machine: machine.extend([machine.pop()]),
    b"e": lambda machine: machine.extend(machine.pop_to_mark()),
    b"}": lambda machine: machine.stack.append(Pairs()),
    b"s": lambda machine: machine.update([machine.pop(), machine.pop()][::-1]),
    b"u": lambda machine: machine.update(machine.pop_to_mark()),
    b"\x94": lambda machine: machine.memoize(len(machine.memo)),
    b"q": lambda machine: machine.memoize(machine.number("B")),
    b"r": lambda machine: machine.memoize(machine.number("<I")),
    b"h": lambda machine: machine.stack.append(machine.memo[machine.number("B")]),
    b"j": lambda machine: machine.stack.append(machine.memo[machine.number("<I")]),
    b"c": lambda machine: machine.find_class(machine.line(), machine.line()),
    b"\x93": lambda machine: machine.find_class(*[machine.pop(), machine.pop()][::-1]),
    b"\x81": lambda machine: machine.new_object(),
    b"R": lambda machine: machine.reduce(),
    b"b": lambda machine: machine.build(),
}
