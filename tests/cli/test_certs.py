"""Promises of certs.py, through the command; what it makes is used by a cluster in docs/security.md, whose commands are run."""

import sys
from pathlib import Path
from stat import S_IMODE

import pytest
from click.testing import CliRunner

from kvstore.cli.main import kvstore
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.config import ServerTlsSettings
from kvstore.security.tls.subjects import MASTER, NODE, CertificateSubject


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvstore, ["certs", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def folder(tmp_path: Path) -> str:
    folder = str(tmp_path / "certs")
    assert run("init", folder)[0] == 0
    return folder


def test_certificates_are_made_for_each_role_and_keys_are_secret(folder: str) -> None:
    assert run("master", folder, "--host", "master-1", "--host", "10.0.0.1")[1] == (
        f"made {folder}/master-master-1.pem and {folder}/master-master-1.key, for kvstore://master: master-1, 10.0.0.1, for 90 days\n"
    )
    assert run("node", folder, "*", "--host", "n1", "--days", "7")[1].endswith("node-any.key, for kvstore://node/*: n1, for 7 days\n")
    assert run("client", folder)[1].endswith("client.key, for kvstore://client/, for 90 days\n")
    assert run("client", folder, "red team")[1].endswith("client-red team.key, for kvstore://client/red%20team, for 90 days\n")
    assert {S_IMODE(key.stat().st_mode) for key in Path(folder).glob("*.key")} == {0o600}
    for name, subject in (("master-master-1", CertificateSubject(MASTER)), ("node-any", CertificateSubject(NODE, "*"))):
        settings = ServerTlsSettings(tls_ca=f"{folder}/ca.pem", tls_cert=f"{folder}/{name}.pem", tls_key=f"{folder}/{name}.key")
        made = Certificates.of(settings)
        assert made is not None
        assert made.subjects == (subject,)


def test_what_cannot_be_made_is_refused_in_one_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run("init", folder)
    assert (code, said) == (2, f"kvstore: error: {folder}/ca.pem exists: remove it first, or choose another name\n")
    code, said = run("client", folder, "../x")
    assert (code, said) == (2, f"kvstore: error: 'client-../x' is not a file name in {folder}: names must not contain / or a null byte\n")
    monkeypatch.setitem(sys.modules, "kvstore.security.tls.authority", None)
    monkeypatch.delattr("kvstore.security.tls.authority")
    code, said = run("client", folder)
    assert (code, said.splitlines()[0]) == (
        2,
        "kvstore: error: `kvstore certs` needs the package cryptography: pip install '.[certs]' in the checkout of kvstore",
    )
