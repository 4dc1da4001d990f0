"""What a pickle says, without loading any class and without running any code.

`pickletools.genops` of the standard library takes the file apart; this puts containers, numbers and text together, and makes
of everything that names a class or a function a plain `Made`: its name, what it was given, its state.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from krea_runner.observe.checkpoints.tree import CheckpointError

MOST_BYTES = 128 << 20


@dataclass(eq=False, slots=True)
class Made:
    """An object as the pickle describes it. Equal only to itself, so it may be a key of a table."""

    what: str
    """`module.name` of what would have been called or created."""
    given: object = ()
    state: object = None
    items: dict[Any, object] | None = None
    """Of an OrderedDict and the like."""

    def fields(self) -> dict[str, object]:
        """Its attributes, as a plain class or a dataclass pickles them."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {str(key): value for part in parts if isinstance(part, dict) for key, value in part.items()}


_MARK = object()
_VALUE = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 FLOAT BINFLOAT".split()
)
_CONSTANT: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset({"PROTO", "FRAME"})


def read_pickle(data: bytes) -> object:
    """The value of the first pickle in `data`. It may contain itself: walk it only as deep as is meant.

    Raises: CheckpointError where it is cut short or damaged.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack[-1]
            machine.do(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError, OverflowError) as error:
        raise CheckpointError(f"its pickle is cut short or damaged ({str(error)[:80]!a})") from None
    raise CheckpointError("its pickle is cut short")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}

    def do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUE:
            stack.append(argument)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name]())
        elif name in {"BINGET", "LONG_BINGET", "GET"}:
            stack.append(self.memo[int(argument)])
        elif name in {"BINPUT", "LONG_BINPUT", "PUT"}:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(self._last(_TUPLES[name]))]
        elif name not in _NOTHING:
            _DO[name](self, argument)

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("empty stack")
        return self.stack[-count:]

    def pop(self) -> Any:
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def drop(self) -> None:
        self.since_mark()

    def make(self, what: object, given: object) -> None:
        self.stack.append(Made(what.what if isinstance(what, Made) else "?", given))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items = target.items or {}
            target = target.items
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Made):
            raise TypeError("appends to what is no list")

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, Made):
            target.state = state

    def named(self) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(Made(f"{module}.{name}" if isinstance(name, str) and isinstance(module, str) else "?"))


def _key(key: object) -> object:
    """Hashing a nested tuple recurses in C without a limit: such a key stands for itself only."""
    return key if isinstance(key, str | int | float | bytes | Made | None) else Made("key", key)


def _reduce(machine: _Machine, _: object) -> None:
    given = machine.pop()
    machine.make(machine.pop(), given)


def _new_ex(machine: _Machine, _: object) -> None:
    machine.pop()
    _reduce(machine, None)


def _instance(machine: _Machine, argument: Any) -> None:
    machine.make(Made(str(argument).replace(" ", ".")), tuple(machine.since_mark()))


def _object(machine: _Machine, _: object) -> None:
    what, *given = machine.since_mark()
    machine.make(what, tuple(given))


_DO: dict[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": lambda machine, argument: machine.stack.append(Made(str(argument).replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, _: machine.named(),
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_ex,
    "INST": _instance,
    "OBJ": _object,
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": lambda machine, _: machine.stack.append(Made("persistent id", machine.pop())),
    "PERSID": lambda machine, argument: machine.stack.append(Made("persistent id", argument)),
    "EXT1": lambda machine, argument: machine.stack.append(Made(f"extension {argument}")),
    "EXT2": lambda machine, argument: machine.stack.append(Made(f"extension {argument}")),
    "EXT4": lambda machine, argument: machine.stack.append(Made(f"extension {argument}")),
    "NEXT_BUFFER": lambda machine, _: machine.stack.append(Made("buffer")),
    "READONLY_BUFFER": lambda machine, _: None,
    "SETITEM": lambda machine, _: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "LIST": lambda machine, _: machine.stack.append(machine.since_mark()),
    "FROZENSET": lambda machine, _: machine.stack.append(machine.since_mark()),
    "DICT": lambda machine, _: _dict(machine),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.drop(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
}


def _dict(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack.append({})
    machine.set_items(items)
