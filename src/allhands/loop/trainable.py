"""Whether a strategy can train what was passed, with so many workers."""

from __future__ import annotations

from allhands.errors import UserError
from allhands.loop.compiling import check_compiled
from allhands.loop.recomputing import check_recomputed
from allhands.loop.settings import LoopSettings, check_meta
from allhands.step.float8 import check_float8_installed
from allhands.step.precision import CASTS_WEIGHTS
from allhands.strategies.alike import check_parameter_hooks, own_memory
from allhands.strategies.base import Strategy


def check_trainable(settings: LoopSettings, workers: int) -> None:
    """Raise `UserError` for settings that cannot be honoured with this strategy and so many
    workers, before any is started."""
    strategy = settings.strategy
    settings.check_closure()
    strategy.check_settings(settings)
    check_compiled(settings, workers)
    check_recomputed(settings)
    again = bool(settings.activation_checkpointing)
    check_cast(strategy, settings.precision, again)
    check_meta(settings)
    own_memory(settings.model)
    if workers > 1 or settings.accumulate > 1:
        check_parameter_hooks(settings.model, workers)
    strategy.check_training(settings, workers)


def check_cast(strategy: Strategy, precision: str, recomputes: bool) -> None:
    """Raise `UserError` where the weights of a model cannot be cast at each call, as `precision`
    asks; `recomputes`: layers are computed again."""
    if precision not in CASTS_WEIGHTS:
        return
    if precision == "fp8":
        check_float8_installed()
    if strategy.takes_meta:
        instead = "FSDP(param_dtype='bf16')" if strategy.name == "fsdp" else "precision='bf16'"
        raise UserError(
            f"precision={precision!r} casts the weights of a whole model, and strategy "
            f"'{strategy.name}' keeps them in parts; write {instead}"
        )
    if not strategy.whole_model:
        raise UserError(
            f"precision={precision!r} is not for strategy '{strategy.name}'; write precision='bf16'"
        )
    if recomputes:
        raise UserError(
            f"precision={precision!r} casts weights for one call, and activation_checkpointing "
            "computes layers again after it; write precision='bf16'"
        )
