"""The LM is Qwen3's: released weights load by name, and the outputs are transformers' own."""
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from conftest import TINY_ENCODER, TINY_LOCDIT
from model import Cache, DiTAR, ModelConfig, TransformerConfig, qwen3_config

SHAPES = {                      # name -> Qwen3Config fields, tied embeddings
    "grouped": (dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, intermediate_size=48), True),
    "every head its own": (dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                                num_key_value_heads=3, head_dim=8, intermediate_size=40), False),
    "one key head": (dict(hidden_size=40, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=1, head_dim=12, intermediate_size=64), False),
}


def released(folder, name, theta=1e6, **changes):
    """A random Qwen3 checkpoint in the layout of the hub; returns its model and our config."""
    fields, tied = SHAPES[name]
    config = Qwen3Config(**(fields | changes), vocab_size=50, rope_parameters={
        "rope_type": "default", "rope_theta": theta}, tie_word_embeddings=tied,
        attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(len(name))
        theirs = Qwen3ForCausalLM(config)
        for key, p in theirs.named_parameters():
            torch.nn.init.normal_(p, mean=1.0 if "norm" in key else 0.0, std=0.2)
    theirs.save_pretrained(folder)
    shape = qwen3_config(config)
    vocab = shape.pop("vocab_size")
    return theirs.eval(), ModelConfig(vocab_size=vocab, latent_dim=4, patch_frames=2,
                                      lm=TransformerConfig(**shape), encoder=TINY_ENCODER,
                                      locdit=TINY_LOCDIT)


def outputs(ours, ids):
    """The LM's outputs for whole rows, and for six tokens at once and then one by one."""
    config, dtype = ours.config.lm, ours.embed.weight.dtype
    cache = Cache(config, 2, 16, "cpu", dtype)
    parts = [ours.lm(ours.embed(ids[:, :6]), cache=cache)]
    cache.lengths = torch.tensor([6, 6])
    for i in range(6, 11):
        cache.begin_step()
        parts.append(ours.lm(ours.embed(ids[:, i:i + 1]), cache.lengths[:, None].float(),
                             cache=cache))
        cache.end_step()
    return ours.lm(ours.embed(ids)), torch.cat(parts, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("name", SHAPES)
def test_the_lm_equals_transformers_at_once_and_token_by_token(name, tmp_path):
    theirs, config = released(tmp_path, name)
    ours = DiTAR.from_qwen3(tmp_path, config).eval()
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    exact = theirs.model(input_ids=ids).last_hidden_state
    for out in outputs(ours, ids):
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)
    # in bf16 both round: ours is as near to the exact outputs as theirs
    def error(out):
        return (out.float() - exact).square().mean().sqrt()
    allowed = 1.25 * error(theirs.model.to(torch.bfloat16)(input_ids=ids).last_hidden_state)
    assert 1e-3 < allowed < 0.1
    assert all(error(out) < allowed for out in outputs(ours.to(torch.bfloat16), ids))


def test_only_text_embedding_and_lm_come_from_the_checkpoint(tmp_path):
    theirs, config = released(tmp_path, "grouped")
    ours = DiTAR.from_qwen3(tmp_path, config)
    assert torch.equal(ours.embed.weight, theirs.model.embed_tokens.weight)
    assert sum(p.numel() for p in ours.lm.parameters()) + ours.embed.weight.numel() == sum(
        p.numel() for p in theirs.model.parameters())
    assert not ours.locdit_out.weight.any()             # the rest is as new


def test_a_half_precision_checkpoint_becomes_fp32_weights(tmp_path):
    theirs, config = released(tmp_path, "grouped")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    ours = DiTAR.from_qwen3(tmp_path, config)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert torch.equal(ours.embed.weight, theirs.model.embed_tokens.weight.float())


def test_another_shape_is_refused_and_its_fields_named(tmp_path):
    _, config = released(tmp_path, "grouped")
    wrong = replace(config, vocab_size=51, lm=replace(config.lm, kv_heads=4, rope_theta=1e4))
    with pytest.raises(ValueError, match="kv_heads 2 there, 4 in the config, rope_theta 1000000.0 "
                                         "there, 10000.0 in the config, vocab_size 50 there, 51"):
        DiTAR.from_qwen3(tmp_path, wrong)


@pytest.mark.parametrize("changes", (
    {"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 4,
                               "max_window_layers": 1}))
def test_a_qwen3_that_block_cannot_be_is_refused(changes, tmp_path):
    with pytest.raises(ValueError, match="Block has none of them"):
        qwen3_config(Qwen3Config(**SHAPES["grouped"][0], **changes))


def test_another_kind_of_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="is a llama checkpoint; wanted qwen3"):
        DiTAR.from_qwen3(tmp_path, ModelConfig())


def test_the_default_config_is_qwen3_0_6b_and_the_papers_sizes():
    config = ModelConfig()
    released = Qwen3Config(             # the released config.json of Qwen3-0.6B
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True)
    shape = qwen3_config(released)
    assert shape.pop("vocab_size") == config.vocab_size and TransformerConfig(**shape) == config.lm
    with torch.device("meta"):
        ours, theirs = DiTAR(config), Qwen3Model(released)

    def count(*modules):
        return sum(p.numel() for m in modules for p in m.parameters())
    assert count(ours.lm, ours.embed) == count(theirs) == 596_049_920
    block = 6 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024 + 2 * 128     # attention, SwiGLU, norms
    assert count(ours.encoder) == 6 * block + 1024 == 113_261_056
    locdit = count(ours.locdit, ours.locdit_h, ours.locdit_t, ours.locdit_history, ours.locdit_in,
                   ours.locdit_out)
    assert 115e6 < locdit < 125e6                       # "120M parameters"
