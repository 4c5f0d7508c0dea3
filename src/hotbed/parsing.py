"""Read untrusted YAML and JSON with limits, and write YAML.

A few hundred bytes can expand to more than the memory: aliases of aliases in YAML (a "billion laughs"), nested lists,
numbers of a million digits. Text beyond a limit raises `TextError`. Its message starts with a verb ("is not JSON: …",
"is longer than …"). Callers put the name of the file in front, and raise an error of their own class.
"""

from __future__ import annotations

import json
import re
import reprlib
import warnings
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from typing_extensions import override

from hotbed.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from pydantic import BaseModel, ValidationError

    from hotbed.errors import HotbedError

MOST_BYTES = 64 << 20
"""Largest JSON or YAML file that is read, in bytes. Recipes and manifests of checkpoints have other limits."""
MOST_DEPTH = 100
"""Upper limit of the nesting of lists and mappings."""
MOST_VALUES = 1 << 18
"""Upper limit of the number of keys and values in a YAML document. Each use of an alias counts all its values."""
MOST_DIGITS = 400
"""Upper limit of the characters of a number in YAML."""
_EXPECTED = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "text",
    "bytes_type": "text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "literal_error": "{expected}",
    "extra_forbidden": "no such key",
    "greater_than_equal": "at least {ge:,}",
    "greater_than": "above {gt:,}",
    "less_than_equal": "at most {le:,}",
    "less_than": "below {lt:,}",
    "too_short": "a length of at least {min_length:,}",
    "too_long": "a length of at most {max_length:,}",
    "string_too_short": "at least {min_length:,} characters",
    "string_too_long": "at most {max_length:,} characters",
}
"""Limits in messages, by pydantic's error type."""
_Model = TypeVar("_Model", bound="BaseModel")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


class TextError(ValueError):
    """Text that is not valid in its format, or exceeds a limit."""


def read_limited(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file or a pipe. Raise `TextError` if it has more than ``most`` bytes, e.g. /dev/zero."""
    with path.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise TextError(f"is longer than {most:,} bytes")
    return content


def map_npy(path: Path) -> NDArray[Any]:
    """Map the array of a ``.npy`` file into memory without allocating it. Raise `TextError` for arrays of objects."""
    from numpy.lib.format import open_memmap

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about headers that Python 2 wrote
            return open_memmap(path, mode="r")
    except (ValueError, EOFError, TypeError, OverflowError, SyntaxError, TokenError) as error:
        raise TextError(f"is not in NumPy's format, or is truncated: {error}") from None


def parse_yaml(text: str) -> Any:
    """Parse a YAML document into plain values."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_bomb(node)
        return loader.construct_document(node)
    except TextError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise TextError(f"is not YAML: {error}") from None
    except (LookupError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML raises these errors for a value that does not match its explicit tag, as in !!int "".
        raise TextError(f"is not YAML: a value does not match its tag ({type(error).__name__}: {error})") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON."""
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
        depth = _depth(values) if isinstance(values, dict | list) else 0
    except RecursionError:
        raise TextError(f"is nested more than {MOST_DEPTH} deep") from None
    except TextError:
        raise
    except ValueError as error:
        raise TextError(f"is not JSON: {error}") from None
    if depth > MOST_DEPTH:
        raise TextError(f"is nested more than {MOST_DEPTH} deep")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise TextError(f"has {reprlib.repr(twice)} twice")
    return found


def _depth(value: object) -> int:
    """Return the nesting depth of lists and objects, which are visited level by level."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MOST_DEPTH:
        inner = [of.values() if isinstance(of, dict) else of for of in level]
        level = [v for of in inner for v in of if isinstance(v, (dict, list))]
        depth += 1
    return depth


def fault_of(error: ValidationError, limits: Mapping[str, str] | None = None) -> str:
    """Describe the first error of a pydantic model: ``KEY: got VALUE, expected LIMIT``.

    ``limits`` replace pydantic's descriptions, e.g. of regular expressions. The key of a limit is the last part of a
    value's key, e.g. ``{"sha256": "64 hexadecimal digits"}``, or ``"[key]"`` for the names in a mapping.
    """
    faults = error.errors(include_url=False)
    first, more = faults[0], f" ({len(faults) - 1:,} more)" * (len(faults) > 1)
    path, found = [str(key) for key in first["loc"]], cast("object", first["input"])
    key = ".".join(key for key in path if key != "[key]")
    if first["type"] == "missing":
        return f"{key} is missing{did_you_mean(path[-1], map(str, cast('Mapping[object, object]', found)))}{more}"
    got = f"{f'{key}: ' if key else ''}got {reprlib.repr(found)}"
    limit = (limits or {}).get(path[-1] if path else "")
    if limit is None and first["type"] in _EXPECTED:
        limit = _EXPECTED[first["type"]].format(**first.get("ctx", {}))
    if limit is None:
        return f"{got}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}"
    return f"{got}, expected {limit}{more}"


def validate_model(
    model: type[_Model],
    values: object,
    error: type[HotbedError],
    where: str,
    *,
    limits: Mapping[str, str] | None = None,
    prefix_keys: bool = True,
) -> _Model:
    """Return a pydantic model of parsed values. Raise an error with the first wrong key, its value and its limit.

    The message starts with ``where``. Without ``prefix_keys``, this applies only to errors about the value as a whole.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as found:
        prefix = f"{where}: " if prefix_keys or not found.errors()[0]["loc"] else ""
        raise error(f"{prefix}{fault_of(found, limits)}") from None


def yaml_text(value: object, *, width: int | None = None) -> str:
    """Write plain values as YAML.

    Text that is not a plain word is quoted, so that every YAML parser reads it as text. PyYAML would write ``1e3``
    without quotes, which other parsers read as a number. It would also write some line separators without escapes,
    which it reads as spaces. With ``width``, the innermost lists and mappings are written in one line of up to
    ``width`` columns. By default, each value has its own line.
    """
    dumped = yaml.dump(
        value,
        Dumper=_Quoting,
        sort_keys=False,
        default_flow_style=None if width else False,
        width=width or 1 << 30,
        allow_unicode=True,
    )
    return dumped.removesuffix("\n").removesuffix("\n...")


class _Quoting(yaml.SafeDumper):
    def represent_data(self, data: Any) -> yaml.Node:
        node = super().represent_data(data)
        if isinstance(node, yaml.ScalarNode) and isinstance(data, str):
            plain = _PLAIN.fullmatch(data) and data.lower() not in ("y", "n") and isinstance(yaml.safe_load(data), str)
            node.style = None if plain else '"'
        if isinstance(node, yaml.CollectionNode) and cast("bool | None", self.default_flow_style) is None:
            parts = [n for entry in node.value for n in (entry if isinstance(entry, tuple) else (entry,))]
            node.flow_style = all(isinstance(n, yaml.ScalarNode) for n in parts)
        return node


def _refuse_bomb(root: yaml.Node) -> None:
    """Raise `TextError` if a document has too many values after the expansion of its aliases."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0  # marks a node whose size is being computed
            parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        if not sizes[id(node)]:
            raise TextError("is infinite: an alias is inside of the value that it refers to")
        return sizes[id(node)]

    if (found := size(root)) > MOST_VALUES:
        shown = f"{found:,}" if found < 10**30 else "over 10^30"
        raise TextError(
            f"has too many keys and values, including repetitions by aliases: got {shown}, expected at most "
            f"{MOST_VALUES:,}"
        )


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, with limits. It rejects repeated keys.

    ``1e-3`` is a number, as in YAML 1.2 and JSON, although PyYAML would require a dot. Dates are text, because JSON has
    no dates.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._open = 0

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes, self._open = self._nodes + 1, self._open + 1
        if self._nodes > MOST_VALUES:
            raise TextError(f"has more than {MOST_VALUES:,} keys and values")
        if self._open > MOST_DEPTH:
            raise TextError(f"is nested more than {MOST_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._open -= 1
        return node

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {_quote(key.value)} is repeated. Remove one", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    @override
    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        _refuse_long(node)
        return super().construct_yaml_int(node)

    @override
    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        _refuse_long(node)
        return super().construct_yaml_float(node)


def _refuse_long(node: yaml.ScalarNode) -> None:
    if len(node.value) > MOST_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"number: got {len(node.value):,} characters, expected at most {MOST_DIGITS}", node.start_mark
        )


def _quote(key: str) -> str:
    return f"'{key}'" if len(key) < 100 else reprlib.repr(key)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
