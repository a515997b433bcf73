"""Shared by the tests of model.py, sample.py and grow.py: a DiTAR that runs in milliseconds."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import DiTAR, ModelConfig, TransformerConfig  # noqa: E402

torch.set_num_threads(1)

# Every width differs, so that mixing two of them up fails; GQA and head_dim != dim / heads too.
TINY_LM = TransformerConfig(dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=40)
TINY_ENCODER = TransformerConfig(dim=16, layers=2, heads=2, kv_heads=1, head_dim=10, mlp_dim=36)
TINY_LOCDIT = TransformerConfig(dim=20, layers=2, heads=2, kv_heads=2, head_dim=12, mlp_dim=28)
RATES = (0.0, 0.7)      # chars_per_patch: the paper's plain positions, and departure 2


def tiny_ditar(seed=0, **changes):
    """A random DiTAR of 13 text ids, D=4, P=2; `changes` go to its ModelConfig.
    What the class starts at 0 or 1 (LocDiT's output, biases, norms) is random here, else half of
    the model would be invisible to the tests. Its stop head never fires, until a test sets it."""
    config = ModelConfig(**{"vocab_size": 13, "latent_dim": 4, "patch_frames": 2, "lm": TINY_LM,
                            "encoder": TINY_ENCODER, "locdit": TINY_LOCDIT, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DiTAR(config)
        for name, p in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(p, 0.7, 1.3)
            elif p.ndim == 1:
                torch.nn.init.normal_(p, std=0.3)
            elif name in ("embed.weight", "locdit_out.weight"):
                torch.nn.init.normal_(p, std=0.3)
    set_stop(model, torch.zeros(config.lm.dim), -30.0)
    return model


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def set_stop(model, direction, bias):
    """Makes the stop head fire exactly where h @ direction + bias > 0."""
    with torch.no_grad():
        model.stop_head.weight.copy_(torch.stack((torch.zeros_like(direction), direction)))
        model.stop_head.bias.copy_(torch.tensor([0.0, bias]))


def count_velocity_calls(model, monkeypatch):
    """Records each LocDiT call as a dict of its arguments in the list that is returned."""
    calls, velocity = [], model.velocity

    def recording(x_t, t, h, history):
        calls.append({"x_t": x_t.detach().clone(), "t": t.detach().clone(),
                      "h": h.detach().clone(), "history": history.detach().clone()})
        return velocity(x_t, t, h, history)
    monkeypatch.setattr(model, "velocity", recording)
    return calls


@pytest.fixture(params=RATES, ids=("plain_positions", "chars_per_patch"))
def rate(request):
    return request.param
