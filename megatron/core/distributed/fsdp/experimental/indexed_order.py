# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""An insertion order with weakly held items and constant-time successor lookup."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class IndexedOrder(Generic[T]):
    """Items in insertion order, held weakly and found by identity; an item that has died is skipped."""

    def __init__(self) -> None:
        self._items: list[weakref.ref[T]] = []
        self._index: dict[int, int] = {}

    def append(self, item: T) -> None:
        """Add `item` at the end.

        Raises:
            ValueError: `item` is there already.
        """
        if item in self:
            raise ValueError(f"order: expected each item once, got {item!r} again.")
        self._index[id(item)] = len(self._items)
        self._items.append(weakref.ref(item))

    def __contains__(self, item: object) -> bool:
        index = self._index.get(id(item))
        return index is not None and self._items[index]() is item

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        for reference in self._items:
            item = reference()
            if item is not None:
                yield item

    def successors(self, item: T) -> Iterator[T]:
        """Yield the items after `item`, nearest first.

        Raises:
            KeyError: `item` is not in the order.
        """
        if item not in self:
            raise KeyError(f"order: expected an item of this order, got {item!r}.")
        for position in range(self._index[id(item)] + 1, len(self._items)):
            successor = self._items[position]()
            if successor is not None:
                yield successor
