"""docs/cluster.md and its files: what they hold parses, and the projections are those of benchmarks/cluster.py."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks import cluster
from maelm_fast.cli import pretrain

DOCS = Path(__file__).resolve().parents[1] / "docs"


def torchrun_commands() -> dict[str, list[str]]:
    """What stands behind `torchrun`, by file."""
    page = (DOCS / "cluster.md").read_text(encoding="utf-8")
    job = (DOCS / "cluster" / "slurm.sbatch").read_text(encoding="utf-8")
    _, batch = yaml.safe_load_all((DOCS / "cluster" / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {
        "cluster.md": _words(re.search(r"```\ntorchrun (.*?)\n```", page, re.S | re.M)[1]),  # type: ignore[index]
        "slurm.sbatch": _words(re.search(r"^srun .*? torchrun (.*?) &\n", job, re.S | re.M)[1]),  # type: ignore[index]
        "kubernetes.yaml": batch["spec"]["template"]["spec"]["containers"][0]["command"][1:],
    }


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("file", torchrun_commands())
def test_the_commands_are_ones_that_torchrun_and_pretrain_take(file: str) -> None:
    from torch.distributed.run import get_args_parser

    words = torchrun_commands()[file]
    launched = get_args_parser().parse_args(words)
    assert launched.module
    assert launched.training_script == "maelm_fast.cli.main"
    assert launched.max_restarts == 3
    command, *options = launched.training_script_args
    assert command == "pretrain"
    assert pretrain.parsed(options)[0].preset == "base"


def test_the_job_script_is_bash_and_asks_for_a_signal_in_time() -> None:
    script = DOCS / "cluster" / "slurm.sbatch"
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", script], check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(encoding="utf-8"), re.M))
    assert asked["signal"] == "B:TERM@300"
    assert asked["ntasks-per-node"] == "1"


def test_the_pods_find_one_another_by_the_names_of_the_service() -> None:
    service, job = yaml.safe_load_all((DOCS / "cluster" / "kubernetes.yaml").read_text(encoding="utf-8"))
    name, spec = service["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == name
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:29500" in pod["containers"][0]["command"]
    assert f"--nnodes={spec['completions']}" in pod["containers"][0]["command"]
    assert pod["containers"][0]["env"] == [{"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in pod["containers"][0]["command"]
    assert {m["name"] for m in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def test_the_page_has_the_projections_that_the_program_prints() -> None:
    page = (DOCS / "cluster.md").read_text(encoding="utf-8")
    assert f"<!-- cluster -->\n\n{cluster.report()}\n\n<!-- /cluster -->" in page


def test_sending_costs_what_the_ring_moves() -> None:
    nvlink, network, base = cluster.NVLINK["h200"], cluster.NETWORK["h200"], cluster.update("base", "h200", 8, 2048)
    assert base.sending == pytest.approx(2 * 7 / 8 * 0.56e9 / (nvlink * cluster.SHARE), rel=0.01)
    assert cluster.update("base", "h200", 1, 2048).sending == 0
    far = cluster.update("base", "h200", 64, 2048)
    assert far.sending > base.sending * nvlink / network
    assert far.taken[0] == far.compute[0] + far.sending - far.hidden
