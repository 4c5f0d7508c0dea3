"""Read and write YAML by PyYAML, within the limits of `hotbed.parsing`, where its users are."""

from __future__ import annotations

import re
import reprlib
from typing import Any, cast

import yaml
from typing_extensions import override

from hotbed.parsing import MOST_DEPTH, MOST_DIGITS, MOST_VALUES, TextError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def load(text: str) -> Any:
    """Parse a document, see `hotbed.parsing.parse_yaml`."""
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
        # PyYAML expects that what has an explicit tag, as in !!int "", is such a value.
        raise TextError(f"is not YAML: a value is not what its tag says ({type(error).__name__}: {error})") from None


def dump(value: object, width: int | None) -> str:
    """Write plain values, see `hotbed.files.yaml_text`."""
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
    """Raise `TextError` if a document would have too many values, were its aliases written out."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = 0  # while it is open
            parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        if not sizes[id(node)]:
            raise TextError("has no end: an alias is within what it stands for")
        return sizes[id(node)]

    if (found := size(root)) > MOST_VALUES:
        shown = f"{found:,}" if found < 10**30 else "over 10^30"
        raise TextError(f"stands for {shown} keys and values, with what its aliases repeat; at most {MOST_VALUES:,}")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader of plain values, which takes no key twice and stops at limits while it reads.

    ``1e-3`` is a number, as in YAML 1.2 and JSON; PyYAML wants a dot. Dates are text, which JSON can hold.
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
                        None, None, f"the key {_quoted(key.value)} is there twice; remove one", key.start_mark
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
            None, None, f"a number has {len(node.value):,} characters, at most {MOST_DIGITS}", node.start_mark
        )


def _quoted(key: str) -> str:
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
