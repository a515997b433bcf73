"""Run under torchrun by test_ranks.py: a small fit in which the ranks have unlike work."""
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import load_config  # noqa: E402
from run import Run             # noqa: E402


def main(kind, folder):
    torch.set_num_threads(1)
    run = Run(load_config(str(Path(__file__).parent / "micro.yaml"),
                          [f"out_dir={folder}", "autocast=off", "device=cpu"]), "")
    torch.manual_seed(0)
    module = nn.Linear(4, 1).double()
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)

    def gradients(step):
        """The mean over the rows of this step, which an uneven share of the ranks has."""
        if kind == "failing" and run.rank == 1 and step == 2:
            raise RuntimeError("rank 1 has run out of luck at step 2")
        split = {"even": 6, "uneven": 2, "empty": 12, "failing": 6}[kind]
        mine = rows[:split] if run.rank == 0 else rows[split:]
        if run.ranks == 1:
            mine = rows
        total = run.sum(len(mine))
        if len(mine) == 0:
            return {}
        loss = (module(mine + step) - 1).pow(2).sum() / total
        loss.backward()
        return {"loss": loss.item()}
    weights = run.fit("vae", module, gradients, 6, 0.05)
    run.finish("vae", weights, {}, half=False)
    run.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
