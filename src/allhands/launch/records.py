"""Log records of workers, which reach the handlers of the process that started them."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from allhands.launch import worker


class Levels:
    @staticmethod
    def capture() -> dict[str, Any]:
        """The levels of the caller's loggers, and which have handlers."""
        loggers = _loggers()
        return {
            "root": logging.root.level,
            "disabled_below": logging.root.manager.disable,
            "levels": {
                name: (one.level, one.disabled)
                for name, one in loggers.items()
                if one.level or one.disabled
            },
            "handled": [
                name
                for name, one in {**loggers, "root": logging.root}.items()
                if _has_handlers(one)
            ],
            "warnings": getattr(logging, "_warnings_showwarning", None) is not None,
        }

    @staticmethod
    def apply(captured: dict[str, Any]) -> None:
        """Let the same records through, and send them to the caller where it has handlers for
        them."""
        _set_level(logging.root, captured["root"])
        logging.disable(captured["disabled_below"])
        for name, (level, disabled) in captured["levels"].items():
            logger = logging.getLogger(name)
            _set_level(logger, level)
            logger.disabled = disabled
        # The others have handlers in every process, as some of torch's.
        if any(not _has_handlers(logging.getLogger(name)) for name in captured["handled"]):
            logging.root.handlers[:] = [Sender()]
        if captured["warnings"]:
            logging.captureWarnings(True)


def _set_level(logger: logging.Logger, level: int) -> None:
    # Even the level that it has already makes all loggers forget what they let through, which takes
    # a millisecond; torch has eight loggers with a level.
    if logger.level != level:
        logger.setLevel(level)


def _has_handlers(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)


def _loggers() -> dict[str, logging.Logger]:
    known = list(logging.root.manager.loggerDict.items())
    return {name: one for name, one in known if isinstance(one, logging.Logger)}


class Sender(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Send it; a process that the worker started has nobody to send it to, and prints it."""
        try:
            values = {key: value for key, value in vars(record).items() if _fits(value)}
            values |= {"msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                values["exc_text"] = logging.Formatter().formatException(record.exc_info)
            if not worker.send({"log": values}) and sys.stderr is not None:
                sys.stderr.write(f"{record.levelname}: {values['msg']}{os.linesep}")
        except Exception:
            self.handleError(record)


def _fits(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def replay(rank: int, message: dict[str, Any]) -> bool:
    """Give a worker's record to the handlers here, with the rank before its text and as its `rank`.

    Returns:
        False when the message is no record.
    """
    values = message.get("log")
    if values is None:
        return False
    record = logging.makeLogRecord(values)
    record.msg = f"[{rank}] {record.msg}"
    record.rank = rank
    logging.getLogger(record.name).handle(record)
    return True
