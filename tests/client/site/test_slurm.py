"""A silo's jobs of Slurm, as far as no Slurm is needed."""

import os

import pytest
from failing import fails

from client.site.runtime.slurm import job_environment, open_plain, sbatch_words, why_no_answer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu", ["--partition=gpu"]),
        ("-p gpu --comment='a b; rm -rf ~'", ["-p", "gpu", "--comment=a b; rm -rf ~"]),
        (" ", ["--partition="]),
    ],
)
def test_a_partition_or_options(text, words):
    assert sbatch_words(text) == words


def test_a_job_gets_no_secret_of_its_login_node():
    kept = {"PATH": "/bin", "SBATCH_ACCOUNT": "ward"}
    secrets = {
        "https_proxy": "http://user:password@proxy",
        "SILOFL_NODE_KEY": "node.key",
        "SLURM_JWT": "token",
    }
    assert job_environment({**kept, **secrets}) == kept


def test_why_a_job_has_no_answer(tmp_path):
    """The codes are Slurm's, of a disk that was full and of a node that did not see the folder."""
    assert "disk of its state folder full" in why_no_answer("FAILED", "7168", tmp_path / "x")
    assert "never began" in why_no_answer("FAILED", "4021", tmp_path / "x")


def test_neither_links_nor_pipes_stand_for_an_answer(tmp_path):
    """A pipe without a writer would hold the SuperNode for ever."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    fails(OSError, "symbolic links", open_plain, str(tmp_path / "link"), os.O_RDONLY)
    with open(tmp_path / "pipe", "rb", opener=open_plain) as pipe:
        assert pipe.read() == b""
