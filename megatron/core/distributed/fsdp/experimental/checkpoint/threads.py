# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""`in_threads`: several calls at once, all of which have ended afterwards. It knows nothing of checkpoints.

Not `concurrent.futures`, which takes no work any more once the interpreter ends, when a save in the background goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")


def in_threads(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call every function in a thread of its own, the first one in this thread; return their results in order.

    Raises:
        BaseException: what one has raised, the first in time; after all have ended.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(1, len(functions))]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        if functions:
            call(0)
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]
