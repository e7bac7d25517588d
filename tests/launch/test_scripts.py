"""A script in a worker is what `python script.py` makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience

pytestmark = pytest.mark.usefixtures("forked_python")

# Everything that a script can see of how it was started.
LOOK = """
import sys, os, json, signal, multiprocessing, threading, random
main = sys.modules["__main__"]
look = {
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path, "package": __package__,
    "spec": None if __spec__ is None else [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__, "cached": __cached__, "doc": __doc__,
    "globals": sorted(k for k in globals() if k.startswith("__")),
    "main": main.__dict__ is globals(), "cwd": os.getcwd(), "orig_argv": sys.orig_argv,
    "signals": [repr(signal.getsignal(n)) for n in (2, 13, 15, 17, 1)],
    "threads": threading.current_thread().name, "process": multiprocessing.current_process().name,
    "stdout": [sys.stdout.name, sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty()],
    "stderr": [sys.stderr.name, sys.stderr.encoding, sys.stderr.errors],
    "group": os.getpgrp() == os.getpid(), "flags": list(sys.flags),
}
print(json.dumps(look))
"""


def look(job: Any, *words: str) -> dict[str, Any]:
    code, out, err = job.run("-n", "1", "--no-prefix", "--no-preload", *words)
    assert (code, err) == (0, "")
    return json.loads(out)


def plain(job: Any, *words: str) -> dict[str, Any]:
    out = subprocess.run(
        [sys.executable, *words],
        cwd=job.folder,
        capture_output=True,
        check=True,
        start_new_session=True,
    ).stdout
    return json.loads(out)


def test_a_script_sees_what_plain_python_shows(job: Any) -> None:
    job.script('"""A docstring."""' + LOOK, "deep/script.py")
    words = ("deep/script.py", "a b", "--flag", "quote'\"$x", "-n", "7", "")
    assert look(job, *words) == plain(job, *words)


def test_a_script_behind_a_link(job: Any) -> None:
    job.script(LOOK, "deep/script.py")
    (job.folder / "link.py").symlink_to("deep/script.py")
    assert look(job, "link.py") == plain(job, "link.py")


@pytest.mark.parametrize("name", ["pkg.mod", "pkg"])
def test_a_module(job: Any, name: str) -> None:
    for file in ("mod", "__main__"):
        job.script(LOOK, f"pkg/{file}.py")
    job.script("", "pkg/__init__.py")
    # Writes the caches.
    subprocess.run([sys.executable, "-m", name], cwd=job.folder, capture_output=True, check=True)
    assert look(job, "-m", name, "-m", "x y") == plain(job, "-m", name, "-m", "x y")


def test_a_folder(job: Any) -> None:
    job.script(LOOK, "app/__main__.py")
    ours, theirs = look(job, "app", "x"), plain(job, "app", "x")
    assert {**ours, "path": [str(Path(p).resolve()) for p in ours["path"]]} == {
        **theirs,
        "path": [str(Path(p).resolve()) for p in theirs["path"]],
        "file": ours["file"],
        "spec": ours["spec"],
        "cached": ours["cached"],
    }


# rare: what Python itself makes of an exception, which the others show.
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise SystemExit", 0),
        ("raise SystemExit(7)", 7),
        pytest.param("raise SystemExit(-1)", 255, marks=pytest.mark.rare),
        pytest.param("raise SystemExit(256 + 5)", 5, marks=pytest.mark.rare),
        pytest.param("raise SystemExit(None)", 0, marks=pytest.mark.rare),
        pytest.param("raise SystemExit('words')", 1, marks=pytest.mark.rare),
        pytest.param("raise SystemExit([1, 2])", 1, marks=pytest.mark.rare),
        ("import os; os._exit(9)", 9),
        ("1 / 0", 1),
        pytest.param("def", 1, marks=pytest.mark.rare),
        ("import not_there", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_exit_codes_and_tracebacks(job: Any, body: str, code: int) -> None:
    script = job.script(f"import sys\nprint('before')\n{body}\n")
    ours = job.run("-n", "1", "--no-prefix", "--no-preload", script)
    python = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=job.folder
    )
    assert (
        ours[0]
        == code
        == (python.returncode if python.returncode >= 0 else 128 - python.returncode)
    )
    assert ours[1] == python.stdout
    assert ours[2].partition("allhands: ")[0] == python.stderr


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit('no way')", 1, "no way\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
    ],
)
def test_a_program_with_torch_ends_with_the_interpreter_up(
    job: Any, end: str, code: int, words: str
) -> None:
    """Native threads of PyTorch's abort a process that takes the interpreter down around them."""
    script = job.script(
        "import atexit, sys, torch\n"
        "class Thing:\n    def __del__(self): print('deleted')\n"
        "thing = Thing()\n"
        "atexit.register(print, 'atexit')\n" + end
    )
    ours = job.run("-n", "1", "--no-prefix", script)
    assert ours[:2] == (code, "atexit\n")
    assert ours[2].partition("allhands: ")[0].endswith(words)


def test_teardown_is_pythons_own(job: Any) -> None:
    script = job.script(
        "import atexit, sys, threading, time, weakref\n"
        "class Thing:\n    def __del__(self): print('deleted', __name__)\n"
        "thing = Thing()\n"
        "atexit.register(print, 'atexit')\n"
        "def work():\n    time.sleep(0.3); print('thread', sys.modules['__main__'].__dict__ is "
        "globals())\n"
        "threading.Thread(target=work).start()\n"
        "sys.stdout.write('no newline at the end')\n"
        "print(' of this', end='')\n"
    )
    ours = job.run("-n", "1", "--no-prefix", "--no-preload", script)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ours[:2] == (0, python.stdout + ("" if python.stdout.endswith("\n") else "\n"))


# rare: data/test_feed.py has loader processes in workers.
@pytest.mark.rare
@pytest.mark.serial
def test_processes_and_loaders_inside_a_worker(job: Any) -> None:
    script = job.script(
        "import multiprocessing as mp, torch, os\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.tensor(float(i * i))\n"
        "def double(x): return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'forkserver', 'fork'):\n"
        "        with mp.get_context(method).Pool(1) as pool: assert pool.map(double, [1, 2]) == "
        "[2, 4]\n"
        "    for method in ('spawn', 'fork'):\n"
        "        loader = DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)\n"
        "        assert sum(b.sum() for b in loader) == 140\n"
        "    print('ok', torch.get_num_threads())\n"
    )
    code, out, err = job.run("-n", "1", "--threads", "2", script, timeout=patience(120))
    assert (code, out) == (0, "[0] ok 2\n"), err


@pytest.mark.serial
@pytest.mark.usefixtures("new_python")
def test_random_numbers_differ_as_in_processes_of_their_own(job: Any) -> None:
    script = job.script(
        "import random, numpy, sys\nassert 'torch' in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules, 'no optimizer is sure to need it'\n"
        "print(random.random(), numpy.random.rand(), flush=True)"
    )
    code, out, _ = job.run("-n", "2", "--no-prefix", script)
    (a, b), (c, d) = (line.split() for line in out.splitlines())
    assert code == 0
    assert a != c
    assert b != d


def test_the_world_is_in_the_environment(job: Any) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR ALLHANDS_LAUNCH "
        "OMP_NUM_THREADS"
    )
    script = job.script(f"import os\nprint(*[os.environ[name] for name in '{names}'.split()])")
    _, out, _ = job.run("-n", "2", "--no-prefix", "--no-preload", "--threads", "1", script)
    assert sorted(out.splitlines()) == ["0 0 2 2 0 127.0.0.1 1 1", "1 1 2 2 0 127.0.0.1 1 1"]


def test_a_script_imports_what_lies_beside_it(job: Any) -> None:
    job.script("value = 5", "other/sibling.py")
    script = job.script("import sibling\nprint(sibling.value)", "other/script.py")
    # A file of the working folder must not get in the way of the launcher itself.
    for name in ("json", "signal", "torch", "selectors"):
        job.script("raise RuntimeError('shadowed')", f"{name}.py")
    assert job.run("-n", "1", "--no-preload", script) == (0, "[0] 5\n", "")


def test_a_program_and_its_arguments(job: Any) -> None:
    code, out, _ = job.run(
        "-n",
        "2",
        "--",
        "sh",
        "-c",
        'echo "$RANK/$WORLD_SIZE:" "$@"',
        "name",
        "a b",
        "'q'",
        "-n",
        "9",
    )
    assert (code, sorted(out.splitlines())) == (
        0,
        ["[0] 0/2: a b 'q' -n 9", "[1] 1/2: a b 'q' -n 9"],
    )


def test_a_program_can_use_the_store(job: Any) -> None:
    script = job.script(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x))\ndist.destroy_process_group()"
    )
    code, out, err = job.run("-n", "2", "--", sys.executable, script)
    assert (code, sorted(out.splitlines())) == (0, ["[0] 2", "[1] 2"]), err


def test_a_program_that_cannot_be_run(job: Any) -> None:
    path = job.folder / "prog"
    path.write_bytes(b"\x7fnot a program")
    path.chmod(0o755)
    code, _, err = job.run("-n", "1", "--", str(path))
    assert code == 126
    assert f"failed first: cannot run '{path}': Exec format error" in err


@pytest.mark.serial
def test_lines_of_two_ranks_are_never_torn(job: Any) -> None:
    script = job.script(
        "import os, sys\nrank = os.environ['RANK']\n"
        "for i in range(3000):\n"
        "    print(rank * (i % 200), end='')\n    print('|' + rank)\n"
        "    if i % 10 == 0: os.write(2, (rank * 50 + '\\n').encode())\n"
        "os.write(1, rank.encode() * 3_000_000 + b'|' + rank.encode() + b'\\n')\n"
        "os.write(1, b'\\xff\\xfe\\x00 bytes |' + rank.encode() + b'\\n')\n"
        "os.write(1, b'end|' + rank.encode())\n"
    )
    code, out, err = job.run("-n", "2", "--no-preload", "--log-dir", "logs", script)
    assert code == 0
    for rank in "01":
        mine = [line for line in out.split("\n") if line.startswith(f"[{rank}] ")]
        expected = [rank * (i % 200) + "|" + rank for i in range(3000)]
        expected += [rank * 3_000_000 + "|" + rank, f"\udcff\udcfe\0 bytes |{rank}", f"end|{rank}"]
        assert [line[4:] for line in mine] == expected
        log = (job.folder / f"logs/rank-{rank}.log").read_bytes().decode("utf-8", "surrogateescape")
        assert [line for line in log.split("\n")[:-1] if line != rank * 50] == expected
    assert sorted(err.splitlines()) == ["[0] " + "0" * 50] * 300 + ["[1] " + "1" * 50] * 300


def test_variables_of_workers_and_servers_alone(job: Any) -> None:
    job.fake_servers()
    script = job.script(
        "import os, time, torch\n"
        "while not os.path.exists('servers'): time.sleep(0.05)\n"
        "own = os.environ['ALLHANDS_ONE'], os.environ.get('ALLHANDS_TWO')\n"
        "print(*own, torch.get_num_threads())\n"
    )
    words = "--no-prefix -n 1 --num-servers 1 --env-worker ALLHANDS_ONE=w"
    words += (
        " --env-worker OMP_NUM_THREADS:3 --env-server ALLHANDS_ONE=s --env-server ALLHANDS_TWO=t"
    )
    code, out, err = job.run(*words.split(), script)
    assert (code, "w None 3" in out) == (0, True), err
    (server,) = map(json.loads, (job.folder / "servers").read_text().splitlines())
    assert (server["ALLHANDS_ONE"], server["ALLHANDS_TWO"]) == ("s", "t")
