"""What sample.py promises: the grid, guidance, batched generation that equals its slow form."""
import pytest
import torch

from conftest import count_velocity_calls, set_stop, tiny_ditar
from sample import (SampleConfig, Utterance, decode_wavs, generate, guided, next_patch, solve,
                    stream, times, utterance_noise)

P, D = 2, 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def assert_same(ours, theirs, tol=1e-5):
    """Two lists of Utterances are the same speech."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.stopped == b.stopped
        assert_close(a.latents, b.latents, tol)


# ---- the grid and the solver -------------------------------------------------------------------

def test_sway_grid_has_the_known_values():
    # 1 - cos(pi u / 2) on u = 0, 1/10, ..., 1
    expected = [0, .0123, .0489, .1090, .1910, .2929, .4122, .5460, .6910, .8436, 1]
    assert times(10).tolist() == pytest.approx(expected, abs=5e-5)
    assert times(5).tolist() == pytest.approx(expected[::2], abs=5e-5)
    assert times(4, sway=0.0).tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("sway", (-1.0, -0.4, 0.0, 0.8))
@pytest.mark.parametrize("nfe", (1, 2, 7, 32))
def test_the_grid_increases_from_exactly_0_to_exactly_1(nfe, sway):
    grid = times(nfe, sway)
    assert grid.shape == (nfe + 1,) and grid.dtype == torch.float32
    assert grid[0] == 0 and grid[-1] == 1 and (grid.diff() > 0).all()


@pytest.mark.parametrize("nfe", (1, 3, 10))
def test_a_constant_velocity_lands_exactly_on_the_data(nfe):
    x_0, x_1 = randn(3, P, D), randn(3, P, D, seed=1)
    for sway in (-1.0, 0.0):
        assert_close(solve(lambda x, t: x_1 - x_0, x_0, times(nfe, sway)), x_1, 1e-6)


def test_solve_is_eulers_method():
    grid = torch.tensor([0.0, 0.2, 0.5, 1.0])                       # dx/dt = x + t by hand:
    x = solve(lambda x, t: x + t, torch.tensor([1.0]), grid)        # 1.2, 1.62, 2.68
    assert_close(x, torch.tensor([2.68]))


def test_guidance_extrapolates_away_from_the_unconditional_velocity():
    assert guided(torch.tensor(2.0), torch.tensor(1.0), 1.5) == 3.5
    assert guided(torch.tensor(2.0), torch.tensor(1.0), 0.0) == 2.0


def test_noise_of_a_patch_depends_on_seed_and_index_not_on_the_cap():
    long, short = utterance_noise(7, 9, P, D), utterance_noise(7, 4, P, D)
    assert long.shape == (9, P, D)
    assert torch.equal(long[:4], short)
    assert not torch.equal(utterance_noise(8, 4, P, D), short)
    assert torch.unique(long).numel() == long.numel()               # no patch shares its noise
    state = torch.get_rng_state()
    utterance_noise(7, 9, P, D)
    assert torch.equal(torch.get_rng_state(), state)


# ---- config ------------------------------------------------------------------------------------

def test_sample_config_refuses_what_cannot_be_run():
    with pytest.raises(ValueError, match="sample.nfe=0; wanted at least one Euler step"):
        SampleConfig(nfe=0)
    with pytest.raises(ValueError, match="sample.cfg_scale=-0.5; wanted 0"):
        SampleConfig(cfg_scale=-0.5)
    SampleConfig(nfe=1, cfg_scale=0)


def test_default_sampling_is_the_papers_and_the_cap_grows_with_the_text():
    c = SampleConfig()
    assert (c.nfe, c.cfg_scale, c.sway) == (10, 1.5, -1.0)
    c = SampleConfig(max_patches_per_token=1.5, max_patches_extra=10)
    assert [c.cap(n) for n in (0, 1, 4)] == [10, 12, 16]            # rounded up


# ---- generate against its slow form ------------------------------------------------------------

TEXTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8], [9]]
N_PROMPT = [3, 1, 4, 2]
CAPS = [6, 3, 8, 5]
SEEDS = [11, 22, 33, 44]


def prompts_of(lengths=N_PROMPT):
    return [randn(n, P, D, seed=50 + i) for i, n in enumerate(lengths)]


def model_that_stops(rate):
    """Its stop head fires at various patches, for these TEXTS before and after their caps."""
    model = tiny_ditar(chars_per_patch=rate)
    spoken = generate(model, TEXTS, prompts_of(), [8] * 4, SEEDS, nfe=4, trace=True)
    h = torch.cat([u.h for u in spoken])
    direction = randn(h.shape[1], seed=4)
    scores = (h @ direction).sort().values                          # (32,)
    # fires on about the upper 8 of 32 states; a wide gap between scores, so rounding is no matter
    gap = scores.diff()[22:26].argmax() + 22
    set_stop(model, direction, -(scores[gap] + scores[gap + 1]).item() / 2)
    return model


def slow_generate(model, text, prompt, cap, seed, nfe, cfg_scale, sway=-1.0):
    """One utterance, no cache: the LM reads everything again for every patch."""
    text_len, patches, states = torch.tensor([len(text)]), prompt[None], []
    noise = utterance_noise(seed, cap, P, D)
    for i in range(cap):
        padded = torch.cat((patches, torch.zeros(1, 1, P, D)), dim=1)
        h = model.hidden(torch.tensor([text]), text_len, padded)[:, -1]
        patch = next_patch(model, h, patches[:, -1], noise[i:i + 1], times(nfe, sway), cfg_scale)
        patches = torch.cat((patches, patch[:, None]), dim=1)
        states.append(h)
        if model.stop_head(h).argmax() == 1:
            return Utterance(patches[0, len(prompt):], True, torch.cat(states))
    return Utterance(patches[0, len(prompt):], False, torch.cat(states))


@pytest.mark.parametrize("cfg_scale", (0.0, 1.5))
@torch.no_grad()
def test_a_batch_equals_uncached_generation_one_utterance_at_a_time(rate, cfg_scale):
    model = model_that_stops(rate)
    batch = generate(model, TEXTS, prompts_of(), CAPS, SEEDS, nfe=4, cfg_scale=cfg_scale,
                     trace=True)
    slow = [slow_generate(model, *row, nfe=4, cfg_scale=cfg_scale)
            for row in zip(TEXTS, prompts_of(), CAPS, SEEDS)]
    assert_same(batch, slow)
    for a, b in zip(batch, slow):
        assert_close(a.h, b.h)


def test_a_batch_with_rows_that_finish_early_equals_its_singles(rate):
    model = model_that_stops(rate)
    prompts, caps = prompts_of(), [8, 8, 8, 5]
    batch = generate(model, TEXTS, prompts, caps, SEEDS, nfe=4)
    lengths = [len(u.latents) for u in batch]
    # else this test would not see a row leave: some stop, at different times, and some do not
    assert len(set(lengths)) > 2 and min(lengths) < 4
    assert {u.stopped for u in batch} == {True, False}
    assert_same(batch, [generate(model, [TEXTS[i]], [prompts[i]], [caps[i]], [SEEDS[i]], nfe=4)[0]
                        for i in range(4)])


def test_rows_that_wait_in_a_large_batch_change_nothing(rate):
    # 1 of 20 rows finished leaves 19, more than 16: it stays a while, past its own cap
    model = tiny_ditar(chars_per_patch=rate)
    texts, prompts = TEXTS * 5, prompts_of() * 5
    caps, seeds = [2] + [6] * 18 + [4], list(range(20))
    batch = generate(model, texts, prompts, caps, seeds, nfe=2)
    assert [len(u.latents) for u in batch] == caps
    for i in (0, 1, 10, 19):
        assert_same(batch[i:i + 1], generate(model, texts[i:i + 1], prompts[i:i + 1],
                                             caps[i:i + 1], seeds[i:i + 1], nfe=2))


def test_a_stop_that_comes_after_the_cap_does_not_count(rate):
    model = model_that_stops(rate)
    one = [TEXTS[:1], prompts_of()[:1]]
    full, = generate(model, *one, [8], SEEDS[:1], nfe=4)
    cut = len(full.latents) - 2
    assert full.stopped and cut >= 1
    # capped two patches earlier, beside 15 rows that go on, so that it waits in the batch
    rows = [[x[0]] + [x[1]] * 15 for x in (TEXTS, prompts_of(), [cut, 8], SEEDS)]
    batch = generate(model, *rows, nfe=4)
    assert [len(u.latents) for u in batch] == [cut] + [8] * 15
    assert not batch[0].stopped
    assert_close(batch[0].latents, full.latents[:cut])


def test_results_do_not_depend_on_the_order_of_the_batch(rate):
    model = model_that_stops(rate)
    prompts, order = prompts_of(), [2, 0, 3, 1]
    batch = generate(model, TEXTS, prompts, CAPS, SEEDS, nfe=4)
    shuffled = generate(model, *[[x[i] for i in order] for x in (TEXTS, prompts, CAPS, SEEDS)],
                        nfe=4)
    assert_same(shuffled, [batch[i] for i in order])


def test_a_group_equals_its_prompt_repeated(rate):
    model = model_that_stops(rate)
    prompts, seeds = prompts_of(), list(range(100, 112))
    grouped = generate(model, TEXTS, prompts, CAPS, seeds, group=3, nfe=4)
    repeated = [[x for x in xs for _ in range(3)] for xs in (TEXTS, prompts, CAPS)]
    assert_same(grouped, generate(model, *repeated, seeds, nfe=4))
    first = [u.latents[0] for u in grouped[:3]]
    assert (first[0] - first[1]).abs().max() > 1e-2                 # rollouts differ by their seed


def test_a_stream_put_together_is_what_generate_returns(rate):
    model, prompts, seeds = model_that_stops(rate), prompts_of(), list(range(100, 120))
    spoken = generate(model, TEXTS, prompts, CAPS, seeds, group=5, nfe=4, trace=True)
    patches, states, ends = ([[] for _ in seeds] for _ in range(3))
    with torch.enable_grad():                                       # as a caller would have it
        for row, *values in stream(model, TEXTS, prompts, CAPS, seeds, group=5, nfe=4):
            for r, patch, h, stop in zip(row.tolist(), *values):
                assert not (patch.requires_grad or h.requires_grad)
                patches[r].append(patch)
                states[r].append(h)
                ends[r].append(bool(stop))
    assert {u.stopped for u in spoken} == {True, False}
    for u, p, h, end in zip(spoken, patches, states, ends):
        assert torch.equal(u.latents, torch.stack(p)) and torch.equal(u.h, torch.stack(h))
        assert end == [False] * (len(p) - 1) + [u.stopped]          # nothing comes after the stop


def test_seeds_decide_and_the_global_generator_does_not():
    model = tiny_ditar()
    args = (model, TEXTS, prompts_of(), CAPS)
    torch.manual_seed(1)
    first = generate(*args, SEEDS, nfe=2)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = generate(*args, SEEDS, nfe=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(first, again))
    other = generate(*args, [s + 1 for s in SEEDS], nfe=2)
    assert all((a.latents - b.latents).abs().max() > 1e-2 for a, b in zip(first, other))


def test_states_recorded_while_sampling_equal_teacher_forcing(rate):
    model = model_that_stops(rate)
    prompts = prompts_of()
    for text, prompt, u in zip(TEXTS, prompts, generate(model, TEXTS, prompts, CAPS, SEEDS, nfe=4,
                                                        trace=True)):
        with torch.no_grad():
            h = model.hidden(torch.tensor([text]), torch.tensor([len(text)]),
                             torch.cat((prompt, u.latents))[None])[0]
        assert u.h.shape == (len(u.latents), 24)
        assert_close(u.h, h[len(prompt):])


def test_without_trace_no_states_are_kept():
    spoken = generate(tiny_ditar(), TEXTS, prompts_of(), CAPS, SEEDS, nfe=1)
    assert all(u.h is None for u in spoken)


def test_a_prompt_may_be_empty_beside_others():
    model = tiny_ditar()
    prompts = prompts_of([3, 0, 4, 0])
    batch = generate(model, TEXTS, prompts, CAPS, SEEDS, nfe=2, trace=True)
    for text, prompt, u in zip(TEXTS, prompts, batch):
        with torch.no_grad():
            h = model.hidden(torch.tensor([text]), torch.tensor([len(text)]),
                             torch.cat((prompt, u.latents))[None])[0]
        assert_close(u.h, h[len(prompt):])
    with torch.no_grad():           # history before the first patch: zeros, as in training
        first = next_patch(model, batch[1].h[:1], torch.zeros(1, P, D),
                           utterance_noise(SEEDS[1], 1, P, D), times(2), 1.5)
    assert_close(batch[1].latents[:1], first)


def test_all_prompts_may_be_empty():
    model = tiny_ditar()
    empty = [torch.zeros(0, P, D)] * 4
    beside = generate(model, TEXTS + [[1]], empty + prompts_of([2]), CAPS + [1], SEEDS + [0],
                      nfe=2)
    assert_same(generate(model, TEXTS, empty, CAPS, SEEDS, nfe=2), beside[:4])


def test_prompt_and_text_reach_the_speech():
    model = tiny_ditar()
    base = generate(model, TEXTS, prompts_of(), CAPS, SEEDS, nfe=4)
    prompts = prompts_of()
    prompts[0] = prompts[0].clone()
    prompts[0][0] += 1                                              # far from the first new patch
    texts = [[3, 1, 4, 1, 5, 9], [2, 7]] + TEXTS[2:]
    other = generate(model, texts, prompts, CAPS, SEEDS, nfe=4)
    moved = [(a.latents - b.latents).abs().max().item() > 1e-4 for a, b in zip(base, other)]
    assert moved == [True, True, False, False]


# ---- stopping ----------------------------------------------------------------------------------

def test_a_hit_cap_is_returned_as_not_stopped():
    spoken = generate(tiny_ditar(), TEXTS, prompts_of(), CAPS, SEEDS, nfe=1)
    assert [len(u.latents) for u in spoken] == CAPS
    assert not any(u.stopped for u in spoken)


def test_the_patch_on_which_the_stop_head_fires_is_still_spoken():
    model = tiny_ditar()
    set_stop(model, torch.zeros(24), 1.0)                           # fires at once
    spoken = generate(model, TEXTS, prompts_of(), CAPS, SEEDS, nfe=1)
    assert [len(u.latents) for u in spoken] == [1] * 4
    assert all(u.stopped for u in spoken)
    assert generate(model, TEXTS[:1], prompts_of()[:1], [1], [0], nfe=1)[0].stopped  # at the cap


def test_what_was_spoken_does_not_depend_on_the_cap():
    model = tiny_ditar()
    short = generate(model, TEXTS, prompts_of(), [3] * 4, SEEDS, nfe=4)
    long = generate(model, TEXTS, prompts_of(), [7] * 4, SEEDS, nfe=4)
    for a, b in zip(short, long):
        assert_close(a.latents, b.latents[:3])


# ---- cost --------------------------------------------------------------------------------------

@pytest.mark.parametrize("cfg_scale, factor", ((0.0, 1), (1.5, 2)))
def test_nfe_calls_per_patch_and_an_unconditional_half_only_with_guidance(
        monkeypatch, cfg_scale, factor):
    model = tiny_ditar()
    calls = count_velocity_calls(model, monkeypatch)
    generate(model, TEXTS, prompts_of(), [3] * 4, SEEDS, nfe=5, cfg_scale=cfg_scale)
    assert len(calls) == 3 * 5
    for call in calls:
        assert len(call["x_t"]) == len(call["h"]) == len(call["history"]) == 4 * factor
        assert (call["h"][:4].abs().amax(dim=1) > 0).all()          # conditional rows
        if factor == 2:
            assert (call["h"][4:] == 0).all()
            for name in ("x_t", "history"):                         # else the same inputs
                assert torch.equal(call[name][4:], call[name][:4])
    assert [c["t"].item() for c in calls[:5]] == times(5)[:-1].tolist()


def test_finished_rows_leave_by_sixteens(monkeypatch):
    model = tiny_ditar()
    calls = count_velocity_calls(model, monkeypatch)
    generate(model, TEXTS, prompts_of(), [1, 1, 2, 4], list(range(48)), group=12, nfe=1,
             cfg_scale=0)
    assert [len(c["x_t"]) for c in calls] == [48, 32, 16, 16]       # 24, 12, 12 are not finished


def test_the_prefix_is_read_once_per_prompt_and_then_one_token_at_a_time(monkeypatch):
    model, shapes = tiny_ditar(), []
    forward = model.lm.forward
    monkeypatch.setattr(model.lm, "forward", lambda x, *args, **kwargs: (
        shapes.append(tuple(x.shape[:2])), forward(x, *args, **kwargs))[1])
    generate(model, TEXTS, prompts_of(), [3] * 4, list(range(12)), group=3, nfe=1)
    assert shapes == [(4, 16 + 1 + 8), (12, 1), (12, 1)]            # text, start, patches, padded


def test_guidance_is_applied_to_the_velocity_of_each_step():
    model = tiny_ditar()
    h, history, noise = randn(2, 24), randn(2, P, D, seed=1), randn(2, P, D, seed=2)
    with torch.no_grad():
        x = noise
        for t, t_next in zip(times(3)[:-1], times(3)[1:]):
            v_c = model.velocity(x, t[None], h, history)
            v_0 = model.velocity(x, t[None], torch.zeros_like(h), history)
            x = x + (t_next - t) * (v_c + 0.7 * (v_c - v_0))
        assert_close(next_patch(model, h, history, noise, times(3), 0.7), x)
        unguided = next_patch(model, h, history, noise, times(3), 0.0)
    assert (unguided - x).abs().max() > 1e-2


def test_a_bfloat16_model_speaks_nearly_the_same_in_float32_latents(rate):
    model = tiny_ditar(chars_per_patch=rate)
    exact = generate(model, TEXTS, prompts_of(), CAPS, SEEDS, nfe=4, trace=True)
    spoken = generate(model.bfloat16(), TEXTS, prompts_of(), CAPS, SEEDS, nfe=4, trace=True)
    for a, b in zip(spoken, exact):
        assert a.latents.dtype == a.h.dtype == torch.float32
        assert a.latents.shape == b.latents.shape and torch.isfinite(a.latents).all()
        assert (a.latents[0] - b.latents[0]).abs().max() < 0.15     # later patches drift apart


def test_generation_carries_no_graph():
    spoken = generate(tiny_ditar(), TEXTS, prompts_of(), CAPS, SEEDS, nfe=1, trace=True)
    assert not any(u.latents.requires_grad or u.h.requires_grad for u in spoken)


# ---- decode_wavs -------------------------------------------------------------------------------

HOP = 5


class RepeatVAE:
    """Each sample of a frame is its first latent. Remembers what it was asked for."""
    def __init__(self):
        self.lengths, self.shapes = [], []
        self.latent_mean = torch.zeros(1)       # tells the device

    def decode(self, latents, lengths):
        self.lengths += lengths.tolist()
        self.shapes.append(tuple(latents.shape))
        assert (lengths <= latents.shape[1]).all()
        return latents[..., 0].repeat_interleave(HOP, dim=1)        # (B, T*HOP)


class SmearVAE(RepeatVAE):
    """Every sample sees the frames before it, as a decoder's receptive field does."""
    def decode(self, latents, lengths):
        return super().decode(latents.cumsum(dim=1), lengths)


def spoken_rows(lengths):
    return [Utterance(randn(n, P, D, seed=i), True) for i, n in enumerate(lengths)]


def test_wavs_are_the_generated_parts_only():
    utterances, vae = spoken_rows([3, 1, 5]), RepeatVAE()
    wavs = decode_wavs(vae, prompts_of([3, 1, 4]), utterances)
    assert [wav.shape for wav in wavs] == [(n * P * HOP,) for n in (3, 1, 5)]
    for wav, u in zip(wavs, utterances):
        assert torch.equal(wav, u.latents.flatten(0, 1)[:, 0].repeat_interleave(HOP))


def test_the_end_of_the_prompt_goes_through_the_decoder_in_front():
    prompts, utterances, vae = prompts_of([3, 1, 0]), spoken_rows([3, 1, 5]), SmearVAE()
    wavs = decode_wavs(vae, prompts, utterances, context_patches=2)
    assert vae.lengths == [(2 + 3) * P, (1 + 1) * P, (0 + 5) * P]
    for wav, prompt, u in zip(wavs, prompts, utterances):
        frames = torch.cat((prompt[-2:], u.latents)).flatten(0, 1)[:, 0].cumsum(0)
        assert_close(wav, frames.repeat_interleave(HOP)[-len(u.latents) * P * HOP:])


def test_decoding_a_batch_equals_its_singles():
    lengths = [1 + i % 4 for i in range(35)]                        # more than one decoder batch
    prompts, utterances = prompts_of([i % 3 for i in range(35)]), spoken_rows(lengths)
    vae = SmearVAE()
    wavs = decode_wavs(vae, prompts, utterances)
    assert len(wavs) == 35 and max(shape[0] for shape in vae.shapes) <= 32
    for i in range(35):
        assert_close(wavs[i], decode_wavs(SmearVAE(), prompts[i:i + 1], utterances[i:i + 1])[0])


def test_wavs_do_not_keep_the_whole_batch_alive():
    for wav in decode_wavs(RepeatVAE(), prompts_of([3, 1]), spoken_rows([3, 1])):
        assert wav.untyped_storage().size() == wav.numel() * wav.element_size()
