"""Whether a strategy can train what was passed, with so many workers."""

from __future__ import annotations

from allhands.loop.compiling import check_compiled
from allhands.loop.recomputing import check_recomputed
from allhands.loop.settings import LoopSettings, check_meta
from allhands.strategies.alike import check_parameter_hooks, own_memory


def check_trainable(settings: LoopSettings, workers: int) -> None:
    """Raise `UserError` for settings that cannot be honoured with this strategy and so many
    workers, before any is started."""
    strategy = settings.strategy
    settings.check_closure()
    strategy.check_settings(settings)
    check_compiled(settings, workers)
    check_recomputed(settings)
    check_meta(settings)
    own_memory(settings.model)
    if workers > 1 or settings.accumulate > 1:
        check_parameter_hooks(settings.model, workers)
    strategy.check_training(settings, workers)
