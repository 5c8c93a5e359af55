"""Records: dataclasses whose classes are quick to make, and whose objects are too.

`dataclasses.dataclass` compiles the methods of each class when that is imported: 0.7 ms each, a
sixth of a short run in all.  msgspec has these methods in C, and makes an object in a seventh of
the time.

A record is frozen and has slots.  ``__post_init__`` sets fields with ``init=False``, also when
others are replaced.  Only a type checker checks that fields are given by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec


class _Field(NamedTuple):
    """What is said of a field, as in `dataclasses.field`."""

    default: object = msgspec.NODEFAULT
    default_factory: Callable[[], object] | None = None
    init: bool = True
    repr: bool = True
    compare: bool = True
    hash: bool | None = None
    kw_only: bool = False


if TYPE_CHECKING:  # a type checker sees dataclasses
    from dataclasses import asdict as asdict
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import TypeVar, overload

    from typing_extensions import dataclass_transform

    T = TypeVar("T")

    @overload
    def record(cls: type[T], /) -> type[T]: ...
    @overload
    def record(
        *, frozen: bool = True, kw_only: bool = False, eq: bool = True, gc: bool = True
    ) -> Callable[[type[T]], type[T]]: ...
    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def record(cls: type[T] | None = None, /, **_: bool) -> object:
        """Make a record of a class with annotated fields."""

    def set_field(one: object, name: str, value: object) -> None:
        """Set a field of a frozen record, as its class does while it is made."""

else:
    field = _Field
    _MADE = {"__dict__", "__weakref__"}  # by each class of its own

    def record(cls=None, /, *, frozen=True, kw_only=False, eq=True, gc=True):
        """Make a record of a class with annotated fields.

        Parameters
        ----------
        cls
            The class.
        frozen, kw_only, eq
            As of `dataclasses.dataclass`.
        gc
            Whether the garbage collector looks at the objects.  If not, each is 16 bytes smaller:
            for records that a run makes many of, and through which no circle of references goes.
        """
        if cls is None:
            return partial(record, frozen=frozen, eq=eq, gc=gc)
        if isinstance(cls, type(msgspec.Struct)):
            return cls  # as its base is
        names = {name: one for name, one in vars(cls).items() if name not in _MADE}
        declared = {name: one for name, one in names.items() if isinstance(one, _Field)}
        names |= {name: _default(one) for name, one in declared.items()}
        names = {name: one for name, one in names.items() if one is not msgspec.NODEFAULT}
        bases = (*(base for base in cls.__bases__ if base is not object), msgspec.Struct)
        is_cached = any(isinstance(one, cached_property) for one in names.values())
        options = {"frozen": frozen, "eq": eq, "gc": gc, "dict": is_cached}
        made = type(msgspec.Struct)(cls.__name__, bases, names, **options)
        made._fields = {name: vars(cls).get(name) for name in made.__struct_fields__}

        def chosen(is_chosen):  # the fields, if they are not all, for which msgspec has a method
            others = {name for name, one in declared.items() if not is_chosen(one)}
            return others and [name for name in made.__struct_fields__ if name not in others]

        if eq and (compared := chosen(lambda one: one.compare)):
            made.__eq__ = _equality(attrgetter(*compared))
        hashed = chosen(lambda one: one.compare if one.hash is None else one.hash)
        if eq and hashed and cls.__hash__ is object.__hash__:
            made.__hash__ = _hash(attrgetter(*hashed))
        if cls.__repr__ is object.__repr__ and (shown := chosen(lambda one: one.repr)):
            made.__repr__ = _repr(shown)
        return made

    def _default(one):
        """Return the default of a field as msgspec takes it."""
        if one.default_factory is not None:
            return msgspec.field(default_factory=one.default_factory)
        return one.default if one.init else None

    def _equality(values_of):
        def are_equal(one, other):
            is_one = type(other) is type(one)
            return values_of(one) == values_of(other) if is_one else NotImplemented

        return are_equal

    def _hash(values_of):
        return lambda one: hash(values_of(one))

    def _repr(names):
        form = f"%s({', '.join(f'{name}=%r' for name in names)})"
        values_of = attrgetter("__class__.__name__", *names)
        return lambda one: form % values_of(one)

    set_field = msgspec.structs.force_setattr

    def replace(one, /, **changes):
        """Return a copy of a record with other values of some fields."""
        fields = {name: getattr(one, name) for name in one.__struct_fields__}
        return type(one)(**fields | changes)

    def asdict(one):
        """Return the fields of a record, and of those in it."""
        return msgspec.to_builtins(one)


def defaults(cls: Callable[..., object]) -> Mapping[str, object]:
    """Return the fields that make a record, and the default of each; None if it has none."""
    found = {}
    for name, one in cls._fields.items():  # type: ignore[attr-defined]
        if not isinstance(one, _Field):
            found[name] = one
        elif one.default_factory:
            found[name] = one.default_factory()
        elif one.init:
            found[name] = None if one.default is msgspec.NODEFAULT else one.default
    return found


def is_record(one: object) -> bool:
    """Return whether an object is a record."""
    return isinstance(one, msgspec.Struct)
