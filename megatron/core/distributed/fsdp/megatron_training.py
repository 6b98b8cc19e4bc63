# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core's own training loop, ``megatron.training``, shard with Megatron-FSDP v2; opt-in and reversible.

[Note: what the loop is given]
The loop has no place to name another wrapper. So a few names of its modules are given other values, no file is touched,
and `MegatronTraining.disable` gives them back. Until a command line with ``--use-megatron-fsdp-v2`` has been validated
only three are: they declare our flags, prepare the arguments and notice a model that was wrapped by another wrapper.
The wrapper and the names of checkpoints are put in place by such a command line, so that all others train as before.
Names are replaced where the loop looks them up at each call, whoever has imported its functions before.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import megatron.core

KNOWN_VERSIONS = ("0.19.2",)
"""Releases of megatron-core whose training loop has been run with Megatron-FSDP v2."""

Replace = Callable[[Any], Any]


@dataclass(frozen=True)
class Seam:
    """One name of megatron.training that gets another value.

    Attributes:
        module: of the name, below ``megatron.training``.
        name: looked up by the loop at each call.
        replace: returns the new value, given the old one.
        parameters: of the old value, if it is a function: what the new one counts on.
    """

    module: str
    name: str
    replace: Replace
    parameters: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"megatron.training.{self.module}.{self.name}"

    def find(self) -> Any:
        """Return the module that has the name.

        Raises:
            RuntimeError: there is no such name, or it takes other parameters.
        """
        owner = importlib.import_module(f"megatron.training.{self.module}")
        value = getattr(owner, self.name, None)
        found = tuple(inspect.signature(value).parameters) if self.parameters and callable(value) else ()
        if value is None or not set(self.parameters) <= set(found):
            raise RuntimeError(
                f"enable_megatron_fsdp_v2: expected {self.path} with parameters {self.parameters}, got "
                f"{'none' if value is None else found}; another program has changed the training loop. Enable "
                "Megatron-FSDP v2 before it does."
            )
        return owner


class MegatronTraining:
    """What `enable_megatron_fsdp_v2` has changed, and how to undo it; as a context manager, at the end of the block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Seam, Any, Any, Any]] = []

    def replace(self, seams: Sequence[Seam]) -> None:
        """Give names other values, all or none; those that have them already stay.

        Raises:
            RuntimeError: one is not there.
        """
        present = {seam.path for seam, *_ in self._replaced}
        wanted = [seam for seam in seams if seam.path not in present]
        owners = [seam.find() for seam in wanted]
        for seam, owner in zip(wanted, owners, strict=True):
            old = getattr(owner, seam.name)
            new = seam.replace(old)
            setattr(owner, seam.name, new)
            self._replaced.append((seam, owner, old, new))

    @property
    def is_enabled(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced)

    def disable(self) -> None:
        """Give all names their old values back; a second call does nothing.

        Models that are wrapped already stay what they are, and no loop may go on with them.

        Raises:
            RuntimeError: somebody has replaced one of them since; nothing has changed.
        """
        others = [seam.path for seam, owner, _, new in self._replaced if getattr(owner, seam.name) is not new]
        if others:
            raise RuntimeError(
                f"disable: expected the names that enable_megatron_fsdp_v2 has set, got others for {others}. Undo "
                "later changes of the training loop first."
            )
        while self._replaced:
            seam, owner, old, _ = self._replaced.pop()
            setattr(owner, seam.name, old)
        global _current
        if _current is self:
            _current = None

    def __enter__(self) -> MegatronTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


_current: MegatronTraining | None = None


def enable_megatron_fsdp_v2() -> MegatronTraining:
    """Make megatron-core's training loop accept ``--use-megatron-fsdp-v2``; call it before arguments are parsed.

    Every process calls it. Without the flag the loop trains as it does without this call.

    Returns:
        What can be undone with ``disable()``, or as a context manager.

    Raises:
        NotImplementedError: this megatron-core has no training loop, or one that has not been tried.
        RuntimeError: it is enabled already, arguments have been parsed, or the loop is not the released one.
    """
    global _current
    version = megatron.core.__version__.partition("+")[0]
    if version not in KNOWN_VERSIONS or find_spec("megatron.training") is None:
        what = "without megatron.training" if find_spec("megatron.training") is None else "whose loop was not tried"
        raise NotImplementedError(
            f"enable_megatron_fsdp_v2: expected megatron-core {' or '.join(KNOWN_VERSIONS)}, got {version}, {what}. "
            "Install one of these, or train with pretrain_gpt.py (docs/pretrain.md)."
        )
    if _current is not None:
        raise RuntimeError(
            "enable_megatron_fsdp_v2: expected one call, got another while it is enabled. Keep what the first call "
            "returned, and call its disable() first."
        )
    global_vars = importlib.import_module("megatron.training.global_vars")
    if global_vars._GLOBAL_ARGS is not None:
        raise RuntimeError(
            "enable_megatron_fsdp_v2: expected a call before arguments are parsed, got one afterwards, when the model "
            "may be built. Make it the first line of the script."
        )
    # They import megatron.training, which older releases lack.
    from megatron.core.distributed.fsdp import megatron_training_arguments as arguments
    from megatron.core.distributed.fsdp import megatron_training_model as model

    handle = MegatronTraining()

    def prepared() -> None:
        # A script may have kept the function that validates.
        if not handle.is_enabled:
            raise RuntimeError(
                "--use-megatron-fsdp-v2: expected a training loop with Megatron-FSDP v2 enabled, got arguments after "
                "disable(). Call enable_megatron_fsdp_v2() again, and import validate_args anew."
            )
        handle.replace(model.SEAMS)

    handle.replace((*arguments.seams(prepared), model.OPTIMIZER_SEAM))
    _current = handle
    return handle
