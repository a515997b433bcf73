"""What toy.py and toy_judges.py promise: the corpus, the small VAE and the four judges."""
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import toy
import toy_judges
from toy import CorpusConfig, ToyVAE, VAEConfig, corpus, encode_text, pad_batch, spectrum

SPLITS = ("pretrain", "rl", "tune", "eval")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, tol=1e-4):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


# ---- sentences and voices ----------------------------------------------------------------------

def test_sentences_have_three_to_seven_words_of_the_vocabulary_and_repeat():
    texts = [toy.sentence(random.Random(i)) for i in range(3_000)]
    assert {len(text.split()) for text in texts} == set(range(3, 8))
    assert {word for text in texts for word in text.split()} == set(toy.WORDS)
    assert texts == [toy.sentence(random.Random(i)) for i in range(3_000)]
    assert len(set(texts)) > 1_500
    for text in texts:
        assert text == " ".join(text.split()) and encode_text(text)


def test_a_tenth_of_the_sentences_is_held_out():
    texts = {toy.sentence(random.Random(i)) for i in range(5_000)}
    assert 0.08 < np.mean([toy.held_out(text) for text in texts]) < 0.12


def test_no_two_splits_share_a_voice_and_the_judges_hear_all():
    voices = {split: toy.speakers_of(split, CorpusConfig()) for split in (*SPLITS, "judge")}
    for i, a in enumerate(SPLITS):
        for b in SPLITS[i + 1:]:
            assert not set(toy.VARIANTS[a]) & set(toy.VARIANTS[b]), (a, b)
            assert not {v[0] for v in voices[a]} & {v[0] for v in voices[b]}, (a, b)
    assert sorted(voices["judge"]) == sorted(v for split in SPLITS for v in voices[split])
    ids = [v[0] for v in voices["judge"]]
    assert sorted(ids) == list(range(len(ids)))                     # they index the classes
    assert len({v[1:] for v in voices["eval"]}) > 0.9 * len(voices["eval"])     # and they differ


def test_every_voice_variant_exists():
    """eSpeak takes its plain voice without a word when a variant is missing."""
    import espeakng_loader
    folder = Path(espeakng_loader.get_data_path()) / "voices" / "!v"
    known = {path.name for path in folder.iterdir()}
    assert not {v.replace("_", " ") for names in toy.VARIANTS.values() for v in names} - {
        name.replace("_", " ") for name in known}


# ---- corpus ------------------------------------------------------------------------------------

class QuickPool:
    """Stands in for the process pool and eSpeak: one patch of noise for each utterance."""
    jobs = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def submit(self, f, job):
        QuickPool.jobs += 1
        self.wavs = [np.random.default_rng(len(text)).integers(-99, 99, 1_600, np.int16)
                     for text, _ in job[0]]
        return self

    def result(self):
        return self.wavs


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(toy, "ProcessPoolExecutor", QuickPool)
    return CorpusConfig(pretrain=700, judge=300, rl=400, tune=300, eval=300,
                        cache_dir=str(tmp_path))


def test_texts_of_training_and_of_tuning_or_evaluation_are_disjoint(quick):
    texts = {split: set(corpus(split, quick).texts) for split in SPLITS}
    assert not (texts["pretrain"] | texts["rl"]) & (texts["tune"] | texts["eval"])
    assert all(toy.held_out(text) for text in texts["tune"] | texts["eval"])
    assert len(texts["pretrain"] & texts["rl"]) > 0         # the same grammar, so they may meet


def test_neighbours_are_of_one_speaker_and_speakers_vary(quick):
    for split in (*SPLITS, "judge"):
        data = corpus(split, quick)
        known = {number for number, *_ in toy.speakers_of(split, quick)}
        assert (data.speakers[0::2] == data.speakers[1::2]).all()
        assert set(data.speakers.tolist()) <= known
        assert len(set(data.speakers.tolist())) > min(20, 0.5 * len(known))
        assert len(data.texts) == len(data.speakers) == len(data.wavs) == getattr(quick, split)


def test_a_larger_split_begins_with_the_smaller_one(quick, tmp_path):
    small, large = corpus("rl", quick), corpus("rl", CorpusConfig(rl=450, cache_dir=str(tmp_path)))
    assert large.texts[:400] == small.texts and len(large.texts) == 450
    assert (large.speakers[:400] == small.speakers).all()


def test_a_cached_corpus_is_not_spoken_again_and_another_config_is(quick, monkeypatch):
    first, jobs = corpus("pretrain", quick), QuickPool.jobs
    again = corpus("pretrain", quick)
    assert QuickPool.jobs == jobs
    assert again.texts == first.texts
    for a, b in zip(first.wavs, again.wavs, strict=True):
        assert np.array_equal(a, b)
    for change in ({"rate_wpm": 170}, {"word_gap": 3}, {"seed": 1}, {"speakers_per_variant": 2},
                   {"pretrain": 699}):
        before = QuickPool.jobs
        corpus("pretrain", CorpusConfig(**{"pretrain": 700, "cache_dir": quick.cache_dir,
                                           **change}))
        assert QuickPool.jobs > before, change
    assert not list(Path(quick.cache_dir).glob("*.tmp.npz"))        # each was renamed


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Six utterances that eSpeak really says."""
    config = CorpusConfig(eval=6, cache_dir=str(tmp_path_factory.mktemp("corpus")))
    return corpus("eval", config, processes=1)


def test_utterances_are_whole_patches_of_audible_speech(spoken):
    for i, text in enumerate(spoken.texts):
        wav = spoken.wav(i)
        assert spoken.wavs[i].dtype == np.int16 and wav.dtype == torch.float32
        assert len(wav) % toy.PATCH_SAMPLES == 0
        assert wav.abs().max() <= 1
        assert 0.03 < wav.pow(2).mean().sqrt() < 0.2                # one loudness
        assert wav[:600].abs().max() < 1e-3                         # 40 ms before
        assert 0.15 < len(wav) / 16_000 / len(text.split()) < 1.0   # seconds a word


def test_the_corpus_is_a_function_of_its_config(tmp_path, monkeypatch):
    monkeypatch.setitem(toy.VARIANTS, "eval", ["f2", "klatt3"])         # f2 draws breath noise
    config = CorpusConfig(eval=12, speakers_per_variant=1, cache_dir=str(tmp_path / "a"))
    first = corpus("eval", config)
    again = corpus("eval", replace(config, eval=8, cache_dir=str(tmp_path / "b")))
    assert again.texts == first.texts[:8] and len(set(first.speakers[:8].tolist())) == 2
    for a, b in zip(again.wavs, first.wavs[:8], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("broken", ("no module", "no library"))
def test_without_espeak_the_error_says_what_to_install(broken, monkeypatch, tmp_path):
    import espeakng_loader
    if broken == "no module":
        monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    else:
        monkeypatch.setattr(espeakng_loader, "get_library_path", lambda: str(tmp_path / "no.so"))
    with pytest.raises(ImportError, match="eSpeak NG.*install espeakng-loader"):
        toy.ESpeak()


def test_without_espeaks_data_the_error_says_what_to_reinstall(tmp_path):
    code = ("import espeakng_loader, toy; "
            f"espeakng_loader.get_data_path = lambda: {str(tmp_path / 'a' / 'b')!r}; toy.ESpeak()")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(toy.__file__).parent, text=True,
                          capture_output=True)        # a process that has no data loaded yet
    assert "RuntimeError: eSpeak NG did not find its data; reinstall espeakng-loader" in done.stderr


def test_text_ids_are_places_in_the_alphabet():
    assert encode_text("a z b") == [1, 0, 26, 0, 2]
    assert len(toy.ALPHABET) == 27


@pytest.mark.parametrize("text, message", (
    ("the Café", r"characters \['C', 'é'\] in 'the Café' are outside the toy alphabet"),
    ("a\n", r"characters \['\\n'\]"), ("7 dogs", r"\['7'\]"),
    ("", "the text is empty"), ("   ", "the text is empty")))
def test_text_outside_the_alphabet_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        encode_text(text)


# ---- VAE ---------------------------------------------------------------------------------------

@pytest.fixture
def vae():
    """A random VAE with latent statistics that show when they are forgotten."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = ToyVAE(VAEConfig(latent_dim=5, dim=48, dim_up=32, layers=2)).eval()
    vae.latent_mean.copy_(randn(5, seed=1))
    vae.latent_std.copy_(0.5 + torch.rand(5, generator=torch.Generator().manual_seed(2)))
    return vae.requires_grad_(False)


def test_a_padded_batch_is_encoded_like_its_singles(vae):
    wavs = [0.1 * randn(n, seed=n) for n in (4_800, 1_600, 12_000)]
    padded, lengths = pad_batch(wavs)
    mean, log_var = vae.encode(padded, lengths)
    for i, wav in enumerate(wavs):
        alone = vae.encode(wav[None])
        n = len(wav) // 400
        assert alone[0].shape == alone[1].shape == (1, n, 5)
        assert_close(mean[i, :n], alone[0][0])
        assert_close(log_var[i, :n], alone[1][0])
    assert mean[0].std() > 1e-2


def test_a_padded_batch_is_decoded_like_its_singles(vae):
    latents, lengths = randn(3, 12, 5), torch.tensor([12, 4, 7])    # noise behind the lengths
    wavs = vae.decode(latents, lengths)
    assert wavs.shape == (3, 12 * 400)
    for i, n in enumerate(lengths.tolist()):
        assert_close(wavs[i, :n * 400], vae.decode(latents[i:i + 1, :n])[0])
    assert wavs[1, :1_600].std() > 1e-3


def test_a_frame_is_400_samples_and_other_lengths_are_refused(vae):
    mean, _ = vae.encode(torch.zeros(2, 2_000))
    assert mean.shape == (2, 5, 5)
    assert vae.decode(mean).shape == (2, 2_000)
    with pytest.raises(ValueError, match="1900 samples is no multiple of the hop of 400"):
        vae.encode(torch.zeros(1, 1_900))


def test_the_statistics_normalise_what_leaves_and_undo_it_on_entry(vae):
    wavs = 0.1 * randn(2, 4_000)
    raw_mean, raw_log_var, _ = vae.posterior(wavs)
    mean, log_var = vae.encode(wavs)
    assert_close(mean * vae.latent_std + vae.latent_mean, raw_mean)
    assert_close(torch.exp(0.5 * log_var) * vae.latent_std, torch.exp(0.5 * raw_log_var))
    assert_close(vae.decode(mean), vae.synthesize(raw_mean))
    assert (vae.decode(mean) - vae.decode(raw_mean)).abs().max() > 1e-3


def test_spectrum_is_the_windowed_fourier_transform_of_centred_frames():
    wav = randn(2, 1_600)
    ours = spectrum(wav, 800, 200)
    assert ours.shape == (2, 8, 401)
    theirs = torch.stft(F.pad(wav, (300, 300)), 800, 200, window=torch.hann_window(800),
                        center=False, return_complex=True).transpose(1, 2)
    assert_close(ours, theirs)


def test_synthesis_of_a_true_spectrum_is_the_waveform(vae):
    """With the decoder's head replaced by magnitude and phase of a wav, its inverse STFT gives
    that wav back, but for the ends, which fewer than four windows cover."""
    wav = 0.1 * randn(1, 4_000)
    spec = spectrum(wav, vae.N_FFT, vae.SUB_HOP)

    class Head(nn.Module):
        def forward(self, x):
            return torch.cat((spec.abs().log(), spec.angle()), dim=-1)
    vae.decode_out = Head()
    out = vae.decode(torch.zeros(1, 10, 5))
    assert out.shape == wav.shape
    assert_close(out[:, 300:-300], wav[:, 300:-300], 1e-5)
    assert (out - wav)[:, :100].abs().max() > 1e-3


def test_the_vaes_loss_sees_the_noise_reaches_every_weight_and_has_the_gaussian_kl():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = ToyVAE(VAEConfig(latent_dim=3, dim=16, dim_up=16, layers=1))
    wavs, noise = 0.1 * randn(2, 16_000), randn(2, 40, 3)
    loss, logs = toy.vae_loss(vae, wavs, noise)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in vae.parameters())
    mean, log_var, _ = vae.posterior(wavs)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, torch.exp(0.5 * log_var)),
        torch.distributions.Normal(0.0, 1.0)).mean()
    assert logs["kl"] == pytest.approx(expected.item(), rel=1e-4)
    assert loss.item() == pytest.approx(logs["reconstruction"] + 0.08 * logs["kl"], rel=1e-5)
    assert toy.vae_loss(vae, wavs, -noise)[1]["reconstruction"] != logs["reconstruction"]


# ---- judges ------------------------------------------------------------------------------------

def judge(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = toy_judges.JUDGES[name]().requires_grad_(False).eval()
    if name.startswith("asr"):                      # a random one would write one letter only
        module.out.weight.mul_(30)
        if name == "asr_held":
            for p in (module.proj.weight, *module.blocks.parameters()):
                p.mul_(4)
    return module


def clips(*lengths):
    """Another random tone every 100 ms, and noise: judges hear something different each time."""
    out = []
    for n in lengths:
        rate = torch.rand(n // 1_600 + 1, generator=torch.Generator().manual_seed(n))
        tones = torch.sin(rate.repeat_interleave(1_600)[:n].cumsum(0))
        out.append(0.2 * tones + 0.01 * randn(n, seed=n))
    return out


@pytest.mark.parametrize("name", ("asr", "asr_held"))
def test_a_transcript_does_not_depend_on_the_batch(name):
    asr, wavs = judge(name), clips(16_000, 4_000, 9_999, 1_601)     # also with a rest
    texts = asr.transcribe(wavs)
    assert texts == [asr.transcribe([wav])[0] for wav in wavs]
    assert len(set(texts)) > 2 and max(map(len, texts)) > 5
    padded, lengths = pad_batch(wavs, asr.hop)
    scores, n = asr(padded, lengths)
    for i, wav in enumerate(wavs):
        alone, n_alone = asr(*pad_batch([wav], asr.hop))
        assert n[i] == n_alone[0] == len(wav) // asr.hop
        assert_close(scores[i, :n[i]], alone[0, :n[i]], 1e-3)
        assert_close(scores[i, :n[i]].exp().sum(-1), torch.ones(n[i]))


@pytest.mark.parametrize("name", ("speaker", "speaker_held"))
def test_an_embedding_has_unit_norm_and_does_not_depend_on_the_batch(name):
    encoder, wavs = judge(name), clips(16_000, 4_000, 9_999, 1_601)
    embeddings = encoder.embed(wavs)
    assert embeddings.shape == (4, 96)
    assert_close(embeddings.norm(dim=1), torch.ones(4))
    for i, wav in enumerate(wavs):
        assert_close(embeddings[i], encoder.embed([wav])[0])
    assert (embeddings[0] - embeddings[1]).norm() > 1e-2


@pytest.mark.parametrize("name", toy_judges.JUDGES)
def test_more_clips_than_one_pass_takes_keep_their_order(name):
    module, wavs = judge(name), clips(*range(2_000, 2_000 + 66 * 40, 40))
    run = module.transcribe if name.startswith("asr") else module.embed
    many, few = run(wavs), run(wavs[62:])
    assert len(many) == 66
    if name.startswith("asr"):
        assert many[62:] == few
    else:
        assert_close(many[62:], few)


def test_the_judges_of_one_kind_share_neither_architecture_nor_features():
    for a, b in (("asr", "asr_held"), ("speaker", "speaker_held")):
        a, b = judge(a), judge(b)
        assert a.mel != b.mel
        assert {k: v.shape for k, v in a.state_dict().items()} != {
            k: v.shape for k, v in b.state_dict().items()}


def test_ctc_drops_repeats_then_blanks_and_frames_behind_the_clip():
    asr = judge("asr")
    blank, space = 0, 1
    a, b, c = (toy.ALPHABET.index(x) + 1 for x in "abc")
    rows = [[space, a, a, blank, a, b, b, space, blank, space, c, blank],
            [b, blank, blank, a, c, c, c, c, c, c, c, c]]
    scores = F.one_hot(torch.tensor(rows), 28).float()
    asr.forward = lambda wavs, lengths: (scores, torch.tensor([12, 4]))
    assert asr.transcribe([torch.zeros(3_840), torch.zeros(1_280)]) == ["aab c", "ba"]


def test_augmentation_repeats_with_its_generator_and_keeps_noise_between_10_and_50_db():
    wavs, lengths = torch.stack(clips(16_000) * 64), torch.full((64,), 16_000)

    def augmented(seed, speed):
        return toy_judges.augment(wavs, lengths, torch.Generator().manual_seed(seed), speed)
    out, out_lengths = augmented(0, speed=False)
    assert torch.equal(out, augmented(0, speed=False)[0])
    assert torch.equal(out_lengths, lengths)
    gain = (out * wavs).sum(1) / wavs.pow(2).sum(1)
    snr = 20 * torch.log10(wavs.norm(dim=1) / (out / gain[:, None] - wavs).norm(dim=1))
    assert snr.min() > 9 and snr.max() < 52 and snr.max() - snr.min() > 25
    assert gain.min() > 0.45 and gain.max() < 2.1
    rates = [augmented(seed, speed=True) for seed in range(20)]
    seconds = torch.tensor([int(n[0]) for _, n in rates]) / 16_000
    assert seconds.min() >= 0.9 and seconds.max() <= 1.1 and seconds.max() - seconds.min() > 0.1
    assert all(int(n.max()) <= w.shape[1] for w, n in rates)


@pytest.mark.parametrize("name", ("asr", "asr_held"))
def test_the_recognisers_loss_falls_with_the_right_text_more_likely(name):
    asr, (wav,) = judge(name), clips(32_000)
    padded, lengths = pad_batch([wav], asr.hop)
    text = asr.transcribe([wav])[0]
    assert len(text) > 5
    right, wrong = (toy_judges.asr_loss(asr, padded, lengths, [t]) for t in (text, text[::-1]))
    assert right < wrong


def test_the_speaker_loss_has_a_margin():
    classes = torch.eye(3, 96)
    speakers = torch.tensor([2, 0])
    loss = toy_judges.speaker_loss(lambda wavs, lengths: classes[speakers], classes, None, None,
                                   speakers)
    # cosine 1 less the margin 0.2 for the speaker itself, 0 for the two others, scale 20
    assert loss.item() == pytest.approx(np.log(1 + 2 * np.exp(-16.0)), abs=1e-6)
