# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Looks through a pickle's opcodes before it is unpickled; builds no object and knows no class.

Python's unpickler believes the sizes that a pickle claims: one flipped bit can make it reserve, and fill, tens of GB.
So lengths have to lie within the pickle, memo indices too, and opcodes have to be among those that Python 3 writes for
plain data from protocol 2 on.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

# Opcodes of a fixed length, with their arguments. Runs of them are skipped at once: most of a pickle is such runs.
_FIXED = re.compile(rb"(?s:[(01NRbea\]su}t)Q\x81\x85-\x89\x8f-\x94]|[Khq\x80].|M.{2}|[Jj].{4}|[G\x95].{8})+")
# Opcodes whose argument begins with its length, and the bytes of that length.
_COUNTED = {b"\x8c": 1, b"X": 4, b"C": 1, b"B": 4, b"\x8a": 1}
_STOP, _GLOBAL, _LONG_BINPUT = b".", b"c", b"r"


def check_opcodes(data: bytes) -> None:
    """Raise pickle.UnpicklingError unless a pickle consists of the expected opcodes, and of no more than it holds."""
    at = 0
    while True:
        run = _FIXED.match(data, at)
        at = run.end() if run else at
        opcode, at = data[at : at + 1], at + 1
        if opcode == _STOP:
            return
        if opcode in _COUNTED:
            begin = at + _COUNTED[opcode]
            at = begin + int.from_bytes(data[at:begin], "little")
        elif opcode == _GLOBAL:
            for _ in range(2):
                at = data.find(b"\n", at) + 1 or len(data) + 1
        elif opcode == _LONG_BINPUT:
            index = int.from_bytes(data[at : at + 4], "little")
            at = at + 4 if index < len(data) else len(data) + 1
        else:
            raise pickle.UnpicklingError(f"unexpected opcode {opcode!r} at byte {at - 1}")
        if at > len(data):
            raise pickle.UnpicklingError(f"opcode {opcode!r} claims more than the {len(data)} bytes there are")


def dotted_names(data: bytes) -> set[str]:
    """Return the names that a pickle of any protocol asks for; those before the damage, if it is damaged."""
    found: set[str] = set()
    strings: list[str] = []  # in the order in which they were pushed
    memo: dict[int, str | None] = {}
    try:
        last: str | None = None  # what the opcode before pushed, if a string
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "MEMOIZE" or "PUT" in opcode.name:
                memo[len(memo) if argument is None else int(argument)] = last
                continue
            last = memo.get(argument) if opcode.name.endswith("GET") and isinstance(argument, int) else None
            if opcode.name in ("GLOBAL", "INST"):
                module, _, attribute = str(argument).partition(" ")
                # Protocol 2 has the names of Python 2.
                module, attribute = NAME_MAPPING.get((module, attribute), (module, attribute))
                found.add(f"{IMPORT_MAPPING.get(module, module)}.{attribute}")
            elif opcode.name == "STACK_GLOBAL":
                found.add(".".join(strings[-2:]))
            elif isinstance(argument, str):
                last = argument
            if last is not None:
                strings.append(last)
    except (ValueError, TypeError):  # damage; whoever unpickles says it with the file's name
        return found
    return found
