"""Commands of a script do and say what programs would, where the script is."""

import subprocess
from pathlib import Path

from tests.shell import functions

SCRIPT = """
echo before
kvstore lab elsewhere || echo "status $?"
kvstore lab trace --capacities 10 --policies lru --processes 1 --json | grep -c capacity
export KVSTORE_CLIENT_DEADLINE_S=soon
kvstore status 2>errors
"""
TRACE = '{"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [0]}\n'


def test_a_command_has_the_scripts_folder_environment_and_streams_and_its_status_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(TRACE)
    with functions() as head:
        done = subprocess.run(["bash", "-c", head + SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (2, ["before", "status 2", "1"])
    assert "cannot read the trace elsewhere" in done.stderr
    assert "KVSTORE_CLIENT_DEADLINE_S" in (tmp_path / "errors").read_text()
