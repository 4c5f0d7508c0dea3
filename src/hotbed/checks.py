"""Check values of users against annotations, which declare types, ranges and choices.

A `Section`, e.g. of a recipe, is a dataclass with checked fields. Messages contain the value and the limit:
``problem: got VALUE, expected LIMIT. Fix.``
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin, get_type_hints

from hotbed.errors import HotbedError, RecipeError, did_you_mean

MAY_DIFFER_ON_RESUME = {"may_differ": True}
"""Metadata of a field that a resumed run may change, because it does not change what a training step computes."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Limits of a number, for `Annotated`. Integers must also be below 2**64, and other numbers must be finite."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    note: str = ""
    """Text after the limits in messages, e.g. ``" (a year)"``."""
    name: str = ""
    """Description of the number in messages about a wrong type, e.g. ``"a number of ranks"``."""

    def unmet(self, value: float, kind: type[float]) -> str | None:
        """Return the limit that a number of a type (int or float) violates, or None."""
        if isinstance(value, int) and value >= 2**64 <= min(self.most, self.below):
            return "below 2**64"
        if self.above < value <= self.most and self.least <= value < self.below:
            return None
        limits = [
            f"{word} {limit:,}"
            for word, limit in (
                ("at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if math.isfinite(limit)
        ]
        return f"{'a finite number ' if kind is float else ''}{' and '.join(limits)}{self.note}"


Count = Annotated[int, Range(least=1)]
Size = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Probability = Annotated[float, Range(least=0, below=1)]
_SHOWN = 40
"""Number of known names in a message."""
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
    Any: "any value",
}


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. True and False are not integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def check(what: str, value: object, annotation: Any, error: type[HotbedError], fix: str = "") -> None:
    """Raise an error if a value violates its annotation, e.g. ``check("layers", 0, Count, SpecError)``."""
    if found := problem(what, value, annotation):
        raise error(_append_fix(found, fix))


def check_known(what: str, name: object, known: Iterable[str], error: type[HotbedError], fix: str = "") -> None:
    """Raise an error with the closest known name if a name is not known."""
    names = list(known)
    if name not in names:
        expected = f"one of {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}" if names else "none"
        raise error(_append_fix(_got(what, name, expected, names), fix))


def check_unique(what: str, names: Iterable[str], error: type[HotbedError], fix: str = "") -> None:
    """Raise an error if a name is repeated."""
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise error(_append_fix(f"{what}: got '{name}' {count} times, expected unique names", fix))


@contextmanager
def naming(what: str, error: type[HotbedError] = RecipeError) -> Generator[None]:
    """Prefix errors of a class with the part of the input that caused them, e.g. the key of a recipe."""
    try:
        yield
    except error as found:
        raise error(f"{what}: {found}") from found


class Section:
    """Base class of dataclasses that check their fields: sections of a recipe, or options of a function.

    ``where`` is the section's key with a dot, for messages. ``error`` is the class of the errors that it raises.
    """

    _where: ClassVar[str] = ""
    _error: ClassVar[type[HotbedError]] = RecipeError

    def __init_subclass__(cls, *, where: str = "", error: type[HotbedError] = RecipeError) -> None:
        cls._where, cls._error = where, error

    def __post_init__(self) -> None:
        """Raise an error if a field violates its annotation, or fields contradict each other."""
        for name, annotation in annotations_of(type(self)).items():
            value = getattr(self, name)
            check(f"{self.where()}{name}", value, annotation, self._error)
            object.__setattr__(self, name, as_declared(value, annotation))
        for found in self.contradictions():
            raise self._error(found)

    def where(self) -> str:
        """Return the text in front of a field's name in messages."""
        return self._where

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each violated limit that involves several fields or cannot be declared by annotations."""
        yield from ()


class Setting(NamedTuple):
    """A field of a recipe or of one of its sections."""

    key: str
    annotation: Any
    field: Field[Any]
    of: type[Any]


def settings(cls: type[Any], above: str = "") -> Iterator[Setting]:
    """Yield the fields of a dataclass and of its nested sections, with their dotted keys."""
    for field in fields(cls):
        key, annotation = f"{above}{field.name}", annotations_of(cls)[field.name]
        yield Setting(key, annotation, field, cls)
        if get_origin(annotation) is not dict and (section := section_of(annotation)) is not None:
            yield from settings(section, f"{key}.")


@cache
def annotations_of(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, including ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def section_of(annotation: Any) -> type[Any] | None:
    """Return the dataclass of a key's value, or of each entry if the value is a mapping."""
    return next((c for c in (annotation, *get_args(annotation)) if isinstance(c, type) and is_dataclass(c)), None)


def annotation_at(cls: type[Any], key: str) -> Any:
    """Return the annotation of a dotted key, or None if it does not exist. Keys may include names in mappings."""
    annotation: Any = cls
    for name in key.split("."):
        choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        mapping = next((one for one in choices if get_origin(one) is dict), None)
        if annotation is Any:
            return Any
        if mapping is not None:
            annotation = get_args(mapping)[1]
        elif (section := section_of(annotation)) is not None:
            annotation = annotations_of(section).get(name)
        else:
            return None
    return annotation


def problem(key: str, value: Any, annotation: Any) -> str | None:
    """Return a message if a value violates its annotation, or None."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        unmet = None if (found := problem(key, value, parts[0])) else parts[1].unmet(value, parts[0])
        return _got(key, value, unmet) if unmet else found
    if origin in (Union, UnionType):
        found = {part: problem(key, value, part) for part in parts}
        if None in found.values():
            return None
        # The message of the member with the value's type is more precise than a list of all types.
        own = next((found[part] for part in parts if _is_of(value, part)), None)
        return own or _got(key, value, describe(annotation), choices_of(annotation))
    if not _is_of(value, annotation):
        return _got(key, value, describe(annotation), choices_of(annotation))
    entries: list[str | None] = []
    if origin in (dict, Mapping):
        entries = [problem(f"key of {key}", name, parts[0]) for name in value if parts[0] is not str]
        entries += [problem(f"{key}.{name}", entry, parts[1]) for name, entry in value.items()]
    elif origin in (list, tuple):
        entries = [problem(key, entry, parts[0]) for entry in value]
    return next((entry for entry in entries if entry), None)


def as_declared(value: Any, annotation: Any) -> Any:
    """Return the value, converted to float if the annotation declares float and not int."""
    origin, parts = get_origin(annotation), get_args(annotation)
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in parts or [annotation]]
    is_float = origin in (None, Annotated, Union, UnionType) and float in kinds and int not in kinds
    return float(value) if is_float and isinstance(value, Real) and not isinstance(value, bool) else value


def keys_that_may_differ(cls: type[Any]) -> set[str]:
    """Return the dotted keys of settings and sections that a resumed run may change."""
    return {setting.key for setting in settings(cls) if setting.field.metadata.get("may_differ")}


def is_within(key: str, keys: Collection[str]) -> bool:
    """Return whether a dotted key is one of ``keys``, or inside of one."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def _is_of(value: Any, annotation: Any) -> bool:
    origin = get_origin(annotation)
    kind = get_args(annotation)[0] if origin is Annotated else origin or annotation
    if kind is Any:
        return True
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(annotation))
    if kind in (int, float):
        return is_int(value) or (kind is float and isinstance(value, Real) and not isinstance(value, bool))
    return isinstance(value, (list, tuple) if kind in (list, tuple) else kind)


def describe(annotation: Any) -> str:
    """Describe the types and choices of an annotation for messages and help."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return parts[1].name or describe(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(describe(part) for part in parts)
    if origin is Mapping:
        return f"a mapping from {describe(parts[0])} to {describe(parts[1])}"
    if origin is Literal:
        return f"{'one of ' if len(parts) > 1 else ''}{', '.join(map(str, parts))}"
    return _NAMES.get(origin or annotation, "a mapping")


def choices_of(annotation: Any) -> list[str]:
    """Return the names that an annotation offers."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in choices_of(part)]


def _got(key: str, value: Any, expected: str, choices: list[str] | None = None) -> str:
    shown = f"{value:,}" if is_int(value) else repr(value)
    hint = did_you_mean(value, choices) if isinstance(value, str) and choices else ""
    return f"{f'{key}: ' if key else ''}got {shown}, expected {expected}{hint}"


def _append_fix(message: str, fix: str) -> str:
    return f"{message}{'' if message.endswith('?') else '.'} {fix}" if fix else message
