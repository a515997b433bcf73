"""What model.py promises: Qwen3's transformer, who sees whom in DiTAR, the pretraining loss."""
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3Model

from conftest import TINY_LM, count_velocity_calls, tiny_ditar
from model import (Cache, DiTAR, ModelConfig, Transformer, TransformerConfig, history_of,
                   interpolate, pretrain_loss, valid_patches)
from sample import guided, solve, times

GQA = TransformerConfig(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_dim=48)
SHAPES = {
    "gqa_wide_heads": GQA,
    "multi_head": TransformerConfig(dim=32, layers=2, heads=4, kv_heads=4, head_dim=8,
                                    mlp_dim=40, rope_theta=1e4),
    "one_kv_head_narrow": TransformerConfig(dim=48, layers=3, heads=6, kv_heads=1, head_dim=6,
                                            mlp_dim=64, norm_eps=1e-5),
}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


# ---- conventions -------------------------------------------------------------------------------

def test_the_conventions_block():
    x_0, x_1 = randn(3, 2, 4), randn(3, 2, 4, seed=1)
    t = torch.tensor([0.0, 0.25, 1.0])
    x_t, v_star = interpolate(x_0, x_1, t)
    assert torch.equal(x_t[0], x_0[0])                              # t=0 is noise
    assert torch.equal(x_t[2], x_1[2])                              # t=1 is data
    assert_close(x_t[1], 0.75 * x_0[1] + 0.25 * x_1[1])             # the straight path
    assert torch.equal(v_star, x_1 - x_0)                           # it leads from noise to data
    v_c, v_0 = x_0, x_1
    assert torch.equal(guided(v_c, v_0, 0.0), v_c)                  # gamma=0 is off
    assert_close(guided(v_c, v_0, 1.5), v_c + 1.5 * (v_c - v_0))
    grid, steps = times(7), []
    solve(lambda x, t: steps.append(t) or x, x_0, grid)
    assert len(steps) == 7 and steps[0] == 0 and grid[-1] == 1      # NFE Euler steps, from noise


def test_history_is_the_patch_before_and_zero_before_the_first():
    patches = randn(2, 3, 2, 4)
    history = history_of(patches)
    assert history.shape == patches.shape
    assert (history[:, 0] == 0).all() and torch.equal(history[:, 1:], patches[:, :-1])


def test_valid_patches_marks_the_first_n_of_each_row():
    assert valid_patches(torch.tensor([2, 0, 3]), 3).tolist() == [
        [True, True, False], [False, False, False], [True, True, True]]


# ---- the transformer against transformers' Qwen3 -----------------------------------------------

def qwen_name(name):
    """Our parameter name -> transformers'."""
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        name = name.replace(f".{part}.", f".self_attn.{part}.")
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = name.replace(f".{part}.", f".mlp.{part}.")
    return name


def qwen_config(c, vocab_size=8):
    return Qwen3Config(
        vocab_size=vocab_size, hidden_size=c.dim, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim,
        intermediate_size=c.mlp_dim, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, pad_token_id=None)


def both(c):
    """Ours and transformers', with the same random weights (norms too)."""
    ours = Transformer(c, causal=True).eval()
    for i, (name, p) in enumerate(ours.named_parameters()):
        p.data = randn(*p.shape, seed=i) * 0.15 + (1.0 if "norm" in name else 0.0)
    theirs = Qwen3Model(qwen_config(c)).eval()
    state = {qwen_name(name): p for name, p in ours.state_dict().items()}
    state["embed_tokens.weight"] = theirs.embed_tokens.weight
    theirs.load_state_dict(state, strict=True)
    return ours, theirs


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_equals_qwen3_on_equal_weights(shape):
    ours, theirs = both(SHAPES[shape])
    x = randn(2, 9, SHAPES[shape].dim)
    expected = theirs(inputs_embeds=x, use_cache=False).last_hidden_state
    assert expected.std() > 0.5                                     # not a comparison of zeros
    assert_close(ours(x), expected)
    positions = torch.tensor([3, 4, 5, 9, 10, 40, 41, 42, 99])      # positions reach the rotation
    expected = theirs(inputs_embeds=x, position_ids=positions.expand(2, -1), use_cache=False,
                      attention_mask=torch.ones(2, 9)).last_hidden_state
    assert_close(ours(x, positions), expected)
    assert_close(ours(x, positions.expand(2, -1)), expected)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_cached_decoding_of_rows_of_unequal_length_equals_qwen3_on_each_row(shape):
    c = SHAPES[shape]
    ours, theirs = both(c)
    prefix, steps = torch.tensor([5, 2, 7, 1]), 4
    rows = [randn(n + steps, c.dim, seed=n) for n in prefix.tolist()]
    expected = [theirs(inputs_embeds=x[None], use_cache=False).last_hidden_state[0] for x in rows]

    x = randn(4, 7, c.dim, seed=99)                                 # junk on the right
    for b, n in enumerate(prefix.tolist()):
        x[b, :n] = rows[b][:n]
    cache = Cache(c, 4, 7 + steps, x.device, x.dtype)
    out = ours(x, cache=cache)
    for b, n in enumerate(prefix.tolist()):
        assert_close(out[b, :n], expected[b][:n])
    cache.lengths = prefix.clone()
    for i in range(steps):
        cache.begin_step()
        x = torch.stack([rows[b][n + i] for b, n in enumerate(prefix.tolist())])[:, None]
        out = ours(x, cache.lengths[:, None], cache=cache)
        cache.end_step()
        for b, n in enumerate(prefix.tolist()):
            assert_close(out[b, 0], expected[b][n + i])


@torch.no_grad()
def test_cache_select_repeats_reorders_and_drops_rows():
    ours, _ = both(GQA)
    x, x_next = randn(3, 4, GQA.dim), randn(3, 1, GQA.dim, seed=1)
    expected = ours(torch.cat((x, x_next), dim=1))[:, -1]
    for kept, repeats in (([2, 0], 1), ([1], 3), ([0, 1, 2], 2)):
        cache = Cache(GQA, 3, 6, x.device, x.dtype)
        ours(x, cache=cache)
        cache.lengths = torch.tensor([4, 4, 4])
        cache.select(torch.tensor(kept), repeats)
        rows = [k for k in kept for _ in range(repeats)]
        cache.begin_step()
        assert_close(ours(x_next[rows], cache.lengths[:, None], cache=cache)[:, 0], expected[rows])


@torch.no_grad()
def test_bfloat16_stays_near_qwen3_in_bfloat16_and_near_float32():
    ours, theirs = both(GQA)
    x = randn(2, 9, GQA.dim)
    exact = ours(x)
    ours, theirs, x = ours.bfloat16(), theirs.bfloat16(), x.bfloat16()
    out = ours(x)
    assert out.dtype == torch.bfloat16
    assert (out.float() - theirs(inputs_embeds=x).last_hidden_state.float()).abs().max() < 0.1
    assert (out.float() - exact).abs().max() < 0.1


@pytest.mark.parametrize("causal", (False, True))
@torch.no_grad()
def test_last_equals_slicing_the_full_output(causal):
    stack = Transformer(GQA, causal).eval()
    x = randn(2, 7, GQA.dim)
    full = stack(x)
    for last in (1, 3, 7):
        assert_close(stack(x, last=last), full[:, -last:])


@torch.no_grad()
def test_causal_looks_back_only_and_bidirectional_both_ways():
    for causal in (True, False):
        stack = Transformer(GQA, causal).eval()
        x = randn(1, 6, GQA.dim)
        edited = x.clone()
        edited[0, 3] += 1
        moved = (stack(edited) - stack(x)).abs().amax(dim=-1)[0] > 1e-4
        assert moved.tolist() == [not causal] * 3 + [True] * 3


# ---- sizes -------------------------------------------------------------------------------------

def count(*modules):
    return sum(p.numel() for m in modules for p in m.parameters())


def test_default_lm_is_qwen3_0_6b():
    c = ModelConfig().lm        # figures of the config.json that is published with Qwen3-0.6B
    assert c == TransformerConfig(dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128,
                                  mlp_dim=3072, rope_theta=1e6, norm_eps=1e-6)
    assert ModelConfig().vocab_size == 151_936
    with torch.device("meta"):
        ours, theirs = Transformer(c, causal=True), Qwen3Model(qwen_config(c))
    shapes = {qwen_name(name): p.shape for name, p in ours.named_parameters()}
    expected = {name: p.shape for name, p in theirs.named_parameters()}
    del expected["embed_tokens.weight"]
    assert shapes == expected
    assert count(ours) == 440_467_456


def test_default_sizes_are_the_papers():
    with torch.device("meta"):
        model = DiTAR(ModelConfig())
    c = model.config
    locdit = count(model.locdit, model.locdit_h, model.locdit_t, model.locdit_history,
                   model.locdit_in, model.locdit_out)
    assert 110e6 < locdit < 125e6                                   # "120M"
    assert (c.patch_frames, c.latent_dim, c.encoder.layers, c.locdit.layers) == (4, 64, 6, 6)
    assert c.locdit.dim == c.lm.dim == 1024
    assert (c.chars_per_patch, c.drop_h) == (0, 0.1)


# ---- DiTAR: who sees whom ----------------------------------------------------------------------

def example(seed=0, B=3, L=5, N=4):
    """text, text_len, patches, n of B rows of unequal lengths."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 13, (B, L), generator=g)
    return (text, torch.tensor([5, 2, 3])[:B], torch.randn(B, N, 2, 4, generator=g),
            torch.tensor([4, 1, 3])[:B])


@torch.no_grad()
def test_a_patch_reaches_the_states_after_it_and_no_other(rate):
    model = tiny_ditar(chars_per_patch=rate)
    text, text_len, patches, _ = example()
    before = model.hidden(text, text_len, patches)
    assert before.shape == (3, 4, model.config.lm.dim)
    for j in range(4):
        edited = patches.clone()
        edited[1, j] += 1
        moved = (model.hidden(text, text_len, edited) - before).abs().amax(dim=-1) > 1e-5
        assert moved[1].tolist() == [i > j for i in range(4)]
        assert not moved[[0, 2]].any()                              # rows never see each other


@torch.no_grad()
def test_every_token_of_a_rows_own_text_reaches_all_its_states(rate):
    model = tiny_ditar(chars_per_patch=rate)
    text, text_len, patches, _ = example()
    before = model.hidden(text, text_len, patches)
    for b in range(3):
        for i in range(text.shape[1]):
            edited = text.clone()
            edited[b, i] = (edited[b, i] + 1) % 13
            moved = (model.hidden(edited, text_len, patches) - before).abs().amax(dim=-1) > 1e-6
            assert moved[b].tolist() == [i < text_len[b]] * 4       # past the end: padding
            assert not moved[torch.arange(3) != b].any()


@torch.no_grad()
def test_hidden_equals_the_lm_on_each_rows_sequence_written_out(rate):
    model = tiny_ditar(chars_per_patch=rate)
    text, text_len, patches, _ = example()
    h = model.hidden(text, text_len, patches)
    for b, n_text in enumerate(text_len.tolist()):
        x = torch.cat((model.embed(text[b, :n_text]), model.speech_start[None],
                       model.encode_patches(patches[b:b + 1])[0]))
        speech = torch.arange(5.0)
        positions = torch.cat((torch.arange(float(n_text)),
                               rate * speech if rate else n_text + speech))
        out = model.lm(x[None], positions)[0]
        assert_close(h[b], out[n_text:n_text + 4])                  # before patches 0, 1, 2, 3


@torch.no_grad()
def test_speech_positions_follow_the_text_or_advance_at_its_rate():
    text, text_len, patches, _ = example()
    _, plain = tiny_ditar().lm_inputs(text, text_len, patches)
    assert plain.tolist() == [list(range(10))] * 3
    _, shared = tiny_ditar(chars_per_patch=0.5).lm_inputs(text, text_len, patches)
    for b, n_text in enumerate(text_len.tolist()):
        assert shared[b, :n_text].tolist() == list(range(n_text))
        # the same in every row, however long its text
        assert shared[b, n_text:n_text + 5].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]


@torch.no_grad()
def test_a_patch_is_encoded_by_itself():
    model = tiny_ditar()
    patches = randn(2, 3, 2, 4)
    together = model.encode_patches(patches)
    assert together.shape == (2, 3, model.config.lm.dim)
    for b in range(2):
        for i in range(3):
            assert_close(model.encode_patches(patches[b:b + 1, i:i + 1])[0, 0], together[b, i])
    swapped = model.encode_patches(patches.flip(2))                 # order of frames counts
    assert (swapped - together).abs().amax(dim=-1).min() > 1e-4


@torch.no_grad()
def test_hidden_of_one_patch_needs_no_patch():
    model = tiny_ditar()
    text, text_len, patches, _ = example()
    assert_close(model.hidden(text, text_len, patches[:, :1]),
                 model.hidden(text, text_len, patches)[:, :1])


# ---- LocDiT ------------------------------------------------------------------------------------

@torch.no_grad()
def test_velocity_depends_on_each_input_of_its_own_row_only():
    model = tiny_ditar()
    inputs = [randn(3, 2, 4), torch.tensor([0.1, 0.5, 0.9]), randn(3, 24, seed=1),
              randn(3, 2, 4, seed=2)]
    v = model.velocity(*inputs)
    assert v.shape == (3, 2, 4)
    for i in range(4):
        edited = [x.clone() for x in inputs]
        edited[i][1] += 0.3
        moved = (model.velocity(*edited) - v).abs().amax(dim=(1, 2)) > 1e-4
        assert moved.tolist() == [False, True, False]
    x_t, t, h, history = inputs
    assert (model.velocity(history, t, h, x_t) - v).abs().max() > 1e-2  # history is no second x_t


@torch.no_grad()
def test_one_t_for_all_rows_equals_the_same_t_in_each():
    model = tiny_ditar()
    x_t, h, history = randn(3, 2, 4), randn(3, 24, seed=1), randn(3, 2, 4, seed=2)
    t = torch.tensor([0.3])
    assert_close(model.velocity(x_t, t, h, history), model.velocity(x_t, t.repeat(3), h, history))


@torch.no_grad()
def test_a_new_model_predicts_zero_velocity():
    torch.manual_seed(0)
    model = DiTAR(ModelConfig(vocab_size=13, latent_dim=4, patch_frames=2, lm=TINY_LM,
                              encoder=TINY_LM, locdit=TINY_LM))
    v = model.velocity(randn(3, 2, 4), torch.rand(3), randn(3, 24), randn(3, 2, 4))
    assert (v == 0).all()


@torch.no_grad()
def test_time_embedding_tells_near_times_apart():
    embedding = tiny_ditar().locdit_t(torch.linspace(0, 1, 21))
    distance = torch.cdist(embedding, embedding) + 10 * torch.eye(21)
    assert distance.min() > 0.05


# ---- the pretraining loss ----------------------------------------------------------------------

def draws(K=2, B=3, N=4, seed=5):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(K, B, N, generator=g), torch.randn(K, B, N, 2, 4, generator=g),
            torch.rand(K, B, N, generator=g) < 0.4)


@torch.no_grad()
def test_pretrain_loss_equals_a_loop_over_draws_rows_and_patches(rate):
    model = tiny_ditar(chars_per_patch=rate)
    model.stop_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.stop_head.bias.zero_()
    text, text_len, patches, n = example()
    t, x_0, drop = draws()
    flow, stop, _ = pretrain_loss(model, text, text_len, patches, n, t, x_0, drop)
    errors, entropies = [], []
    for b in range(3):
        own = patches[b:b + 1]
        h = model.hidden(text[b:b + 1, :text_len[b]], text_len[b:b + 1], own)[0]
        for i in range(int(n[b])):
            target = torch.tensor(int(i == n[b] - 1))
            entropies.append(F.cross_entropy(model.stop_head(h[i]), target))
            before = own[:, i - 1] if i else torch.zeros(1, 2, 4)
            for k in range(2):
                x_1, noise, u = own[0, i], x_0[k, b, i], t[k, b, i]
                v = model.velocity(((1 - u) * noise + u * x_1)[None], u[None],
                                   h[i:i + 1] * (0 if drop[k, b, i] else 1), before)
                errors.append((v[0] - (x_1 - noise)).pow(2).mean())
    assert len(errors) == 16 and drop[:, valid_patches(n, 4)].any()
    assert_close(flow, torch.stack(errors).mean())
    assert_close(stop, torch.stack(entropies).mean())


def test_padding_changes_neither_loss_nor_gradient(rate):
    model = tiny_ditar(chars_per_patch=rate)
    text, text_len, patches, n = example()
    t, x_0, drop = draws()

    def loss_and_gradients(text, patches, t, x_0, drop):
        model.zero_grad(set_to_none=True)
        flow, stop, _ = pretrain_loss(model, text, text_len, patches, n, t, x_0, drop)
        (flow + stop).backward()
        return [flow.detach(), stop.detach()] + [p.grad.clone() for p in model.parameters()]

    plain = loss_and_gradients(text, patches, t, x_0, drop)
    junk = randn(3, 2, 2, 4, seed=8) * 50
    padded = torch.cat((patches, junk), dim=1)
    padded[~valid_patches(n, 6)] = 1e3                              # inside the old width too
    longer = draws(N=6, seed=6)
    for new, old in zip(longer, (t, x_0, drop)):
        new[:, :, :4] = old
    more_text = torch.cat((text, torch.full((3, 3), 7)), dim=1)
    more_text[torch.arange(8) >= text_len[:, None]] = 11
    for a, b in zip(plain, loss_and_gradients(more_text, padded, *longer)):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-5)


def test_dropped_patches_see_zeros_for_h_and_keep_their_history(monkeypatch):
    model = tiny_ditar()
    text, text_len, patches, n = example()
    t, x_0, drop = draws()
    calls = count_velocity_calls(model, monkeypatch)
    pretrain_loss(model, text, text_len, patches, n, t, x_0, drop)
    assert len(calls) == 1                                          # all draws in one call
    valid = valid_patches(n, 4)
    h, dropped = model.hidden(text, text_len, patches)[valid], drop[:, valid]
    seen = calls[0]["h"].unflatten(0, (2, -1))[:, :len(h)]          # the rest is padding
    assert dropped.any() and not dropped.all()
    assert (seen[dropped] == 0).all()
    assert_close(seen[~dropped], h.expand(2, -1, -1)[~dropped].detach())
    history = calls[0]["history"].unflatten(0, (2, -1))[:, :len(h)]
    assert torch.equal(history, history_of(patches)[valid].expand(2, -1, -1, -1))


def test_zero_velocity_costs_the_mean_square_of_the_target():
    model = tiny_ditar()
    torch.nn.init.zeros_(model.locdit_out.weight)
    torch.nn.init.zeros_(model.locdit_out.bias)
    text, text_len, patches, n = example()
    t, x_0, drop = draws()
    flow, _, _ = pretrain_loss(model, text, text_len, patches, n, t, x_0, drop)
    v_star = (patches - x_0)[:, valid_patches(n, 4)]
    assert_close(flow.detach(), v_star.pow(2).mean())


def test_each_loss_reaches_its_own_parameters():
    model = tiny_ditar()
    text, text_len, patches, n = example()
    flow, stop, _ = pretrain_loss(model, text, text_len, patches, n, *draws())
    names, parameters = zip(*model.named_parameters())

    def reached(loss):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return {name for name, g in zip(names, grads) if g is not None and g.abs().max() > 0}
    # x_1, history and patch embeddings are data: only weights can be reached
    assert reached(flow) == {name for name in names if not name.startswith("stop_head")}
    torch.nn.init.normal_(model.stop_head.weight)
    _, stop, _ = pretrain_loss(model, text, text_len, patches, n, *draws())
    assert reached(stop) == {name for name in names if not name.startswith("locdit")}


def test_flow_gradient_equals_a_finite_difference():
    model = tiny_ditar().double()
    text, text_len, patches, n = example()
    t, x_0, drop = draws()
    args = (text, text_len, patches.double(), n, t.double(), x_0.double(), drop)
    flow, _, _ = pretrain_loss(model, *args)
    flow.backward()
    for p in (model.speech_start, model.encoder_token, model.lm.layers[0].q_norm.weight,
              model.locdit.layers[1].gate_proj.weight, model.embed.weight):
        index = p.grad.abs().flatten().argmax()
        with torch.no_grad():
            values = []
            for step in (1e-5, -2e-5):
                p.view(-1)[index] += step
                values.append(pretrain_loss(model, *args)[0].item())
            p.view(-1)[index] += 1e-5
        slope = (values[0] - values[1]) / 2e-5
        # rotary angles and the loss are float32, hence the loose tolerance
        assert slope == pytest.approx(p.grad.view(-1)[index].item(), rel=0.05)


def test_one_patch_can_be_learnt():
    model = tiny_ditar()
    text, text_len = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    patches, n = randn(1, 2, 2, 4, seed=3), torch.tensor([1])       # the second is padding
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(150):
        t, x_0 = torch.rand(16, 1, 2, generator=g), torch.randn(16, 1, 2, 2, 4, generator=g)
        flow, _, _ = pretrain_loss(model, text, text_len, patches, n, t, x_0,
                                   torch.zeros(16, 1, 2, dtype=torch.bool))
        optimizer.zero_grad()
        flow.backward()
        optimizer.step()
        losses.append(flow.item())
    mean_square = patches[:, 0].pow(2).mean().item() + 1      # E |v*|^2 = x_1^2 + 1
    assert sum(losses[-20:]) / 20 < 0.25 * mean_square
