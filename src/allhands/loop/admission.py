"""What a worker that joins a training must have in common with those that take part in it.

It is compared before the worker asks to join, so that one that does not fit ends alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from allhands.errors import WorldError
from allhands.launch import worker
from allhands.version import __version__
from allhands.world.regroup import Regrouping


@dataclass(frozen=True)
class Terms:
    """What is compared, between workers of one version of allhands.

    Attributes:
        training: number of the training, of those in the script.
        model: its form, in words.
        strategy: in words.
        script: the file that the workers run, "" where they run none.
        digest: of its contents.
        version: of allhands.
    """

    training: int
    model: str
    strategy: str
    script: str
    digest: str
    version: str = __version__

    def difference(self, others: Terms) -> str:
        """What stands against this worker's joining the others, as a sentence; "" if nothing."""
        if self.digest != others.digest:
            return (
                f"its {self.script or 'program'} is another version than the script that the "
                f"others run ({self.digest or 'none'}, and theirs is {others.digest or 'none'}); "
                "give it the same file"
            )
        if self.training != others.training:
            return (
                f"the others are in training number {others.training} of the script, which a "
                "worker that comes later cannot enter"
            )
        if self.model != others.model:
            return f"it has a model {self.model}, and the others have one {others.model}"
        if self.strategy != others.strategy:
            return f"its strategy is {self.strategy}, and that of the others is {others.strategy}"
        return ""


def terms_of(training: int, models: Mapping[str, nn.Module], strategy: str) -> Terms:
    """Those of this process, with the models that are trained, by name."""
    forms = [
        [name, key, list(parameter.shape)]
        for name, model in models.items()
        for key, parameter in model.named_parameters()
    ]
    form = f"of {len(forms)} parameters ({zlib.crc32(json.dumps(forms).encode()):08x})"
    script, digest = worker.program
    return Terms(training, form, strategy, script, digest)


def tell(regrouping: Regrouping, own: Terms) -> None:
    """In a worker that takes part: say what others are compared with."""
    regrouping.set_terms(json.dumps(asdict(own)))


def check(regrouping: Regrouping, own: Terms) -> None:
    """In a worker that is to join: wait until the others have begun, and compare.

    Raises:
        WorldError: it cannot take part; says why.
    """
    told = json.loads(regrouping.terms())
    if told["version"] == own.version:
        what = own.difference(Terms(**told))
    else:  # which may compare other things
        what = f"it has allhands {own.version}, and the others have {told['version']}"
    if what:
        raise WorldError(f"this worker cannot take part: {what}")
