"""The interface of an environment: how to tell that it started this process, who we are in it, and
where we meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from allhands.world.layout import Environ, Layout, Meeting


class Environment(ABC):
    """Reads only the mapping that it is given (normally `os.environ`), so that a table of faked
    ones can test it.
    """

    name: ClassVar[str]

    @abstractmethod
    def detected(self, environ: Environ) -> bool:
        """Whether this environment started the process. Never raises."""

    @abstractmethod
    def layout(self, environ: Environ) -> Layout:
        """The place of this process; `UserError` names an unreadable variable, `WorldError` two
        that contradict.
        """

    @abstractmethod
    def meeting(self, environ: Environ, layout: Layout) -> Meeting:
        """Where the processes meet. Must not open or probe anything: every rank calls it, one alone
        may listen.
        """
