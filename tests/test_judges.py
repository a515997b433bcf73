"""What judges.py promises: Whisper, Paraformer, the speaker verifier and UTMOS, on small random
weights in the layout of the released files, and on a real Whisper where there is one."""
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from transformers import (GenerationConfig, Wav2Vec2Config, WavLMConfig, WhisperConfig,
                          WhisperFeatureExtractor, WhisperForConditionalGeneration,
                          WhisperProcessor, WhisperTokenizer)

import judges
import rewards
from judges import MIN_SAMPLES, UTMOS, Paraformer, RoutedASR, SpeakerVerifier, Whisper
from rewards import RewardConfig, WERReward, score, wer

MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
WHISPER, SPEECH = MODELS / "whisper-tiny.en", MODELS / "speech"
needs_whisper = pytest.mark.skipif(not (WHISPER.is_dir() and SPEECH.is_dir()),
                                   reason=f"needs {WHISPER} and {SPEECH}")

# Layouts of the released files: every name and shape, by hand, independent of transformers.
LARGE = {"hidden": 1024, "layers": 24, "heads": 16, "ffn": 4096, "conv": 512, "kernel": 128}
LARGE_HEAD = {"channels": 512, "scale": 8, "pooled": 1536, "bottleneck": 128, "embed_dim": 256}
TINY = {"hidden": 32, "layers": 3, "heads": 4, "ffn": 48, "conv": 16, "kernel": 16}
TINY_HEAD = {"channels": 16, "scale": 4, "pooled": 24, "bottleneck": 8, "embed_dim": 12}
CONV_KERNELS, CONV_STRIDES, GROUPS = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2), 16


def noise(samples, seed=0, gain=0.1):
    return gain * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def both(name, *weight, bias=None):
    return {f"{name}.weight": weight, f"{name}.bias": (bias or weight[0],)}


def ssl_shapes(hidden, layers, heads, ffn, conv, kernel, wavlm):
    """Names and shapes of WavLM (layer norms everywhere) or of wav2vec 2.0 (one group norm)."""
    shapes = {"mask_emb": (hidden,), **both("layer_norm", conv),
              **both("post_extract_proj", hidden, conv), **both("encoder.layer_norm", hidden),
              "encoder.pos_conv.0.bias": (hidden,), "encoder.pos_conv.0.weight_g": (1, 1, kernel),
              "encoder.pos_conv.0.weight_v": (hidden, hidden // GROUPS, kernel)}
    for i, width in enumerate(CONV_KERNELS):
        name = f"feature_extractor.conv_layers.{i}"
        shapes[f"{name}.0.weight"] = (conv, conv if i else 1, width)
        if wavlm:
            shapes |= both(f"{name}.2.1", conv)
        elif i == 0:
            shapes |= both(f"{name}.2", conv)
    for j in range(layers):
        name = f"encoder.layers.{j}"
        for part in "qkv":
            shapes |= both(f"{name}.self_attn.{part}_proj", hidden, hidden)
        shapes |= both(f"{name}.self_attn.out_proj", hidden, hidden)
        shapes |= both(f"{name}.self_attn_layer_norm", hidden)
        shapes |= both(f"{name}.final_layer_norm", hidden)
        shapes |= both(f"{name}.fc1", ffn, hidden) | both(f"{name}.fc2", hidden, ffn)
        if wavlm:
            shapes |= both(f"{name}.self_attn.grep_linear", 8, hidden // heads)
            shapes[f"{name}.self_attn.grep_a"] = (1, heads, 1, 1)
    if wavlm:
        shapes["encoder.layers.0.self_attn.relative_attention_bias.weight"] = (320, heads)
    return shapes


def head_shapes(hidden, layers, channels, scale, pooled, bottleneck, embed_dim):
    def norm(name, width):
        return both(name, width) | {f"{name}.running_mean": (width,), f"{name}.running_var":
                                    (width,), f"{name}.num_batches_tracked": ()}
    width = channels // scale
    shapes = {"feature_weight": (layers + 1,), **both("layer1.conv", channels, hidden, 5),
              **norm("layer1.bn", channels), **both("conv", pooled, 3 * channels, 1),
              **both("pooling.linear1", bottleneck, pooled, 1),
              **both("pooling.linear2", pooled, bottleneck, 1), **norm("bn", 2 * pooled),
              **both("linear", embed_dim, 2 * pooled)}
    for n in (2, 3, 4):
        for k in (1, 2):
            shapes |= both(f"layer{n}.Conv1dReluBn{k}.conv", channels, channels, 1)
            shapes |= norm(f"layer{n}.Conv1dReluBn{k}.bn", channels)
        for i in range(scale - 1):
            shapes |= both(f"layer{n}.Res2Conv1dReluBn.convs.{i}", width, width, 3)
            shapes |= norm(f"layer{n}.Res2Conv1dReluBn.bns.{i}", width)
        shapes |= both(f"layer{n}.SE_Connect.linear1", bottleneck, channels)
        shapes |= both(f"layer{n}.SE_Connect.linear2", channels, bottleneck)
    return shapes


def random_tensor(name, shape, g):
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    # Nothing stays at a default, where two names could be swapped unseen.
    if name.endswith(("running_var", "weight_g")) or name.endswith("weight") and len(shape) == 1:
        return 0.5 + torch.rand(shape, generator=g)
    fan_in = np.prod(shape[1:]) if len(shape) > 1 else 10
    return torch.randn(shape, generator=g) / fan_in ** 0.5


def random_state(shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, g) for name, shape in shapes.items()}


def speaker_state():
    """The 'model' entry of a small wavlm_large_finetune.pth."""
    shapes = {f"feature_extract.model.{name}": shape
              for name, shape in ssl_shapes(**TINY, wavlm=True).items()}
    shapes |= head_shapes(TINY["hidden"], TINY["layers"], **TINY_HEAD)
    return random_state(shapes | {"loss_calculator.projection.weight": (5, 12)})


def tiny_config(kind, **changes):
    return kind(hidden_size=TINY["hidden"], num_hidden_layers=TINY["layers"],
                num_attention_heads=TINY["heads"], intermediate_size=TINY["ffn"],
                conv_dim=[TINY["conv"]] * 7, num_conv_pos_embeddings=TINY["kernel"], **changes)


def tiny_wavlm():
    return tiny_config(WavLMConfig, feat_extract_norm="layer", do_stable_layer_norm=True,
                       conv_bias=False)


def load_speaker(path, state, **sizes):
    torch.save({"model": state, "best_valid_eer": 100.0}, path)
    return SpeakerVerifier.load(path, **({"wavlm": tiny_wavlm(), **TINY_HEAD} | sizes))


@pytest.fixture
def speaker(tmp_path):
    return load_speaker(tmp_path / "s.pth", speaker_state())


def utmos_state():
    shapes = {f"wav2vec2.{name}": shape for name, shape in ssl_shapes(**TINY, wavlm=False).items()}
    shapes |= {"domain_emb": (1, 6), "judge_emb": (1, 6), **both("projection.0", 9, 20),
               **both("projection.2", 1, 9)}
    for end in ("", "_reverse"):
        shapes |= {f"blstm.weight_ih_l0{end}": (40, 44), f"blstm.weight_hh_l0{end}": (40, 10),
                   f"blstm.bias_ih_l0{end}": (40,), f"blstm.bias_hh_l0{end}": (40,)}
    return random_state(shapes)


def load_utmos(path, state):
    torch.save(state, path)
    return UTMOS.load(path, wav2vec2=tiny_config(Wav2Vec2Config), embed=6, lstm=10, hidden=9)


@pytest.fixture
def no_zhconv(monkeypatch):
    monkeypatch.setitem(sys.modules, "zhconv", None)


@pytest.fixture
def fake_zhconv(monkeypatch):
    monkeypatch.setitem(sys.modules, "zhconv",
                        types.SimpleNamespace(convert=lambda text, locale: text))


# ---- speaker verifier --------------------------------------------------------------------------

def test_the_released_speaker_file_has_711_tensors_and_all_but_one_are_used():
    backbone = ssl_shapes(**LARGE, wavlm=True)
    head = head_shapes(1024, 24, **LARGE_HEAD)
    assert (len(backbone), len(head)) == (488, 222)
    with torch.device("meta"):      # shapes without the 1.3 GB
        model = SpeakerVerifier()
    names = {"wavlm." + judges.rename(name, judges.FAIRSEQ_TO_TRANSFORMERS): shape
             for name, shape in backbone.items()}
    names |= {judges.rename(name, judges.SPEAKER_HEAD): shape for name, shape in head.items()}
    assert names == {name: tuple(value.shape) for name, value in model.state_dict().items()}
    count = sum(p.numel() for p in model.wavlm.parameters()) / 1e6
    assert count == pytest.approx(315.45, abs=0.01)
    assert sum(p.numel() for p in model.parameters()) / 1e6 - count == pytest.approx(8.41, abs=.01)


def reference_head(state, states, scale):
    """The head by its formulas, from the file's own names. states: (L+1, N, C)."""
    def norm(x, name):
        return F.batch_norm(x, *(state[f"{name}.{part}"] for part in
                                 ("running_mean", "running_var", "weight", "bias")))

    def conv(x, name, **args):
        return F.conv1d(x, state[f"{name}.weight"], state[f"{name}.bias"], **args)

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])
    weight = state["feature_weight"].exp() / state["feature_weight"].exp().sum()
    x = torch.einsum("l,lnc->cn", weight, states)[None] + 1e-6
    x = (x - x.mean(2, keepdim=True)) / (x.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    x = norm(F.relu(conv(x, "layer1.conv", padding=2)), "layer1.bn")
    outs = []
    for n in (2, 3, 4):
        name = f"layer{n}"
        y = norm(F.relu(conv(x, f"{name}.Conv1dReluBn1.conv")), f"{name}.Conv1dReluBn1.bn")
        parts = list(y.split(y.shape[1] // scale, dim=1))
        for i in range(scale - 1):
            part = parts[i] + parts[i - 1] if i else parts[i]
            part = conv(part, f"{name}.Res2Conv1dReluBn.convs.{i}", padding=n, dilation=n)
            parts[i] = norm(F.relu(part), f"{name}.Res2Conv1dReluBn.bns.{i}")
        y = conv(torch.cat(parts, 1), f"{name}.Conv1dReluBn2.conv")
        y = norm(F.relu(y), f"{name}.Conv1dReluBn2.bn")
        gate = linear(F.relu(linear(y.mean(2), f"{name}.SE_Connect.linear1")),
                      f"{name}.SE_Connect.linear2").sigmoid()
        x = x + y * gate[..., None]
        outs.append(x)
    x = F.relu(conv(torch.cat(outs, 1), "conv"))
    alpha = conv(conv(x, "pooling.linear1").tanh(), "pooling.linear2").softmax(2)
    mean = (alpha * x).sum(2)
    std = ((alpha * (x - mean[..., None]) ** 2).sum(2)).clamp(min=1e-9).sqrt()
    return linear(norm(torch.cat((mean, std), 1), "bn"), "linear")[0]


def test_the_head_follows_its_formulas(speaker):
    wav = noise(9_000)
    expected = reference_head(speaker_state(), speaker.hidden_states(wav), TINY_HEAD["scale"])
    torch.testing.assert_close(speaker(wav), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(speaker.embed([wav])[0], expected / expected.norm(), atol=1e-5,
                               rtol=1e-4)


@pytest.mark.parametrize("samples", [MIN_SAMPLES, 12_345, 40_000])  # 40,000: far positions too
def test_the_backbone_equals_s3prls_wavlm_at_every_hidden_state(tmp_path, samples):
    pytest.importorskip("s3prl", reason="s3prl not installed: pip install --no-deps s3prl==0.4.18")
    from s3prl.upstream.wavlm.WavLM import WavLM
    from s3prl.upstream.wavlm.WavLM import WavLMConfig as S3prlConfig
    theirs = WavLM(S3prlConfig({
        "extractor_mode": "layer_norm", "layer_norm_first": True, "normalize": True,
        "relative_position_embedding": True, "gru_rel_pos": True, "num_buckets": 320,
        "max_distance": 800, "encoder_layers": TINY["layers"], "encoder_embed_dim": TINY["hidden"],
        "encoder_ffn_embed_dim": TINY["ffn"], "encoder_attention_heads": TINY["heads"],
        "conv_pos": TINY["kernel"], "conv_pos_groups": GROUPS, "feature_grad_mult": 0.0,
        "conv_feature_layers": str([(TINY["conv"], k, s)
                                    for k, s in zip(CONV_KERNELS, CONV_STRIDES)])})).eval()
    state = speaker_state()
    prefix = "feature_extract.model."
    theirs.load_state_dict({name[len(prefix):]: value for name, value in state.items()
                            if name.startswith(prefix)})
    inputs = []
    for layer in theirs.encoder.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(
            args[0] if args else kwargs["x"]), with_kwargs=True)
    wav = noise(samples)
    with torch.no_grad():
        last = theirs.extract_features(F.layer_norm(wav, wav.shape)[None])[0]
    expected = torch.stack([x[:, 0] for x in inputs] + [last[0]])   # (L+1, N, C)
    ours = load_speaker(tmp_path / "s.pth", state).hidden_states(wav)
    assert ours.shape == expected.shape and expected.std() > 0.1
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_the_last_hidden_state_is_the_one_after_the_final_norm(speaker):
    states = speaker.hidden_states(noise(8_000))
    norm = speaker.wavlm.encoder.layer_norm
    normed = (states[-1] - norm.bias) / norm.weight
    torch.testing.assert_close(normed.mean(-1), torch.zeros(len(normed[:, 0])), atol=1e-3, rtol=0)
    torch.testing.assert_close(normed.std(-1, correction=0), torch.ones(len(normed)), atol=1e-2,
                               rtol=0)


def test_embeddings_have_unit_norm_and_depend_on_neither_batch_nor_gradients(speaker):
    wavs = [noise(MIN_SAMPLES, 1), noise(9_000, 2), noise(5_000, 3).double()]
    before = torch.get_rng_state()
    out = speaker.embed(wavs)
    assert out.shape == (3, 12) and out.dtype == torch.float32 and not out.requires_grad
    assert not speaker.training and not speaker.wavlm.training
    assert not any(p.requires_grad for p in speaker.parameters())
    torch.testing.assert_close(out.norm(dim=1), torch.ones(3))
    for i, wav in enumerate(wavs):
        assert torch.equal(speaker.embed([wav])[0], out[i])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("rms, std", [(0.05, 0.998), (0.025, 0.992), (1e-3, 0.30), (1e-4, 0.032)])
def test_the_waveform_is_normalised_with_layer_norms_eps_and_not_the_extractors(
        speaker, monkeypatch, rms, std):
    heard = []
    monkeypatch.setattr(speaker.wavlm, "forward", lambda wav, **_: heard.append(wav) or
                        types.SimpleNamespace(hidden_states=(wav, wav), last_hidden_state=wav))
    wav = noise(16_000)
    speaker.hidden_states(wav / wav.square().mean().sqrt() * rms)
    assert heard[0].shape == (1, 16_000)
    assert heard[0].std().item() == pytest.approx(std, rel=0.02)


def change(state, how):
    name = "feature_extract.model.encoder.layers.1.fc1.bias"
    if how == "missing":
        del state[name]
    elif how == "unknown":
        state["layer5.conv.weight"] = torch.zeros(1)
    elif how == "misshapen":
        state[name] = torch.zeros(3)
    elif how == "wrong prefix":
        state = {name.replace("feature_extract.model", "wavlm"): v for name, v in state.items()}
    return state


@pytest.mark.parametrize("how, message", [
    ("missing", "Missing key.*layers.1.feed_forward.intermediate_dense.bias"),
    ("unknown", "Unexpected key.*layer5"), ("misshapen", "size mismatch for .*intermediate_dense"),
    ("wrong prefix", "Missing key"),
])
def test_a_speaker_file_with_one_wrong_weight_is_refused(tmp_path, how, message):
    with pytest.raises(ValueError, match=f"s.pth is another model, wanted wavlm_large.*{message}"):
        load_speaker(tmp_path / "s.pth", change(speaker_state(), how))


@pytest.mark.parametrize("judge, sizes", [
    (SpeakerVerifier, {"wavlm": tiny_wavlm()}),
    (UTMOS, {"wav2vec2": tiny_config(Wav2Vec2Config)})], ids=["speaker", "utmos"])
@pytest.mark.parametrize("kind", ["absent", "half", "empty", "list", "other", "pickle", "text"])
def test_a_file_that_is_no_such_checkpoint_is_refused(tmp_path, kind, judge, sizes):
    path, state = tmp_path / "x.pth", {"model": random_state({"a": (1000,)})}
    if kind == "half":
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("<html>quota exceeded</html>")
    elif kind == "list":
        torch.save([1, 2], path)
    elif kind == "pickle":
        torch.save({"model": Path("x")}, path)      # safe loading runs nobody's code
    elif kind == "other":
        torch.save({"state": torch.zeros(1)}, path)
    messages = {"absent": "is no file", "list": "holds a list", "other": "is another model"}
    error = FileNotFoundError if kind == "absent" else ValueError
    with pytest.raises(error, match=messages.get(kind, "cannot be read, perhaps half")) as caught:
        judge.load(path, **sizes)
    assert str(path) in str(caught.value)


def test_clips_that_no_judge_can_hear_are_refused(speaker, tmp_path):
    nan, inf = noise(800), noise(800)
    nan[3], inf[5] = float("nan"), float("inf")
    utmos = load_utmos(tmp_path / "u.pt", utmos_state())
    paraformer = Paraformer.__new__(Paraformer)     # the check comes before its model
    for clip, message in ((torch.zeros(2, 800), r"waveform 1 has shape \(2, 800\); wanted mono"),
                          (torch.zeros(0), "waveform 1 has 0 samples; a judge needs 720"),
                          (noise(MIN_SAMPLES - 1), "has 719 samples"), (nan, "holds NaN"),
                          (inf, "holds NaN or infinite")):
        for judge in (speaker.embed, utmos.score, paraformer.transcribe):
            with pytest.raises(ValueError, match=message):
                judge([noise(800), clip])


# ---- UTMOS -------------------------------------------------------------------------------------

def test_the_released_utmos_layout_is_loaded_whole():
    base = {"hidden": 768, "layers": 12, "heads": 12, "ffn": 3072, "conv": 512, "kernel": 128}
    backbone = ssl_shapes(**base, wavlm=False)
    with torch.device("meta"):
        model = UTMOS()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    names = {"wav2vec2." + judges.rename(name, judges.FAIRSEQ_TO_TRANSFORMERS): shape
             for name, shape in backbone.items()}
    names |= {"domain_emb": (1, 128), "judge_emb": (1, 128), **both("projection.0", 2048, 1024),
              **both("projection.2", 1, 2048)}
    for end in ("", "_reverse"):
        names |= {f"blstm.weight_ih_l0{end}": (2048, 1024), f"blstm.bias_ih_l0{end}": (2048,),
                  f"blstm.weight_hh_l0{end}": (2048, 512), f"blstm.bias_hh_l0{end}": (2048,)}
    assert names == shapes


@pytest.mark.parametrize("samples", [8_000, 8_320])     # odd and even frame counts
def test_utmoss_backbone_equals_fairseqs_wav2vec2(tmp_path, samples):
    pytest.importorskip("s3prl", reason="s3prl not installed: pip install --no-deps s3prl==0.4.18")
    from s3prl.upstream.wav2vec2.wav2vec2_model import Wav2Vec2Config as FairseqConfig
    from s3prl.upstream.wav2vec2.wav2vec2_model import Wav2Vec2Model as FairseqModel
    theirs = FairseqModel(FairseqConfig(
        encoder_layers=TINY["layers"], encoder_embed_dim=TINY["hidden"],
        encoder_ffn_embed_dim=TINY["ffn"], encoder_attention_heads=TINY["heads"],
        conv_pos=TINY["kernel"], conv_pos_groups=GROUPS, conv_feature_layers=str(
            [(TINY["conv"], k, s) for k, s in zip(CONV_KERNELS, CONV_STRIDES)]))).eval()
    state = {name[len("wav2vec2."):]: value for name, value in utmos_state().items()
             if name.startswith("wav2vec2.")}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith(("final_proj", "project_q", "quantizer"))
                                  for name in missing), missing
    wav = noise(samples)[None]
    with torch.no_grad():
        expected = theirs(wav, mask=False, features_only=True)["x"]
        ours = load_utmos(tmp_path / "u.pt", utmos_state()).wav2vec2(wav).last_hidden_state
    assert expected.shape[1] == (24 if samples == 8_000 else 25) and expected.std() > 0.1
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_utmos_is_the_mean_over_frames_of_its_head(tmp_path):
    state = utmos_state()
    utmos, wav = load_utmos(tmp_path / "u.pt", state), noise(9_000)
    with torch.no_grad():
        x = utmos.wav2vec2(wav[None]).last_hidden_state[0]                    # (N, C)
    x = torch.cat((x, state["domain_emb"].repeat(len(x), 1),
                   state["judge_emb"].repeat(len(x), 1)), 1)
    outs = []
    for end, rows in (("", x), ("_reverse", x.flip(0))):                      # the LSTM by hand
        h, c, out = torch.zeros(10), torch.zeros(10), []
        for row in rows:
            i, f, g, o = (state[f"blstm.weight_ih_l0{end}"] @ row + state[f"blstm.bias_ih_l0{end}"]
                          + state[f"blstm.weight_hh_l0{end}"] @ h
                          + state[f"blstm.bias_hh_l0{end}"]).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        outs.append(torch.stack(out).flip(0) if end else torch.stack(out))
    y = torch.cat(outs, 1) @ state["projection.0.weight"].T + state["projection.0.bias"]
    y = y.relu() @ state["projection.2.weight"].T + state["projection.2.bias"]
    assert utmos.score([wav]).item() == pytest.approx(3 + 2 * y.mean().item(), abs=1e-5)


def test_utmos_scores_one_clip_at_a_time(tmp_path):
    utmos = load_utmos(tmp_path / "u.pt", utmos_state())
    wavs = [noise(9_000, 1), noise(MIN_SAMPLES, 2), noise(5_000, 3)]
    before = torch.get_rng_state()
    out = utmos.score(wavs)
    assert torch.equal(before, torch.get_rng_state())
    assert out.shape == (3,) and out.dtype == torch.float32 and not utmos.training
    assert out.tolist() == [utmos.score([wav]).item() for wav in wavs]
    assert utmos.score([]).shape == (0,)


def test_a_utmos_file_with_one_wrong_weight_is_refused(tmp_path):
    state = utmos_state()
    del state["wav2vec2.encoder.layers.2.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="u.pt is another model, wanted utmos22.*k_proj"):
        load_utmos(tmp_path / "u.pt", state)


# ---- Paraformer and routing --------------------------------------------------------------------

def stub_funasr(monkeypatch, results, dither=0.0):
    """A funasr whose model answers with `results` in turn and remembers what it was asked."""
    calls = []

    class AutoModel:
        def __init__(self, **kwargs):
            calls.append(kwargs)
            self.kwargs = {"frontend": types.SimpleNamespace(dither=dither)}

        def generate(self, input):
            calls.append(input)
            return results[len(calls) - 2]
    monkeypatch.setitem(sys.modules, "funasr", types.SimpleNamespace(AutoModel=AutoModel))
    return calls


def test_paraformer_hears_clip_by_clip_without_dither_and_silence_is_an_empty_text(monkeypatch):
    calls = stub_funasr(monkeypatch, [[{"key": "a", "text": "你 好"}], [], [{"key": "b"}],
                                      [{"text": ""}]])
    asr = Paraformer(device="cpu")
    wavs = [noise(800 + i, i).double() for i in range(4)]
    texts = asr.transcribe(wavs)
    assert texts == ["你 好", "", "", ""]
    assert [wer("你好", text, "zh") for text in texts] == [0, 1, 1, 1]
    assert calls[0]["frontend_conf"] == {"dither": 0.0} and calls[0]["model"] == "paraformer-zh"
    assert calls[0]["ncpu"] == torch.get_num_threads()
    for wav, call in zip(wavs, calls[1:], strict=True):
        assert call.dtype == np.float32 and call.shape == wav.shape
    assert asr.transcribe([]) == []


def test_paraformer_refuses_a_funasr_that_keeps_its_dither(monkeypatch):
    stub_funasr(monkeypatch, [], dither=1.0)
    with pytest.raises(RuntimeError, match="dither=1.0, wanted 0"):
        Paraformer()


def test_without_funasr_the_error_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "funasr", None)
    with pytest.raises(ImportError, match="pip install funasr.*zh_asr: whisper"):
        Paraformer()


class StubASR:
    def __init__(self, name):
        self.name, self.calls = name, 0

    def transcribe(self, wavs):
        self.calls += 1
        return [f"{self.name}{int(wav[0])}" for wav in wavs]


def test_routed_clips_keep_their_order_and_each_judge_works_once():
    en, zh = StubASR("en"), StubASR("zh")
    asr = RoutedASR({"en": en, "zh": zh})
    wavs = [torch.full((800,), float(i)) for i in range(5)]
    assert asr.transcribe(wavs, ["zh", "en", "zh", "zh", "en"]) == ["zh0", "en1", "zh2", "zh3",
                                                                    "en4"]
    assert (en.calls, zh.calls) == (1, 1)
    assert asr.transcribe(wavs[:1], ["en"]) == ["en0"] and zh.calls == 1
    assert asr.transcribe([], []) == []
    with pytest.raises(ValueError, match="lang='de' is unknown; use one of en, zh"):
        asr.transcribe(wavs[:1], ["de"])
    with pytest.raises(ValueError, match="1 langs for 5 waveforms"):
        asr.transcribe(wavs, ["en"])


# ---- Whisper, small and random -----------------------------------------------------------------

SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|zh|>", "<|translate|>",
           "<|transcribe|>", "<|notimestamps|>")


@pytest.fixture(scope="module")
def tiny_whisper(tmp_path_factory):
    """Folder of a multilingual Whisper that babbles letters, saved as float16."""
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = WhisperTokenizer(vocab={chr(97 + i): i for i in range(26)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    end, start, en, zh, translate, transcribe, no_times = map(tokenizer.convert_tokens_to_ids,
                                                              SPECIAL)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
           "decoder_start_token_id": start}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(WhisperConfig(
            vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, init_std=0.5, suppress_tokens=None, begin_suppress_tokens=None,
            **ids))
    # A fresh one: transformers calls an edited generation config outdated once it is reloaded.
    model.generation_config = GenerationConfig(
        is_multilingual=True, lang_to_id={"<|en|>": en, "<|zh|>": zh}, max_length=448,
        task_to_id={"translate": translate, "transcribe": transcribe}, return_timestamps=False,
        no_timestamps_token_id=no_times, **ids)
    model.half().save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer).save_pretrained(folder)
    return str(folder)


def test_a_mixed_batch_hears_each_clip_in_its_own_language(tiny_whisper, fake_zhconv):
    wavs = [noise(8_000, i) for i in range(4)]
    asr = {lang: Whisper(tiny_whisper, lang=lang, max_new_tokens=8)
           for lang in ("en", "zh", "auto")}
    heard = {lang: asr[lang].transcribe(wavs) for lang in ("en", "zh")}
    assert all(en != zh for en, zh in zip(heard["en"], heard["zh"], strict=True)), heard
    langs = ["zh", "en", "en", "zh"]
    mixed = [heard[lang][i] for i, lang in enumerate(langs)]
    assert asr["auto"].transcribe(wavs, langs) == mixed
    assert [asr["auto"].transcribe([w], [l])[0] for w, l in zip(wavs, langs)] == mixed
    streams = {"wer": WERReward(asr["auto"], RewardConfig(lang="auto"))}
    out, _ = score(streams, wavs[:2], ["你好", heard["en"][1]], wavs[:2])
    assert out["wer"][1] == 1.0


def test_the_languages_of_a_call_are_checked(tiny_whisper, fake_zhconv):
    auto, en = Whisper(tiny_whisper, lang="auto"), Whisper(tiny_whisper)
    for asr, langs, message in (
            (auto, None, "lang='auto' is unknown; use one of en, zh"),
            (auto, ["en", "de"], "lang='de' is unknown; use one of en, zh"),
            (auto, ["en"], "1 langs for 2 waveforms; wanted one each"),
            (en, ["en", "zh"], "lang='zh' is unknown; use one of en")):
        with pytest.raises(ValueError, match=message):
            asr.transcribe([noise(800)] * 2, langs)


def test_a_float16_checkpoint_is_float32_on_a_cpu_and_features_follow_the_models_dtype(
        tiny_whisper):
    asr = Whisper(tiny_whisper, max_new_tokens=4)
    assert {p.dtype for p in asr.model.parameters()} == {torch.float32}
    assert not asr.model.training and not any(p.requires_grad for p in asr.model.parameters())
    asr.model.bfloat16()        # as a checkpoint may be on a GPU
    assert len(asr.transcribe([noise(800)])) == 1


def test_the_token_cap_stays_inside_whispers_positions(tiny_whisper):
    text, = Whisper(tiny_whisper, max_new_tokens=3).transcribe([noise(8_000)])
    assert len(text) <= 3
    assert Whisper(tiny_whisper, max_new_tokens=444).transcribe([noise(8_000)])
    for tokens in (0, 445):
        with pytest.raises(ValueError, match=f"max_new_tokens={tokens}; Whisper has room for"):
            Whisper("there/is-no-such-model", max_new_tokens=tokens)


def test_whisper_refuses_before_it_loads_anything(no_zhconv):
    for lang in ("zh", "auto"):
        with pytest.raises(ImportError, match="pip install zhconv"):
            Whisper("there/is-no-such-model", lang=lang)
    with pytest.raises(ValueError, match="lang='de' is unknown; use one of en, zh, auto"):
        Whisper("there/is-no-such-model", lang="de")


@pytest.mark.parametrize("kind, message", [
    ("absent", ""), ("empty", ""), ("other", "is of a wavlm model"), ("half", ""),
    ("incomplete", "weights are missing"), ("config", "")])
def test_a_folder_that_is_no_whisper_says_what_to_give(tmp_path, tiny_whisper, kind, message):
    folder = tmp_path / "model"
    if kind == "empty":
        folder.mkdir()
    elif kind == "other":
        tiny_wavlm().save_pretrained(folder)
    elif kind != "absent":
        shutil.copytree(tiny_whisper, folder)
        weights = folder / "model.safetensors"
        if kind == "half":
            weights.write_bytes(weights.read_bytes()[:5_000])
        elif kind == "config":
            (folder / "config.json").write_text('{"model_type": "whis')
        else:
            from safetensors.torch import load_file, save_file
            tensors = load_file(weights)
            save_file({k: v for k, v in tensors.items() if "fc1" not in k}, weights,
                      {"format": "pt"})
    message = f"could not load Whisper from .*config.json.*{message}"
    with pytest.raises(OSError, match=message) as error:
        Whisper(str(folder))
    assert str(folder) in str(error.value)


def test_whisper_refuses_clips_that_it_would_answer_with_made_up_words(tiny_whisper):
    asr, nan = Whisper(tiny_whisper), noise(800)
    nan[0] = float("nan")
    for clip, message in ((torch.ones(2, 800), r"shape \(2, 800\)"), (torch.zeros(0), "0 samples"),
                          (nan, "holds NaN")):
        with pytest.raises(ValueError, match=message):
            asr.transcribe([clip])
    assert asr.transcribe([]) == []


# ---- Whisper, real -----------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whisper():
    return Whisper(str(WHISPER), max_new_tokens=64)


@pytest.fixture(scope="module")
def speech():
    clips = {}
    for path in sorted(SPEECH.glob("*.wav")):
        data, rate = soundfile.read(path, dtype="float32")
        assert rate == judges.SAMPLE_RATE
        clips[path.stem] = torch.from_numpy(data), path.with_suffix(".txt").read_text().strip()
    return clips


@needs_whisper
def test_whisper_hears_real_speech_and_one_by_one_what_it_hears_in_a_batch(whisper, speech,
                                                                           monkeypatch):
    wavs = [wav for wav, _ in speech.values()]
    before = torch.get_rng_state()
    heard = dict(zip(speech, whisper.transcribe(wavs), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    for name in ("hello_world", "quick_brown_fox"):
        assert wer(speech[name][1], heard[name]) <= 0.2, heard
    # "One two three ..." comes back as digits, and digits are not words: no number normalisation.
    assert "".join(filter(str.isdigit, heard["counting"])) == "12345678910", heard
    assert wer(speech["counting"][1], heard["counting"]) >= 0.9
    monkeypatch.setattr(judges, "WHISPER_BATCH", 1)
    assert whisper.transcribe(wavs) == list(heard.values())
    assert whisper.truncated == 0


@needs_whisper
def test_whisper_counts_clips_over_30_seconds_and_drops_their_end(whisper, speech):
    wav, text = speech["hello_world"]
    limit = judges.WHISPER_MAX_SAMPLES
    long = torch.cat([wav, torch.zeros(limit - wav.numel()), speech["quick_brown_fox"][0]])
    before = whisper.truncated
    heard = whisper.transcribe([long, long[:limit]])
    assert whisper.truncated == before + 1
    assert heard[0] == heard[1] and wer(text, heard[0]) == 0.0


@needs_whisper
def test_an_english_checkpoint_takes_no_language_and_refuses_chinese(whisper, fake_zhconv):
    assert not whisper.multilingual
    for lang in ("zh", "auto"):
        with pytest.raises(ValueError, match=f"knows English only, but lang='{lang}'"):
            Whisper(str(WHISPER), lang=lang)


@needs_whisper
def test_whisper_drives_the_wer_reward(whisper, speech):
    wavs = [speech["hello_world"][0], torch.zeros(16_000), speech["quick_brown_fox"][0]]
    streams = {"wer": WERReward(whisper, RewardConfig())}
    out, bad = score(streams, wavs, ["Hello world."] * 3, [wavs[0]] * 3)
    assert bad.tolist() == [False, True, False]
    assert out["wer"][0] == 1.0 and out["wer"][1] == 0.0
    assert out["wer"][2] == 1 - 9 / 2  # nine wrong words against two


@needs_whisper
def test_the_command_line_judges_real_speech(capsys):
    path = str(SPEECH / "hello_world.wav")
    rewards.main([path, "--text", "Hello world.", "--asr", str(WHISPER)])
    out = capsys.readouterr().out
    assert "WER         0.00 %  (0 errors in 2 words)" in out and "Hello" in out
