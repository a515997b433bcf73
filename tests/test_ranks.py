"""What torchrun promises: ranks agree whatever share of the work they have, and fail together."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from run import load_tensors

SCRIPT = Path(__file__).with_name("rank_script.py")


def launch(kind, folder, ranks=2):
    """Returns the finished process. One rank is plain python."""
    start = ([sys.executable] if ranks == 1 else
             [sys.executable, "-m", "torch.distributed.run", "--standalone",
              "--nproc_per_node", str(ranks)])
    return subprocess.run([*start, str(SCRIPT), kind, str(folder)], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    done = launch("even", folder, ranks=1)
    assert done.returncode == 0, done.stderr[-2_000:]
    return load_tensors(folder / "vae.safetensors")[0]


@pytest.mark.parametrize("kind", ("even", "uneven", "empty"))
def test_any_share_of_the_work_gives_the_result_of_one_process(kind, alone, tmp_path):
    done = launch(kind, tmp_path)
    assert done.returncode == 0, done.stderr[-2_000:]
    together = load_tensors(tmp_path / "vae.safetensors")[0]
    for name, tensor in alone.items():
        assert (together[name] - tensor).abs().max() < 1e-6, name
    assert max(tensor.abs().max() for tensor in alone.values()) > 0.1


def test_a_rank_that_fails_ends_all_and_its_message_is_the_one_seen(tmp_path):
    done = launch("failing", tmp_path)
    assert done.returncode != 0
    assert "RuntimeError: rank 1 has run out of luck at step 2" in done.stderr
    assert not (tmp_path / "vae.safetensors").exists()
