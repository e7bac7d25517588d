"""The Gluon tutorial's command for real: ResNet-18 on CIFAR-10, two hosts, two workers and two
parameter servers."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path

import pytest

from tests.cluster.hosts import DISK, Hosts
from tests.cluster.launching import Launch, shared_folder
from tests.examples.running import EXAMPLES

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def cifar10(hosts: Hosts, shared_data: Path) -> Path:
    """A folder that all hosts see, with CIFAR-10 as its publisher packs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(shared_data))
        official = importlib.import_module("write_official")
        images, labels = official.load(shared_data, "cifar10", "train", parts=[1])
        test = official.records(*official.load(shared_data, "cifar10", "test"))
    folder = hosts.folder / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(official.records(images, labels))
    for number in range(2, 6):  # all have to be there, and only the first is read
        (folder / f"data_batch_{number}.bin").symlink_to("data_batch_1.bin")
    (folder / "test_batch.bin").write_bytes(test)
    return folder.parent


def test_the_tutorial_on_two_hosts_with_two_servers(hosts: Hosts, cifar10: Path) -> None:
    folder = shared_folder(hosts, "cifar10_dist")
    shutil.copy(EXAMPLES / "kvstore_cifar10" / "cifar10_dist.py", folder)
    shutil.copy(EXAMPLES / "kvstore_cifar10" / "hosts", folder)
    target = f"{DISK}/cifar10_dist"
    words = ["-n", "2", "-s", "2", "-H", "hosts", "--sync-dst-dir", target, "--launcher", "ssh"]
    # 17 samples are 9 and 8, that is 3 batches for the first worker and 2 for the second: nobody
    # may wait for ever.
    short = "--samples 17 --test-samples 20 --batch-size 4 --epochs 2"
    command = f"python {target}/cifar10_dist.py {short}"
    with Launch(hosts, folder, *words, command, extra={"ALLHANDS_DATA": str(cifar10)}) as job:
        code, said = job.end(60)
    assert code == 0, said
    for number, host in enumerate(hosts.names):
        assert f"{host} ({hosts.address[host]}, eth0) rank {number}, server {number}" in said
        assert f"[{host} {number}] Total number of workers: 2\n" in said
        assert f"[{host} {number}] This worker's rank: {number}\n" in said
        accuracies = re.findall(
            rf"^\[{host} {number}\] Epoch (\d+): Test_acc (0\.\d\d0000|1\.000000)$",
            said,
            re.MULTILINE,
        )
        assert [epoch for epoch, _ in accuracies] == ["0", "1"], said
    assert hosts.left(5) == []
