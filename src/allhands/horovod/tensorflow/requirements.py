"""What must be installed for the TensorFlow half, looked at before anything of it is imported."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from allhands.errors import UserError

OLDEST = (2, 16)


def checked_tensorflow() -> Any:
    """The module ``tensorflow``."""
    try:
        tensorflow = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise UserError(
            "allhands.horovod.tensorflow needs TensorFlow: pip install 'allhands[tensorflow]'"
        ) from error
    version = str(getattr(tensorflow, "__version__", "0"))
    if _major_and_minor(version) < OLDEST:
        raise UserError(
            f"allhands.horovod.tensorflow needs TensorFlow 2.16 or newer, and {version} is "
            "installed: pip install 'tensorflow>=2.16'"
        )
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in {"1", "true"}:
        raise UserError(
            f"TF_USE_LEGACY_KERAS={os.environ['TF_USE_LEGACY_KERAS']} makes tf.keras Keras 2, and "
            "allhands.horovod.tensorflow needs Keras 3: unset TF_USE_LEGACY_KERAS"
        )
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        raise UserError(
            f"KERAS_BACKEND={backend}: allhands.horovod.tensorflow needs Keras on TensorFlow: set "
            "KERAS_BACKEND=tensorflow"
        )
    return tensorflow


def _major_and_minor(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
