"""Typed fields of a method's state, for both sides, stored by the one codec of ``state.py``.

A method declares its state as one class per side::

    class AppleClientState(ClientState):
        dr = Array()  # p_i (N,); None before the silo's first round
        cores = Arrays("core.")  # w_j^c (Σ,), by the silo's name
        dr_rounds = Item[list[int]](list)

``state.dr`` reads and writes the entry ``dr`` of the file, ``state.cores["a"]`` the entry ``core.a``. Names of fields
may change; keys in files do not. Replace an array, never write into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, Self, TypeVar, overload

from torch import Tensor

from strategies.base.state import State
from strategies.base.transport.payload import BUFFERS, GLOBAL, MODEL_OF

T = TypeVar("T")


class Field:
    """One entry of a state; its key in the file is the field's name unless another one is given."""

    def __init__(self, key: str = "") -> None:
        self.key = key

    def __set_name__(self, owner: type[State], name: str) -> None:
        self.key = self.key or name


class Array(Field):
    """An array, or None if the state has none; setting None removes it."""

    @overload
    def __get__(self, state: None, owner: type[State]) -> Self: ...
    @overload
    def __get__(self, state: State, owner: type[State]) -> Tensor | None: ...
    def __get__(self, state: State | None, owner: type[State]) -> Self | Tensor | None:
        return self if state is None else state.arrays.get(self.key)

    def __set__(self, state: State, value: Tensor | None) -> None:
        put(state.arrays, self.key, value)


class RequiredArray(Field):
    """An array that ``start_state`` sets; reading it earlier raises KeyError."""

    @overload
    def __get__(self, state: None, owner: type[State]) -> Self: ...
    @overload
    def __get__(self, state: State, owner: type[State]) -> Tensor: ...
    def __get__(self, state: State | None, owner: type[State]) -> Self | Tensor:
        return self if state is None else state.arrays[self.key]

    def __set__(self, state: State, value: Tensor) -> None:
        state.arrays[self.key] = value


class Item(Field, Generic[T]):
    """Any JSON value; ``default()`` if the state has none. Setting None removes it."""

    def __init__(self, default: Callable[[], T], key: str = "") -> None:
        super().__init__(key)
        self.default = default

    @overload
    def __get__(self, state: None, owner: type[State]) -> Self: ...
    @overload
    def __get__(self, state: State, owner: type[State]) -> T: ...
    def __get__(self, state: State | None, owner: type[State]) -> Self | T:
        if state is None:
            return self
        found: T = state.numbers[self.key] if self.key in state.numbers else self.default()
        return found

    def __set__(self, state: State, value: T) -> None:
        put(state.numbers, self.key, value)


class Arrays(Field):
    """The arrays whose keys begin with ``prefix``, by the rest of their keys."""

    @overload
    def __get__(self, state: None, owner: type[State]) -> Self: ...
    @overload
    def __get__(self, state: State, owner: type[State]) -> Entries[Tensor]: ...
    def __get__(self, state: State | None, owner: type[State]) -> Self | Entries[Tensor]:
        return self if state is None else Entries(state.arrays, self.key)


class Items(Field, Generic[T]):
    """The numbers whose keys begin with ``prefix``, by the rest of their keys."""

    @overload
    def __get__(self, state: None, owner: type[State]) -> Self: ...
    @overload
    def __get__(self, state: State, owner: type[State]) -> Entries[T]: ...
    def __get__(self, state: State | None, owner: type[State]) -> Self | Entries[T]:
        return self if state is None else Entries(state.numbers, self.key)


class Entries(MutableMapping[str, T]):
    """A view of the entries whose keys begin with ``prefix``."""

    def __init__(self, entries: dict[str, T], prefix: str) -> None:
        self.entries, self.prefix = entries, prefix

    def __getitem__(self, name: str) -> T:
        return self.entries[f"{self.prefix}{name}"]

    def __setitem__(self, name: str, value: T) -> None:
        self.entries[f"{self.prefix}{name}"] = value

    def __delitem__(self, name: str) -> None:
        del self.entries[f"{self.prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key.removeprefix(self.prefix) for key in self.entries if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.entries)


def put(entries: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry; None removes it."""
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


class ClientState(State):
    """The state of every silo; the base class of a method's own."""

    personal = Array()  # the personal model (Σ,) of the last round that the silo took part in
    personal_buffers = Array("personal.buffers")  # its running statistics
    best = Array()  # the personal model with the best validation score


class ServerState(State):
    """The server state of most methods; the base class of a method's own."""

    model = RequiredArray(GLOBAL)  # the shared model, or the shared part of one
    buffers = Array(BUFFERS)  # its running statistics
    models = Arrays(MODEL_OF)  # each silo's last model (Σ,), by the silo's name
