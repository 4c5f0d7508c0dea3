"""Know which tensors a launch of a Triton kernel writes, from the kernel's source: where its stores point to.

The source is evaluated once, without numbers: a value is a constant of the launch (whose branches alone are followed),
a tuple of values, or the tensors that it may point into. What `tl.load` returns points nowhere; an unknown branch is
followed both ways. So a tensor that is not named here is not written; one that is named may be left as it is.
"""

from __future__ import annotations

import ast
import gc
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Kernel = JITFunction[Any] | InterpretedFunction

_STORES = ("store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg", "atomic_and", "atomic_or")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@dataclass(frozen=True)
class _Known:
    """A constant: a number, a type, a function, a module."""

    value: Any


Value = Any
"""`_Known`, a tuple of values, or the identities of tensors that something may point into: a frozenset of ints."""
_NOWHERE: frozenset[int] = frozenset()


def written(kernel: Kernel, args: Sequence[Any], options: dict[str, Any]) -> list[Tensor]:
    """List the tensors among the arguments of a launch that the kernel may write."""
    tensors: dict[int, Tensor] = {}

    def given(arg: Any) -> Value:
        if isinstance(arg, Tensor):
            tensors[id(arg)] = arg
            return frozenset([id(arg)])
        if isinstance(arg, tuple) and hasattr(arg, "_fields"):
            return type(arg)(*map(given, arg))
        if is_dataclass(arg) and not isinstance(arg, type):
            return type(arg)(**{f.name: given(getattr(arg, f.name)) for f in fields(arg)})
        return tuple(map(given, arg)) if isinstance(arg, (tuple, list)) else _Known(arg)

    reading = _Reading()
    reading.call(kernel, [given(arg) for arg in args], {name: given(value) for name, value in options.items()})
    found = [tensors[i] for i in reading.stored]
    tensors.clear()  # `given` refers to itself, and would keep them until somebody collects garbage
    return found


@cache
def _source(kernel: Kernel) -> ast.FunctionDef:
    was_on = gc.isenabled()
    gc.disable()  # Python 3.11 fails where objects that run Python are freed while it parses
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    finally:
        if was_on:
            gc.enable()
    assert isinstance(function, ast.FunctionDef)
    return function


class _Reading:
    """Evaluate a kernel, and what it calls."""

    def __init__(self) -> None:
        self.stored: dict[int, None] = {}

    def call(self, kernel: Kernel, args: Sequence[Value], named: dict[str, Value]) -> Value:
        """Evaluate a function of Triton's; return what it returns."""
        function = _source(kernel)
        names = [arg.arg for arg in function.args.args]
        here = dict(zip(names, args, strict=False)) | {n: v for n, v in named.items() if n in names}
        defaults = function.args.defaults
        frame = _Frame(self, here, kernel.fn.__globals__)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            here.setdefault(name, frame.value(default))
        frame.run(function.body)
        return frame.returned

    def store(self, to: Value) -> None:
        self.stored.update(dict.fromkeys(sorted(_points(to))))


@dataclass
class _Frame:
    """Names of a function that is evaluated, and what it has returned so far."""

    reading: _Reading
    names: dict[str, Value]
    outside: dict[str, Any]
    returned: Value = _NOWHERE

    def run(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._run(statement)

    def _run(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Return(value=ast.expr() as result):
                found = self.value(result)
                self.returned = found if self.returned == _NOWHERE else _either(self.returned, found)
            case ast.Assign(targets=targets, value=given):
                for target in targets:
                    self._assign(target, self.value(given))
            case ast.AnnAssign(target=target, value=ast.expr() as given):
                self._assign(target, self.value(given))
            case ast.AugAssign(target=ast.Name(id=name), value=given):
                self.names[name] = _points(self.names.get(name, _NOWHERE)) | _points(self.value(given))
            case ast.If(test=test, body=body, orelse=orelse):
                known = self.value(test)
                for branch, wanted in ((body, True), (orelse, False)):
                    if not isinstance(known, _Known) or bool(known.value) is wanted:
                        self.run(branch)
            case ast.For(target=target, iter=of, body=body):
                self.value(of)
                self._assign(target, _NOWHERE)
                self.run(body)
                self.run(body)  # with what the first turn has assigned
            case ast.While(body=body):
                self.run(body)
                self.run(body)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Pass() | ast.Return(value=None) | ast.Assert():
                pass
            case _:
                raise NotImplementedError(f"{ast.unparse(statement)}: say in kernel_writes.py what it writes")

    def _assign(self, target: ast.expr, given: Value) -> None:
        if isinstance(target, ast.Tuple):
            parts = given if isinstance(given, tuple) else [_points(given)] * len(target.elts)
            for name, part in zip(target.elts, parts, strict=True):
                self._assign(name, part)
            return
        assert isinstance(target, ast.Name), ast.unparse(target)
        before = self.names.get(target.id)  # of the other branch, or the turn before
        pointing = _points(before) - _points(given) if before is not None else _NOWHERE
        self.names[target.id] = _points(given) | pointing if pointing else given

    def value(self, expression: ast.expr) -> Value:
        """Evaluate an expression."""
        match expression:
            case ast.Constant(value=value):
                return _Known(value)
            case ast.Name(id=name):
                return self.names[name] if name in self.names else _constant(self.outside.get(name, _builtin(name)))
            case ast.Attribute(value=of, attr=name):
                found = self.value(of)
                if isinstance(found, _Known):
                    return _constant(getattr(found.value, name)) if hasattr(found.value, name) else _NOWHERE
                return getattr(found, name) if hasattr(type(found), "_fields") else _NOWHERE
            case ast.Subscript(value=of, slice=at):
                found, place = self.value(of), self.value(at)
                if isinstance(found, tuple) and isinstance(place, _Known):
                    return found[place.value]
                return _points(found)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(map(self.value, parts))
            case ast.Call():
                return self._call(expression)
            case ast.Compare(left=left, ops=[by], comparators=[right]):
                one, other = self.value(left), self.value(right)
                if isinstance(one, _Known) and isinstance(other, _Known) and type(by) in _COMPARE:
                    return _Known(_COMPARE[type(by)](one.value, other.value))
                return _NOWHERE
            case ast.UnaryOp(op=ast.Not(), operand=of):
                found = self.value(of)
                return _Known(not found.value) if isinstance(found, _Known) else _NOWHERE
            case ast.BoolOp(op=by, values=parts):
                return self._decided(by, [self.value(part) for part in parts])
            case _:
                children = (child for child in ast.iter_child_nodes(expression) if isinstance(child, ast.expr))
                return frozenset[int]().union(*(_points(self.value(child)) for child in children))

    @staticmethod
    def _decided(by: ast.boolop, parts: Sequence[Value]) -> Value:
        decides = isinstance(by, ast.Or)
        known = [bool(part.value) for part in parts if isinstance(part, _Known)]
        if decides in known:
            return _Known(decides)
        return _Known(not decides) if len(known) == len(parts) else _NOWHERE

    def _call(self, call: ast.Call) -> Value:
        args = [self.value(arg) for arg in call.args]
        named = {keyword.arg or "": self.value(keyword.value) for keyword in call.keywords}
        function = self.value(call.func)
        called = function.value if isinstance(function, _Known) else None
        if isinstance(called, (JITFunction, InterpretedFunction)):
            return self.reading.call(called, args, named)
        if isinstance(called, type) and hasattr(called, "_fields"):
            return called(*args, **named)
        if called is not None and getattr(tl, getattr(called, "__name__", ""), None) is called:
            if called.__name__ in _STORES:
                self.reading.store(args[0])
            if called is tl.load or called.__name__ in _STORES:
                return _NOWHERE
        own = _points(self.value(call.func.value)) if isinstance(call.func, ast.Attribute) else _NOWHERE
        return own.union(*map(_points, (*args, *named.values())))


def _builtin(name: str) -> Any:
    return getattr(__builtins__, name, None) if not isinstance(__builtins__, dict) else __builtins__.get(name)


def _constant(value: Any) -> _Known:
    return _Known(value.value if isinstance(value, tl.constexpr) else value)


def _points(value: Value) -> frozenset[int]:
    """The tensors that something may point into."""
    if isinstance(value, frozenset):
        return value
    if isinstance(value, tuple):
        return frozenset[int]().union(*map(_points, value))
    return _NOWHERE


def _either(one: Value, other: Value) -> Value:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        parts = [_either(a, b) for a, b in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    return _points(one) | _points(other)
