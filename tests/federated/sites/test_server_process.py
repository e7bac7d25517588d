"""What stands for `flwr-serverapp` runs our app for our run, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from allhands.errors import UserError
from allhands.federated.sites import server_process
from allhands.federated.sites.flower_compat import SERVER_APP


def test_only_the_run_that_the_server_has_submitted_is_run(tmp_path):
    called = []

    def load():
        assert (tmp_path / server_process.PID).exists()
        return lambda grid, context: called.append(context.run_id)

    run = server_process.run_ours(tmp_path, load)
    (tmp_path / server_process.RUN_ID).write_text("17")
    context = SimpleNamespace(run_id=17)
    assert run(grid=None, context=context, server_app_dir="", server_app_attr="evil:app") is context
    assert called == [17]
    assert not (tmp_path / server_process.PID).exists()
    with pytest.raises(UserError, match="run 18 was submitted by somebody else"):
        run(grid=None, context=SimpleNamespace(run_id=18))
    assert called == [17]


def test_a_run_before_the_server_has_submitted_one_is_not_ours(tmp_path):
    assert not server_process.ours(tmp_path, 17, wait=0.1)


def test_flower_has_the_names_that_are_replaced(tmp_path):
    pytest.importorskip("flwr")
    module = SERVER_APP.load()
    stand_in = SimpleNamespace(**{name: getattr(module, name) for name in SERVER_APP.names})
    server_process.replace_loading(stand_in, tmp_path)
    assert stand_in.install_from_fab(b"whatever", skip_prompt=True) is None
    assert stand_in.get_fused_config_from_dir(tmp_path, {"a": 1}) == {"a": 1}
    del stand_in.run_
    with pytest.raises(UserError, match=r"has no run_: pip install 'allhands\[flower\]'"):
        server_process.replace_loading(stand_in, tmp_path)
