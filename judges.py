"""The paper's judges: Whisper, Paraformer-zh, the WavLM-large speaker verifier, and UTMOS.

Paper: "Evaluation Metrics": WER by Whisper-large-v3 (en) and Paraformer-zh (zh), SIM by a speaker
verifier on WavLM-large, naturalness by UTMOS. Rewards and evaluation use the same WER and SIM
judges; UTMOS never enters a reward. Their interfaces, which the toy judges share:

    asr.transcribe(list of (S,)) -> list of str         transcribe(wavs, langs) for mixed sets
    speaker.embed(list of (S,)) -> (B, E) unit norm       utmos.score(list of (S,)) -> (B,)

All audio is mono at 16 kHz. Whisper alone runs in batches: it pads every clip to 30 s anyway. The
others hear one clip at a time, because padding changes their result: Paraformer's batches, the
instance norm and pooling of the speaker head, the group norm over time of UTMOS's first layer.

Weights: `wavlm_large_finetune.pth` (1,301,926,579 bytes) is the one that seed-tts-eval and F5-TTS
use, https://github.com/BytedanceSpeech/seed-tts-eval, sha256 51f07e3b94d9e0262a6a675ef5a087be3dd0
9e8c62e9d886827f44f82fe7f94b. `utmos22_strong_step7459_v1.pt` is an asset of release v1.0.0 of
https://github.com/tarepan/SpeechMOS. Both are read strictly and with safe loading.
"""
import pickle
import re
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

LANGS = ("en", "zh")
SAMPLE_RATE = 16_000
MIN_SAMPLES = 720       # 45 ms: two WavLM frames, and instance norm has no spread over fewer
WHISPER_MAX_SAMPLES = 30 * SAMPLE_RATE  # the encoder's fixed window
WHISPER_BATCH = 16      # clips per generate call; each costs the encoder a full 30 s window
MAX_NEW_TOKENS = 448 - 4    # Whisper's positions less its prompt: start, language, task, mode

# What the large model has beside the defaults of transformers' WavLMConfig (320 buckets, 800).
WAVLM_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
               "intermediate_size": 4096, "feat_extract_norm": "layer",
               "do_stable_layer_norm": True, "conv_bias": False}

# Names of WavLM and wav2vec 2.0 in fairseq's checkpoints -> transformers, in this order.
FAIRSEQ_TO_TRANSFORMERS = (
    (r"^mask_emb$", "masked_spec_embed"),
    (r"^layer_norm\.", "feature_projection.layer_norm."),
    (r"^post_extract_proj\.", "feature_projection.projection."),
    (r"(conv_layers\.\d+)\.0\.", r"\1.conv."),
    (r"(conv_layers\.\d+)\.2\.(1\.)?", r"\1.layer_norm."),     # 2.1 a layer norm, 2 a group norm
    (r"pos_conv\.0\.weight_g$", "pos_conv_embed.conv.parametrizations.weight.original0"),
    (r"pos_conv\.0\.weight_v$", "pos_conv_embed.conv.parametrizations.weight.original1"),
    (r"pos_conv\.0\.", "pos_conv_embed.conv."),
    (r"self_attn_layer_norm\.", "layer_norm."),
    (r"self_attn\.grep_linear\.", "attention.gru_rel_pos_linear."),
    (r"self_attn\.grep_a$", "attention.gru_rel_pos_const"),
    (r"self_attn\.relative_attention_bias\.", "attention.rel_attn_embed."),
    (r"self_attn\.", "attention."),
    (r"\.fc1\.", ".feed_forward.intermediate_dense."),
    (r"\.fc2\.", ".feed_forward.output_dense."),
)
SPEAKER_HEAD = (        # names of the speaker head in its file -> here
    (r"Res2Conv1dReluBn\.convs\.(\d+)", r"res2.\1.0"),
    (r"Res2Conv1dReluBn\.bns\.(\d+)", r"res2.\1.2"),
    (r"Conv1dReluBn1", "conv_in"), (r"Conv1dReluBn2", "conv_out"),
    (r"\.conv\.", ".0."), (r"\.bn\.", ".2."),
    (r"SE_Connect\.linear1", "gate.0"), (r"SE_Connect\.linear2", "gate.2"),
    (r"pooling\.linear1", "attention.0"), (r"pooling\.linear2", "attention.2"),
)


# ---- checks ----------------------------------------------------------------------------------

def check_lang(lang, known=LANGS):
    if lang not in known:
        raise ValueError(f"lang={lang!r} is unknown; use one of {', '.join(known)}")


def check_langs(langs, wavs, known):
    if len(langs) != len(wavs):
        raise ValueError(f"{len(langs)} langs for {len(wavs)} waveforms; wanted one each")
    for lang in langs:
        check_lang(lang, known)


def check_wavs(wavs):
    """Raises ValueError for what a judge cannot hear, or would answer with a made-up result."""
    for i, wav in enumerate(wavs):
        if wav.dim() != 1:  # Whisper's processor would take (2, S) for two clips
            raise ValueError(f"waveform {i} has shape {tuple(wav.shape)}; wanted mono (S,)")
        if wav.numel() < MIN_SAMPLES:
            raise ValueError(f"waveform {i} has {wav.numel()} samples; a judge needs "
                             f"{MIN_SAMPLES} (45 ms) at least")
        if not torch.isfinite(wav).all():
            raise ValueError(f"waveform {i} holds NaN or infinite samples")


def to_simplified(text):
    """Traditional to simplified Chinese characters; Whisper may write either."""
    try:
        import zhconv
    except ImportError as error:
        raise ImportError("Chinese transcripts need zhconv; run: pip install zhconv") from error
    return zhconv.convert(text, "zh-cn")


def read_checkpoint(path, what):
    """A dict of tensors from a torch file, on the CPU, with safe loading.
    Raises FileNotFoundError, or ValueError for a file that is no such checkpoint or cut short.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; wanted {what}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, LookupError,
            pickle.UnpicklingError) as error:
        raise ValueError(f"{path} ({path.stat().st_size:,} bytes) cannot be read, perhaps half "
                         f"downloaded; wanted {what}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}; wanted {what}")
    return state


def load_strict(module, state, path, what):
    """Loads state into module. Raises ValueError for a name or shape that differs: a key map with
    one wrong name would otherwise leave that weight random, and nobody would know."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} is another model, wanted {what} ({text[:400]})") from error


def rename(name, table, prefix=""):
    """A name without its prefix, with each (pattern, new) of the table applied in turn."""
    name = name[len(prefix):]
    for pattern, new in table:
        name = re.sub(pattern, new, name)
    return name


# ---- recognisers -----------------------------------------------------------------------------

class Whisper:
    """Greedy Whisper through transformers, batched. Same transcript for any batching in float32.

    name_or_path: a folder with a checkpoint in the transformers layout, or a hub id.
    lang: "en", "zh", or "auto": then transcribe wants the language of every clip.
    max_new_tokens: a cap, so that a looping rollout stays cheap. None (evaluation) is the model's.
    truncated: how many clips so far were longer than 30 s and lost their end.
    Raises OSError if the checkpoint is absent, broken or another model, ValueError for an unknown
    lang, a cap above MAX_NEW_TOKENS or zh of an English model, ImportError for zh without zhconv.
    """

    def __init__(self, name_or_path, device="cpu", lang="en", max_new_tokens=None):
        check_lang(lang, (*LANGS, "auto"))
        if max_new_tokens is not None and not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
            raise ValueError(f"max_new_tokens={max_new_tokens}; Whisper has room for 1 to "
                             f"{MAX_NEW_TOKENS} (448 positions less 4 of its own)")
        if lang != "en":
            to_simplified("")  # fails now if zhconv is absent, not after the model has loaded
        from safetensors import SafetensorError
        from transformers import AutoConfig, WhisperForConditionalGeneration, WhisperProcessor
        # transformers 5 keeps the checkpoint's dtype, often float16, which is slow on a CPU.
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        try:
            kind = AutoConfig.from_pretrained(name_or_path).model_type
            if kind != "whisper":  # it would load, with a warning, as a Whisper of random weights
                raise ValueError(f"its config.json is of a {kind} model")
            model, info = WhisperForConditionalGeneration.from_pretrained(
                name_or_path, dtype=dtype, output_loading_info=True)
            if info["missing_keys"]:
                raise ValueError(f"{len(info['missing_keys'])} weights are missing")
            self.processor = WhisperProcessor.from_pretrained(name_or_path)
        except (OSError, ValueError, SafetensorError) as error:
            raise OSError(
                f"could not load Whisper from {str(name_or_path)!r}: give a folder with "
                "config.json and complete weights, or, with network, a hub id "
                f"({str(error).splitlines()[0]})") from error
        self.model = model.to(device).eval().requires_grad_(False)
        self.multilingual = self.model.generation_config.is_multilingual
        if lang != "en" and not self.multilingual:
            raise ValueError(f"{name_or_path} knows English only, but lang={lang!r}; use a "
                             "multilingual checkpoint")
        self.lang, self.truncated = lang, 0
        self.generate_args = {"num_beams": 1, "do_sample": False}
        if max_new_tokens is not None:
            self.generate_args["max_new_tokens"] = max_new_tokens

    @torch.no_grad()
    def transcribe(self, wavs, langs=None):
        """wavs: list of (S,) float tensors; langs: "en" or "zh" for each, None for self.lang.
        Returns as many texts, in order. Raises ValueError for a waveform that check_wavs refuses.
        """
        check_wavs(wavs)
        langs = [self.lang] * len(wavs) if langs is None else list(langs)
        check_langs(langs, wavs, LANGS if self.lang == "auto" else (self.lang,))
        self.truncated += sum(wav.numel() > WHISPER_MAX_SAMPLES for wav in wavs)
        clips = [wav[:WHISPER_MAX_SAMPLES].float().cpu().numpy() for wav in wavs]
        texts = []
        for i in range(0, len(clips), WHISPER_BATCH):
            inputs = self.processor(clips[i:i + WHISPER_BATCH], sampling_rate=SAMPLE_RATE,
                                    return_tensors="pt", return_attention_mask=True)
            features = inputs.input_features.to(self.model.device, self.model.dtype)
            # Without them a multilingual model guesses each clip's language; *.en refuses them.
            spoken = {"language": langs[i:i + WHISPER_BATCH], "task": "transcribe"}
            ids = self.model.generate(                     # features (B, mels, 3000 frames)
                features, attention_mask=inputs.attention_mask.to(self.model.device),
                **self.generate_args, **(spoken if self.multilingual else {}))  # (B, tokens)
            texts += self.processor.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def funasr_model():
    """funasr's AutoModel, a heavy package that only Chinese by Paraformer needs."""
    try:
        from funasr import AutoModel
    except ImportError as error:
        raise ImportError("zh_asr: paraformer needs funasr; run: pip install funasr "
                          "kaldi-native-fbank, or set zh_asr: whisper to do without") from error
    return AutoModel


class Paraformer:
    """Paraformer-zh through funasr: Mandarin, one clip at a time, no punctuation.

    name_or_path: a name that funasr knows (it downloads the model), or a folder.
    Raises ImportError without funasr, RuntimeError if its features would be random.
    """

    def __init__(self, name_or_path="paraformer-zh", device="cpu"):
        # Dither, 1.0 by default, is noise on the features: the same clip, another reward. It must
        # be set here: generate() restores a copy of the frontend as it was built. funasr also
        # sets torch's threads, 4 by default, and the root logger.
        self.model = funasr_model()(
            model=str(name_or_path), device=str(device), frontend_conf={"dither": 0.0},
            ncpu=torch.get_num_threads(), disable_update=True, disable_pbar=True,
            log_level="ERROR")
        dither = getattr(self.model.kwargs.get("frontend"), "dither", None)
        if dither != 0:
            raise RuntimeError(f"funasr's frontend has dither={dither}, wanted 0: this version of "
                               "funasr takes the setting elsewhere; use 1.4, or zh_asr: whisper")

    @torch.no_grad()
    def transcribe(self, wavs):
        """wavs: list of (S,) float tensors. Returns as many texts; "" where it hears nothing."""
        check_wavs(wavs)
        texts = []
        for wav in wavs:
            result = self.model.generate(input=wav.float().cpu().numpy())
            texts.append(result[0].get("text", "") if result else "")   # silence gives []
        return texts


class RoutedASR:
    """A mixed set: each clip goes to its language's recogniser, lang -> judge. Order is kept."""

    def __init__(self, judges):
        self.judges = judges

    def transcribe(self, wavs, langs):
        """wavs: list of (S,); langs: as many of the judges' languages. Returns as many texts."""
        check_langs(langs, wavs, tuple(self.judges))
        texts = [None] * len(wavs)
        for lang, judge in self.judges.items():
            rows = [i for i, other in enumerate(langs) if other == lang]
            if rows:
                heard = judge.transcribe([wavs[i] for i in rows])
                for i, text in zip(rows, heard, strict=True):
                    texts[i] = text
        return texts


# ---- speaker similarity ----------------------------------------------------------------------

def conv_relu_norm(n_in, n_out, kernel=1, dilation=1):
    """In this order everywhere in the head; as many frames out as in."""
    return nn.Sequential(
        nn.Conv1d(n_in, n_out, kernel, padding=dilation * (kernel // 2), dilation=dilation),
        nn.ReLU(), nn.BatchNorm1d(n_out))


class SERes2Block(nn.Module):
    """ECAPA-TDNN's block: (B, C, N) -> (B, C, N)."""

    def __init__(self, channels, dilation, scale, bottleneck):
        super().__init__()
        width = channels // scale
        self.conv_in = conv_relu_norm(channels, channels)
        self.res2 = nn.ModuleList(conv_relu_norm(width, width, 3, dilation)
                                  for _ in range(scale - 1))
        self.conv_out = conv_relu_norm(channels, channels)
        self.gate = nn.Sequential(nn.Linear(channels, bottleneck), nn.ReLU(),
                                  nn.Linear(bottleneck, channels), nn.Sigmoid())

    def forward(self, x):
        *parts, last = self.conv_in(x).chunk(len(self.res2) + 1, dim=1)
        y, out = 0, []
        for part, conv in zip(parts, self.res2):    # each hears the result before it; the last
            y = conv(part + y)                      # part passes through
            out.append(y)
        y = self.conv_out(torch.cat((*out, last), dim=1))
        return x + y * self.gate(y.mean(dim=2))[:, :, None]


class SpeakerVerifier(nn.Module):
    """WavLM-large and an ECAPA-TDNN head, as Microsoft's UniSpeech fine-tuned them. float32.

    wavlm: a WavLMConfig; None is the large one. The other sizes are the head's.
    """

    def __init__(self, wavlm=None, channels=512, scale=8, pooled=1536, bottleneck=128,
                 embed_dim=256):
        super().__init__()
        from transformers import WavLMConfig, WavLMModel
        wavlm = wavlm or WavLMConfig(**WAVLM_LARGE)
        self.wavlm = WavLMModel(wavlm)
        self.feature_weight = nn.Parameter(torch.zeros(wavlm.num_hidden_layers + 1))
        self.layer1 = conv_relu_norm(wavlm.hidden_size, channels, 5)
        self.layer2 = SERes2Block(channels, 2, scale, bottleneck)
        self.layer3 = SERes2Block(channels, 3, scale, bottleneck)
        self.layer4 = SERes2Block(channels, 4, scale, bottleneck)
        self.conv = nn.Conv1d(3 * channels, pooled, 1)
        self.attention = nn.Sequential(nn.Conv1d(pooled, bottleneck, 1), nn.Tanh(),
                                       nn.Conv1d(bottleneck, pooled, 1), nn.Softmax(dim=2))
        self.bn = nn.BatchNorm1d(2 * pooled)
        self.linear = nn.Linear(2 * pooled, embed_dim)
        self.eval().requires_grad_(False)   # WavLMModel starts in training mode, with dropout

    @classmethod
    def load(cls, path, device="cpu", **sizes):
        """From `wavlm_large_finetune.pth`. Raises FileNotFoundError, or ValueError for any weight
        that is missing, unknown or misshapen; only the training classifier's is left out."""
        what = "wavlm_large_finetune.pth"
        state = read_checkpoint(path, what).get("model")
        if not isinstance(state, dict):
            raise ValueError(f"{path} is another model, wanted {what} (it has no 'model' entry)")
        prefix = "feature_extract.model."
        state = {"wavlm." + rename(name, FAIRSEQ_TO_TRANSFORMERS, prefix)
                 if name.startswith(prefix) else rename(name, SPEAKER_HEAD): value
                 for name, value in state.items() if name != "loss_calculator.projection.weight"}
        model = cls(**sizes)
        load_strict(model, state, path, what)
        return model.to(device)

    def hidden_states(self, wav):
        """(S,) -> (L+1, N, C): the input of each layer, then the output after the last norm."""
        wav = F.layer_norm(wav, wav.shape)  # eps 1e-5; transformers' own extractor has 1e-7
        with torch.random.fork_rng([]):     # transformers 5.20 draws for layerdrop in eval, too
            out = self.wavlm(wav[None], output_hidden_states=True)
        # transformers 5 ends hidden_states before the final LayerNorm, the verifier after it.
        return torch.cat((*out.hidden_states[:-1], out.last_hidden_state))

    def forward(self, wav):
        """(S,) -> (embed_dim,), not normalised."""
        weight = self.feature_weight.softmax(dim=0)[:, None, None]
        x = (weight * self.hidden_states(wav)).sum(dim=0).T[None]             # (1, C, N)
        x = F.instance_norm(x, eps=1e-5)
        x2 = self.layer2(self.layer1(x))
        x3 = self.layer3(x2)
        x4 = self.layer4(x3)
        x = F.relu(self.conv(torch.cat((x2, x3, x4), dim=1)))                 # (1, pooled, N)
        alpha = self.attention(x)                                   # (1, pooled, N) sums to 1
        mean = (alpha * x).sum(dim=2)
        std = ((alpha * x.square()).sum(dim=2) - mean.square()).clamp(min=1e-9).sqrt()
        return self.linear(self.bn(torch.cat((mean, std), dim=1)))[0]

    @torch.no_grad()
    def embed(self, wavs):
        """List of (S,) at 16 kHz -> (B, embed_dim) of unit norm, one clip per forward.
        Raises ValueError for a waveform that check_wavs refuses."""
        check_wavs(wavs)
        device = self.feature_weight.device
        return torch.stack([F.normalize(self(wav.to(device, torch.float32)), dim=0)
                            for wav in wavs])


# ---- naturalness -----------------------------------------------------------------------------

class UTMOS(nn.Module):
    """UTMOS22-strong: predicted mean opinion score, about 1 to 5, trained on English. float32.

    wav2vec2: a Wav2Vec2Config; None is base. Other sizes: the embeddings, the LSTM, the head.
    """

    def __init__(self, wav2vec2=None, embed=128, lstm=512, hidden=2048):
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model
        wav2vec2 = wav2vec2 or Wav2Vec2Config()
        self.wav2vec2 = Wav2Vec2Model(wav2vec2)
        self.domain_emb = nn.Parameter(torch.zeros(1, embed))   # of one listening test and one
        self.judge_emb = nn.Parameter(torch.zeros(1, embed))    # listener, fixed in the file
        self.blstm = nn.LSTM(wav2vec2.hidden_size + 2 * embed, lstm, batch_first=True,
                             bidirectional=True)
        self.projection = nn.Sequential(nn.Linear(2 * lstm, hidden), nn.ReLU(),
                                        nn.Linear(hidden, 1))
        self.eval().requires_grad_(False)

    @classmethod
    def load(cls, path, device="cpu", **sizes):
        """From `utmos22_strong_step7459_v1.pt`; errors as those of SpeakerVerifier.load."""
        what, prefix = "utmos22_strong_step7459_v1.pt", "wav2vec2."
        state = {prefix + rename(name, FAIRSEQ_TO_TRANSFORMERS, prefix)
                 if str(name).startswith(prefix) else name: value
                 for name, value in read_checkpoint(path, what).items()}
        model = cls(**sizes)
        load_strict(model, state, path, what)
        return model.to(device)

    def forward(self, wav):
        """(S,) -> (), the mean over frames. The waveform is not normalised."""
        with torch.random.fork_rng([]):                                       # as for WavLM
            x = self.wav2vec2(wav[None]).last_hidden_state                    # (1, N, C)
        extra = [e[:, None].expand(1, x.shape[1], -1) for e in (self.domain_emb, self.judge_emb)]
        x, _ = self.blstm(torch.cat((x, *extra), dim=2))                      # (1, N, 2 lstm)
        return self.projection(x).mean() * 2 + 3

    @torch.no_grad()
    def score(self, wavs):
        """List of (S,) at 16 kHz -> (B,) on the CPU, one clip at a time.
        Raises ValueError for a waveform that check_wavs refuses."""
        check_wavs(wavs)
        device = self.domain_emb.device
        return torch.tensor([self(wav.to(device, torch.float32)).item() for wav in wavs])
