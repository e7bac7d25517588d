"""How a ``for`` over a loop's generator was left."""

from __future__ import annotations

import dis
from types import FrameType

# What takes the iterator off the stack; the second from Python 3.14 on.
_POPS = ("POP_TOP", "POP_ITER")


def by_break(frame: FrameType | None) -> bool:
    """Whether it was left by ``break`` or ``return``, and not by an error.

    Both close the generator, and only the instruction that does so tells them apart.

    Args:
        frame: of the code with the ``for``, while GeneratorExit is raised in the generator; None
            where the interpreter ends.
    """
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _POPS
