"""The plan's arithmetic beside what torch itself counts."""
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import plan
from config import Config
from model import DiTAR, ModelConfig, Transformer, TransformerConfig

LM = TransformerConfig(layers=1, mlp_dim=3072)          # one block of Qwen3-0.6B
LOCDIT = TransformerConfig(layers=1)


@pytest.mark.parametrize("c, rows, tokens", ((LM, 2, 64), (LOCDIT, 12, 10)))
def test_activations_are_what_autograd_keeps(c, rows, tokens):
    stack, kept = Transformer(c, causal=False), {}
    own = {p.untyped_storage().data_ptr() for p in stack.parameters()}

    def pack(x):
        memory = x.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return x
    x = torch.randn(rows, tokens, c.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), \
            torch.autocast("cpu", torch.bfloat16):
        stack(x)
    matrices = sum(2 * p.numel() for p in stack.parameters() if p.ndim == 2)    # autocast's copies
    seen = (sum(kept.values()) - matrices) / (rows * tokens)
    assert seen == pytest.approx(plan.saved_bytes(c), rel=0.15)


@pytest.mark.parametrize("c, rows, tokens", ((LM, 2, 64), (LOCDIT, 12, 10)))
def test_operations_of_a_block_are_what_torch_counts(c, rows, tokens):
    with torch.device("meta"):
        stack, x = Transformer(c, causal=False), torch.randn(rows, tokens, c.dim)
    with FlopCounterMode(display=False) as counter:
        stack(x)
    expected = plan.block_flops(c, rows * tokens, tokens)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_the_parts_add_up_to_the_model():
    config = ModelConfig()
    with torch.device("meta"):
        total = sum(p.numel() for p in DiTAR(config).parameters())
    parts = plan.parameters(config)
    assert sum(parts.values()) == total and parts["LM"] == 440_467_456
    assert 115e6 < parts["LocDiT"] < 125e6


def test_more_gpus_mean_less_work_and_no_more_memory_each():
    config = Config()
    one, eight = (plan.step_costs(config, n)[0] for n in (1, 8))
    for phase in ("rollout", "decode", "reward", "update"):
        assert one[phase][0] == pytest.approx(8 * eight[phase][0])
    assert sum(plan.memory(config, 8, 1e9).values()) < sum(plan.memory(config, 1, 1e9).values())
