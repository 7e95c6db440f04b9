"""`make cluster` says what a machine lacks, and ends no process but those that it has started."""

import os
import subprocess
import sys
from pathlib import Path

import daemons
import pytest

SCRIPT = Path(__file__).parent / "cluster.py"


def test_a_stopped_daemon_is_gone_and_a_process_that_got_its_pid_is_left_alone(tmp_path):
    daemons.start(tmp_path, tmp_path, "ours", ["sleep", "60"], dict(os.environ))
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "theirs").write_text(f"{other.pid} 1")  # as if the number had been ours before
        pid = daemons.pid_of(tmp_path, "ours")
        for name in ("ours", "theirs"):
            daemons.stop(tmp_path, name)
        assert pid and daemons.started(pid) is None
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root is told of that first")
@pytest.mark.parametrize(
    ("wrapper", "path", "said"),
    [
        (["setpriv", "--bounding-set=-net_admin"], os.environ["PATH"], "root lacks CAP_NET_ADMIN here"),
        ([], "", "apt-get install buildah conntrack"),
    ],
    ids=["capability", "packages"],
)
def test_what_the_machine_lacks_is_said_in_one_line(wrapper, path, said):
    command = [*wrapper, sys.executable, str(SCRIPT), "check"]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"make cluster: {said}")
