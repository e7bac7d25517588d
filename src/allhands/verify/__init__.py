"""The proof that distributing did not change the training: ``allhands.verify(model=…, …)``.

The folder and the function share one name. Importing any module of this package binds
`allhands.verify` to the package, whatever `allhands` had offered under that name before, so a
function put there would be gone after the first import. The package itself can therefore be called:
the class of its module hands the call on, in every order of imports.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from allhands.verify.compare import verify
from allhands.verify.report import Report, Row

__all__ = ["Report", "Row", "verify"]


class _CallableModule(ModuleType):
    __call__ = staticmethod(verify)


sys.modules[__name__].__class__ = _CallableModule
# For help() and editors, which look for it on what is called.
__signature__ = inspect.signature(verify)
