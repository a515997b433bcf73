"""The guards of a long RL run: drift panel, noise floor, probes and the best weights."""
import math

import pytest
import torch

import rewards
from guards import PANEL, Drift, GuardConfig, noise_floor, panel


def hum(seconds, loud=0.1):
    return loud * torch.sin(torch.arange(int(16_000 * seconds)) * 2 * math.pi * 200 / 16_000)


def test_the_panel_of_known_waveforms():
    wavs = [hum(1.0), torch.cat((hum(1.0), torch.zeros(16_000)))]
    out = panel(wavs, ["a" * 10, "b" * 40])
    assert out["seconds"] == pytest.approx(1.5)
    assert out["rate"] == pytest.approx((10 + 20) / 2)
    assert out["silence"] == pytest.approx((0 + 0.5) / 2, abs=0.02)
    rms = 20 * math.log10(0.1 / math.sqrt(2))
    assert out["loudness"] == pytest.approx((rms + rms - 10 * math.log10(2)) / 2, abs=0.05)


def test_silent_and_very_short_rollouts_do_not_break_the_panel():
    out = panel([torch.zeros(1_600), hum(0.1)], ["a", "b"])
    assert all(math.isfinite(v) for v in out.values())


START = {"seconds": 2.0, "rate": 12.0, "silence": 0.1, "loudness": -20.0, "caps": 0.0, "bad": 0.0,
         "anchor": 0.0}


@pytest.mark.parametrize("name, within, beyond", (
    ("seconds", 2.4, 2.6), ("seconds", 1.6, 1.4), ("rate", 14.9, 15.1), ("silence", 0.24, 0.26),
    ("loudness", -25.9, -26.1), ("caps", 0.09, 0.11), ("bad", 0.09, 0.11), ("anchor", 0.19, 0.21)))
def test_each_number_warns_once_when_it_passes_its_bound(name, within, beyond):
    drift = Drift(GuardConfig(warm_steps=2))
    assert drift.check(dict(START)) == drift.check(dict(START)) == []
    assert drift.check(START | {name: within}) == []
    warnings = drift.check(START | {name: beyond})
    assert len(warnings) == 1 and warnings[0].startswith(f"{name} was ")
    assert "raise grow.beta_w2" in warnings[0]
    assert drift.check(START | {name: beyond}) == []


def test_every_number_of_the_panel_has_a_bound_and_0_turns_it_off():
    assert set(PANEL) == set(START) <= set(vars(GuardConfig()))
    drift = Drift(GuardConfig(warm_steps=1, caps=0.0))
    drift.check(dict(START))
    assert drift.check(START | {"caps": 1.0}) == []


def test_after_a_restart_the_start_is_still_the_start():
    drift = Drift(GuardConfig(warm_steps=2), [START, START, START | {"caps": 1.0}])
    assert len(drift.check(START | {"caps": 0.5})) == 1
    assert Drift(GuardConfig()).check({"caps": 1.0}) == []      # a step that lost all its groups


def test_the_noise_floor_of_known_judges():
    def steady(wavs, texts, prompts):
        return torch.stack([(wav.square().mean() > 1e-4).float() for wav in wavs])

    def shaky(wavs, texts, prompts, calls=[]):
        calls.append(1)
        g = torch.Generator().manual_seed(len(calls))
        return 0.3 * torch.randn(len(wavs), generator=g)
    wavs = [hum(0.2)] * 4_000
    floor = noise_floor({"steady": steady, "shaky": shaky}, rewards.score, wavs, ["a"] * 4_000,
                        wavs, torch.Generator().manual_seed(0))
    assert floor["steady"] == 0 and floor["shaky"] == pytest.approx(0.3, rel=0.05)


def test_the_perturbation_is_60_db_below_the_waveform():
    seen = []

    def spy(wavs, texts, prompts):
        seen.append(wavs)
        return torch.zeros(len(wavs))
    wav = hum(1.0)
    noise_floor({"spy": spy}, rewards.score, [wav], ["a"], [wav], torch.Generator().manual_seed(0))
    difference = (seen[1][0] - wav).square().mean().sqrt() / wav.square().mean().sqrt()
    assert 20 * torch.log10(difference).item() == pytest.approx(-60, abs=0.3)


@pytest.mark.parametrize("field, value", (
    ("warm_steps", 0), ("anchor", -0.1), ("caps", float("nan")), ("probe_n", 1),
    ("probe_every", -1), ("probe_nfe", 0)))
def test_a_wrong_guard_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        GuardConfig(**{field: value})
