"""Runs the Python blocks of the documentation: those of a page in order, in one namespace and one
folder, on small data.

``python -m tests.page_blocks`` runs all pages in one process, whose workers stay warm, and prints a
line of JSON for each block. Names that a page's fragments use and do not make come from `PRELUDES`.
What is not run here stands in `ELSEWHERE`, with where it is or why it cannot be.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^( *)```(python|console)( title=\"[^\"]+\")?\n(.*?)^\1```", re.MULTILINE | re.DOTALL
)

#: (page, language) -> the test that runs all such blocks of the page, or why none can; or (page,
#: language, words in one block).
ELSEWHERE: dict[tuple[str, ...], str] = {
    ("README.md", "python"): "tests/test_docs.py::test_the_first_examples_run_as_shown",
    ("docs/index.md", "python"): "tests/test_docs.py::test_the_first_examples_are_the_same",
    ("docs/federated.md", "python"): "tests/federated/test_page.py",
    ("docs/kvstore.md", "console"): "tests/kvstore/test_page.py",
    ("docs/kvstore.md", "python", "mean.py"): "tests/kvstore/test_page.py",
    ("docs/kvstore.md", "python", "rows.py"): "tests/kvstore/test_page.py",
    ("docs/launching.md", "console"): "tests/launch/test_page.py",
    ("docs/launching.md", "python"): "tests/launch/test_page.py",
    ("docs/mpi.md", "console"): "tests/comm/test_mpi.py",
    ("docs/mpi.md", "python"): "tests/comm/test_mpi.py",
    ("docs/ssh.md", "console"): "tests/cluster/test_docs.py",
    ("docs/ssh.md", "python"): "tests/cluster/test_docs.py",
    ("docs/slurm.md", "console"): "tests/cluster/test_docs.py",
    ("docs/slurm.md", "python", "allhands.init()"): "tests/cluster/test_docs.py",
    ("docs/slurm.md", "python", 'title="run.py"'): "tests/cluster/test_docs.py",
    (
        "docs/slurm.md",
        "python",
        "slurm.setup()",
    ): "needs a step of srun: tests/cluster/test_srun.py",
    (
        "docs/doctor.md",
        "console",
    ): "needs ssh hosts, and its report differs by machine: tests/doctor/test_examination.py",
    (
        "docs/horovod.md",
        "python",
        "import tensorflow",
    ): "TensorFlow is not among what the tests install",
    (
        "docs/migrate_coala.md",
        "python",
        '"gpu": 1',
    ): "needs CIFAR-10 and a GPU; tests/federated/coala runs the same calls",
    ("docs/step.md", "python"): "step='graph' needs a GPU: tests/runner/test_gpu.py",
    (
        "docs/local_sgd.md",
        "console",
    ): "kills a worker while it looks on: tests/examples/test_local_sgd.py",
    ("docs/verify.md", "console"): "shows part of a report: tests/cli/test_verify.py",
    ("docs/world.md", "console"): "three launchers: tests/world/test_world_processes.py",
}

COMMON = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import allhands
from allhands import *
from tests.page_blocks import Filling, filled

torch.manual_seed(0)
train_set = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
valid_set = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
loader, valid_loader = DataLoader(train_set, 16), DataLoader(valid_set, 16)
loaders = {"train": loader, "valid": valid_loader}
class Layer(nn.Sequential): pass
class Bottleneck(nn.Sequential): pass
model = nn.Sequential()
model.encoder = Layer(nn.Linear(6, 16), nn.ReLU())
model.middle = Bottleneck(nn.Linear(16, 16), nn.ReLU())
model.head = nn.Linear(16, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6])
runner = Filling(device="cpu")
filled(globals())
"""
_GPT = """
from allhands.models import GPT as _GPT
from allhands.models.transformer import NextToken
def GPT(layers, heads, width): return _GPT(17, 8, layers=2, heads=2, width=16)
model = _GPT(17, 8, layers=2, heads=2, width=16)
criterion = NextToken()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
tokens = torch.randint(0, 17, (32, 9))
loaders = {"train": DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 8)}
filled(globals())
"""
#: What comes before the blocks of a page, behind `COMMON`.
PRELUDES: dict[str, str] = {
    "docs/datasets.md": """
import os
from pathlib import Path
from allhands.data.catalogue import VOCABULARY
if "ALLHANDS_DATA" not in os.environ:
    os.environ["ALLHANDS_DATA"] = os.getcwd()
    Path("tinyshakespeare.txt").write_text((VOCABULARY * 17160)[:1115394])
""",
    "docs/fsdp.md": _GPT,
    "docs/meshes.md": _GPT,
    "docs/pipeline.md": _GPT,
    "docs/tensor.md": _GPT,
    "docs/memory.md": "SupervisedRunner = Filling",
    "docs/local_sgd.md": """
from allhands import kvstore as kv
own, shared, samples_of_these_steps = nn.Linear(2, 1), nn.Linear(2, 1), 32
store = kv.create("local")
""",
    "docs/run-file.md": "import numpy",
    "docs/start.md": """
def make_datasets(folder): return {"train": train_set, "valid": valid_set}
""",
    "docs/verify.md": """
from allhands.verify.compare import verify as _verify
MyDDP = DDP
allhands.verify = lambda **given: _verify(**given | {"workers": [2], "steps": 2})
""",
}

#: What is tried behind a page's blocks, for what they only define.
AFTERWARDS: dict[str, str] = {
    "docs/callbacks.md": """
SupervisedRunner(device="cpu").train(
    model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=2,
    callbacks=[Announce(), allhands.AveragedWeights(None, start=3), allhands.StopAfter(hours=11.5)],
    scheduler=(scheduler, "step"),
)
""",
    "docs/losses.md": """
x = torch.randn(24, 4)
for chosen, given, target in (
    (weighted, nn.Linear(4, 2), torch.rand(24, 3)),
    (
        PerTarget(token_mean),
        nn.Sequential(nn.Linear(4, 10), nn.Unflatten(1, (2, 5))),
        torch.randint(0, 5, (24, 2)),
    ),
):
    SupervisedRunner(device="cpu").train(
        model=given, criterion=chosen, optimizer=torch.optim.SGD(given.parameters(), lr=0.1),
        datasets={"batch_size": 8, "train": TensorDataset(x, target)},
    )
elbo((x, torch.zeros(24, 2), torch.zeros(24, 2)), x)
""",
    "docs/run-file.md": """
numpy.save("patients.npy", numpy.concatenate([numpy.ones((120, 13)), numpy.zeros((120, 1))], 1))
assert [len(part) for part in load(".", 13).values()] == [20, 100]
""",
    "docs/federated_sites.md": """
np.savez("own.npz", x=np.ones((4, 6)), y=np.zeros(4))
assert len(load(".")["train"]) == 4
""",
    "docs/start.md": """
class Net(nn.Linear):
    def forward(self, x, edges, graph): return super().forward(x)
class Batch:
    def __init__(self, rows):
        self.x, self.y = (torch.stack(part) for part in zip(*rows))
        self.edge_index = self.batch = None
net = Net(6, 3)
keys = {"x": "x", "edges": "edge_index", "graph": "batch"}
SupervisedRunner(device="cpu", input_key=keys, target_key="y").train(
    model=net, criterion=criterion, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    loaders={"train": DataLoader(train_set, 16, collate_fn=Batch)}, callbacks=[Announce()],
)
""",
    "docs/horovod.md": "hvd.shutdown()",
    "docs/migrate_coala.md": "assert issubclass(Careful, coala.BaseClient)",
}


_DEFAULTS: dict[str, Any] = {}


def filled(names: dict[str, Any]) -> None:
    """Let `Filling` pass these where a page writes three dots."""
    _DEFAULTS.update({key: names[key] for key in ("model", "criterion", "optimizer", "loaders")})


def _filling() -> Any:
    from allhands import Mesh, SupervisedRunner
    from allhands.loop import workers

    class Filling(SupervisedRunner):
        """A runner whose `train(..., option=…)` is given the rest. On at most two workers: a mesh
        of more is planned only."""

        def train(self, *dots: Any, **given: Any) -> Any:
            assert dots in ((), (...,))
            if isinstance(given.get("distributed"), Mesh) and given.get("workers", 0) > 2:
                return workers.plan(given["distributed"], given["workers"], "cpu")
            if "distributed" in given:
                given["workers"] = 2
            return super().train(**(_DEFAULTS if dots else {}) | given)

    return Filling


def __getattr__(name: str) -> Any:
    if name == "Filling":  # torch is imported by the process that runs the blocks alone
        globals()["Filling"] = made = _filling()
        return made
    raise AttributeError(name)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The language, the code with its title, and the code alone of a page's blocks."""
    found = BLOCK.findall(page.read_text())
    return [
        (kind, title + "\n" + textwrap.dedent(text), textwrap.dedent(text))
        for _, kind, title, text in found
    ]


def elsewhere(page: Path, language: str, text: str) -> tuple[str, ...] | None:
    """The entry of `ELSEWHERE` that a block belongs to."""
    name = str(page.relative_to(ROOT))
    for key in ELSEWHERE:
        if key[:2] == (name, language) and all(words in text for words in key[2:]):
            return key
    return None


def run_here(page: Path) -> bool:
    """Whether blocks of a page are run here."""
    return any(elsewhere(page, kind, titled) is None for kind, titled, _ in blocks(page))


def run(page: Path) -> dict[str, Any]:
    """Run the blocks of a page that are run here; what went wrong, and how long it took."""
    name = str(page.relative_to(ROOT))
    code = [
        (kind, text) for kind, titled, text in blocks(page) if elsewhere(page, kind, titled) is None
    ]
    parts = [
        ("python", COMMON),
        ("python", PRELUDES.get(name, "")),
        *code,
        ("python", AFTERWARDS.get(name, "")),
    ]
    began, said, namespace = time.perf_counter(), io.StringIO(), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            with contextlib.redirect_stdout(said):
                for number, (kind, text) in enumerate(parts):
                    if kind == "console":
                        _commands(text)
                    else:
                        exec(compile(text, f"{name}, part {number - 1}", "exec"), namespace)
        except BaseException:
            return {"page": name, "error": traceback.format_exc() + said.getvalue()[-2000:]}
    return {"page": name, "error": None, "seconds": round(time.perf_counter() - began, 2)}


def _commands(text: str) -> None:
    """Run ``$ allhands …`` in this process."""
    import shlex

    from allhands.cli.main import run as command

    for line in re.findall(r"^\$ allhands (.+)$", text, re.MULTILINE):
        assert command(shlex.split(line)) == 0, line


def main() -> None:
    # Two workers whatever the cores: a page that says nothing means all of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from allhands.loop import workers

    workers.cores = lambda: 2
    wanted = [ROOT / name for name in sys.argv[1:]] or [
        *ROOT.glob("*.md"),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    for page in wanted:
        if run_here(page):
            print(json.dumps(run(page)), flush=True)


if __name__ == "__main__":
    sys.modules["tests.page_blocks"] = sys.modules["__main__"]
    main()
