"""Packages below their floor of branch coverage fail the gate."""

import json
from pathlib import Path

import pytest

from tests import coverage_by_package


@pytest.mark.parametrize(("covered_branches", "status"), [(60, 0), (20, 1)])
def test_sans_io_package_below_its_floor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], covered_branches: int, status: int
) -> None:
    full = {"covered_lines": 900, "num_statements": 900, "covered_branches": 100, "num_branches": 100}
    half = full | {"covered_branches": covered_branches}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"files": {"tiers/dram.py": {"summary": half}, "rpc/server.py": {"summary": full}}}))
    monkeypatch.setattr("sys.argv", ["coverage_by_package", str(report)])
    assert coverage_by_package.main() == status
    assert ("tiers       92.0 %, less than 95 %" in capsys.readouterr().out) == bool(status)
