"""Starts processes and looks after them.

* `spawn(fn, args, workers=N)` calls a function in N workers and returns its results.
* `launch_local(Command("script", "train.py"), N)` runs a script in N workers, as `allhands launch
  -n N
train.py` does.
* `worker.send(message)` and `worker.active()` are for code that runs in a worker.

One *agent* a host forks the workers and looks after them (`agent`), one *supervisor* in the
launching process drives all agents (`supervisor`); they speak lines of JSON over pipes
(`protocol`).
"""

from allhands.launch import worker
from allhands.launch.local import launch_local
from allhands.launch.plan import Command
from allhands.launch.spawn import spawn

__all__ = ["Command", "launch_local", "spawn", "worker"]
