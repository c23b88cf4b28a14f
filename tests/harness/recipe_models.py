"""Synthetic models for recipes whose real models no PyPI package contains.

Each has the inputs and outputs of the model that the page names, and a few operators whose result the page can state.
"""

from __future__ import annotations

import json
import struct
import wave
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

from genai_decoder import genai_config, genai_decoder

RATE = 16000
"""Sampling rate of recordings, Hz."""
HEADER = '<ir_version: 9, opset_import: ["" : 20]>'
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("the", "a", "cat", "sits", "sleeps", "on", "mat", "rug", "interest", "rates", "rise", "again"),
]
TABLE = np.random.default_rng(0).standard_normal((len(WORDS), 32), np.float32)
"""Embeddings of the words, which are unrelated: texts are similar if they share words."""


def save(path: Path, text: str, **weights: np.ndarray) -> None:
    """Write the model that a text describes (onnx.parser), with these initializers."""
    model = parser.parse_model(f"{HEADER} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


def write_json(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def small_model(folder: Path) -> None:
    """Write model.onnx: y = Relu(x @ w), x float32 [batch, 8], y float32 [batch, 4]."""
    weight = (0.5 - 0.03 * np.arange(32)).astype(np.float32).reshape(8, 4)
    text = "small (float[batch, 8] x) => (float[batch, 4] y) { p = MatMul (x, w)  y = Relu (p) }"
    save(folder / "model.onnx", text, w=weight)


def write_picture(
    path: Path, size: tuple[int, int], patch: tuple[int, int, int, int], color: Sequence[int] = (255, 255, 255)
) -> None:
    """Write a PNG file: black, with a patch (top, left, height, width) of one color (blue, green, red)."""
    rows = np.zeros((*size, 3), np.uint8)
    top, left, height, width = patch
    rows[top : top + height, left : left + width] = color[::-1]
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    content = struct.pack(">IIBBBBB", size[1], size[0], 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = [(b"IHDR", content), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    written = [struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(written))


def tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer that knows `WORDS`, as Hugging Face stores them."""
    special = [
        {"id": i, "content": WORDS[i], "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
        for i in range(4)
    ]
    text = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    ends = {name: {"id": name, "ids": [WORDS.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    single: list[Mapping[str, object]] = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}}]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**each, "normalized": False} for each in special],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {**text, "single": single, "pair": pair, "special_tokens": ends},
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(WORDS)}, "unk_token": "[UNK]"},
    }
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_json(
        folder,
        tokenizer=content,
        tokenizer_config={"model_max_length": 64, "tokenizer_class": "PreTrainedTokenizerFast", **names},
        special_tokens_map=names,
    )


def text_encoder(folder: Path) -> None:
    """Write bge-small: an encoder whose states are the mean of the embeddings of the text's words.

    The files are those that fastembed reads (model_optimized.onnx) and sentence-transformers reads (onnx/model.onnx).
    """
    target = folder / "bge-small"
    text = """encoder (int64[batch, length] input_ids, int64[batch, length] attention_mask,
        int64[batch, length] token_type_ids) => (float[batch, length, 32] last_hidden_state) {
            words = Gather (table, input_ids)
            real = Cast <to = 1> (attention_mask)
            weights = Unsqueeze (real, last)
            kept = Mul (words, weights)
            total = ReduceSum <keepdims = 1> (kept, middle)
            count = ReduceSum <keepdims = 1> (weights, middle)
            mean = Div (total, count)
            type = Cast <to = 1> (token_type_ids)
            types = Unsqueeze (type, last)
            apart = Mul (types, zero)
            spread = Mul (kept, zero)
            rows = Add (spread, apart)
            last_hidden_state = Add (rows, mean)
        }"""
    constants = {"last": np.array([-1]), "middle": np.array([1]), "zero": np.zeros(1, np.float32)}
    for name in ("model_optimized.onnx", "onnx/model.onnx"):
        save(target / name, text, table=TABLE, **constants)
    tokenizer(target)
    config = {"model_type": "bert", "hidden_size": 32, "pad_token_id": 0, "vocab_size": len(WORDS)}
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    write_json(target, config={**config, **small, "architectures": ["BertModel"]})


STRIDES = (8, 16, 32)


def face_detector(folder: Path) -> None:
    """Write det_10g.onnx with SCRFD's nine outputs: a cell of 32 pixels that is bright is a face of 96 x 96 pixels.

    The other strides find nothing.
    """
    rows, outputs = [], {"scores": 1, "boxes": 4, "points": 10}
    for stride in STRIDES:
        pool = f"AveragePool <kernel_shape = [{stride}, {stride}], strides = [{stride}, {stride}]> (gray)"
        rows += [f"p{stride} = {pool}", f"m{stride} = Mul (p{stride}, gain{stride})"]
        rows += [f"s{stride} = Add (m{stride}, offset)", f"q{stride} = Sigmoid (s{stride})"]
        rows += [f"r{stride} = Reshape (q{stride}, column)", f"d{stride} = Concat <axis = 1> (r{stride}, r{stride})"]
        rows += [f"scores{stride} = Reshape (d{stride}, column)", f"zero{stride} = Mul (scores{stride}, nothing)"]
        rows += [f"boxes{stride} = Add (zero{stride}, reach)", f"points{stride} = Add (zero{stride}, corners)"]
    declared = ", ".join(
        f"float[n{stride}, {width}] {name}{stride}" for name, width in outputs.items() for stride in STRIDES
    )
    text = f"scrfd (float[1, 3, height, width] input) => ({declared}) {{ gray = ReduceMean (input, channel) "
    write_picture(folder / "people.png", (480, 640), (192, 320, 32, 32))
    gains = {f"gain{stride}": np.full(1, 8.0 if stride == 32 else 0.0, np.float32) for stride in STRIDES}
    save(
        folder / "det_10g.onnx",
        text + "\n".join(rows) + "}",
        channel=np.array([1]),
        column=np.array([-1, 1]),
        nothing=np.zeros(1, np.float32),
        offset=np.full(1, -4, np.float32),
        reach=np.full(4, 1.5, np.float32),
        corners=np.tile(np.array([0.5, -0.5], np.float32), 5),
        **gains,
    )


def background_remover(folder: Path) -> None:
    """Write u2net.onnx with U2-Net's input [1, 3, 320, 320] and mask: what is brighter than its surroundings."""
    blur = "AveragePool <kernel_shape = [9, 9], pads = [4, 4, 4, 4], count_include_pad = 1>"
    text = f"""u2net (float[1, 3, 320, 320] input) => (float[1, 1, 320, 320] mask) {{
        gray = ReduceMean (input, channel)  soft = {blur} (gray)  mask = Sigmoid (soft) }}"""
    write_picture(folder / "photo.png", (200, 300), (50, 100, 100, 100))
    save(folder / "u2net.onnx", text, channel=np.array([1]))


def object_detector(folder: Path) -> None:
    """Write yolo11n.onnx with the input and output of Ultralytics' export: [1, 3, 640, 640] -> [1, 84, 400].

    The model has one stride, 32 pixels. A bright cell is an object of class 2, as large as 96 x 64 pixels.
    """
    ys, xs = np.mgrid[:20, :20].reshape(2, 400) * 32.0 + 16
    boxes = np.stack([xs, ys, np.full(400, 96.0), np.full(400, 64.0)])[None].astype(np.float32)
    chosen = np.zeros((80, 1), np.float32)
    chosen[2] = 1
    text = """yolo (float[1, 3, 640, 640] images) => (float[1, 84, 400] output0) {
        gray = ReduceMean (images, channel)
        cells = AveragePool <kernel_shape = [32, 32], strides = [32, 32]> (gray)
        row = Reshape (cells, flat)
        scores = Mul (row, chosen)
        output0 = Concat <axis = 1> (boxes, scores) }"""
    write_picture(folder / "street.png", (640, 640), (224, 352, 32, 32), (204, 204, 204))
    save(folder / "yolo11n.onnx", text, channel=np.array([1]), flat=np.array([1, 1, 400]), boxes=boxes, chosen=chosen)


def language_model(folder: Path) -> None:
    """Write the folder llm of a decoder of two layers, as onnxruntime-genai's model builder does."""
    target = folder / "llm"
    target.mkdir()
    model = genai_decoder()
    onnx.save(model, target / "decoder.onnx")
    (target / "genai_config.json").write_text(genai_config(model, "decoder.onnx"))


def recordings(folder: Path) -> None:
    """Write vowel.wav, a synthetic vowel, and noise.wav; each has one second of 16,000 samples."""
    time = np.arange(RATE) / RATE
    pitch = 120 * (1 + 0.05 * np.sin(2 * np.pi * 4 * time))  # Hz, with vibrato
    sound = np.diff(np.floor(np.cumsum(pitch) / RATE), prepend=0)  # one pulse each period
    for formant, width in ((700, 90), (1200, 110), (2600, 160)):  # Hz
        radius = np.exp(-np.pi * width / RATE)
        near, far = 2 * radius * np.cos(2 * np.pi * formant / RATE), -(radius**2)
        for i in range(2, RATE):
            sound[i] += near * sound[i - 1] + far * sound[i - 2]
    loudness = 0.6 + 0.4 * np.sin(2 * np.pi * 3 * time)
    write_wave(folder / "vowel.wav", 0.3 * sound / np.abs(sound).max() * loudness)
    write_wave(folder / "noise.wav", 0.01 * np.random.default_rng(0).standard_normal(RATE))


def write_wave(path: Path, samples: np.ndarray) -> None:
    """Write samples in [-1, 1] as a recording with one channel of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


SPOKEN = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "\u0120hello", "\u0120world"]
SPOKEN += ["<|endoftext|>"]
"""Tokens of the synthetic speech recognizer, in the order in which it predicts them; U+0120 is a space."""


def speech_recognizer(folder: Path) -> None:
    """Write the folder whisper: an encoder and a decoder with the inputs and outputs of Whisper without a cache.

    The decoder's most probable token is the one after the last token in `SPOKEN`.
    """
    recordings(folder)
    target = folder / "whisper"
    noise = np.random.default_rng(0)
    encoder = """encoder (float[batch, 80, 3000] input_features) => (float[batch, 1500, 16] last_hidden_state) {
        first = Conv <kernel_shape = [3], pads = [1, 1]> (input_features, w0)
        state = Relu (first)
        second = Conv <kernel_shape = [3], pads = [1, 1], strides = [2]> (state, w1)
        last_hidden_state = Transpose <perm = [0, 2, 1]> (second) }"""
    weights = {f"w{i}": noise.standard_normal((16, depth, 3), np.float32) / 16 for i, depth in enumerate((80, 16))}
    save(target / "encoder_model.onnx", encoder, **weights)
    decoder = f"""decoder (int64[batch, length] input_ids, float[batch, 1500, 16] encoder_hidden_states)
        => (float[batch, length, {len(SPOKEN)}] logits) {{
            next = Gather (table, input_ids)
            heard = ReduceMean <keepdims = 1> (encoder_hidden_states, axes)
            little = Tanh (heard)
            shift = Mul (little, scale)
            logits = Add (next, shift) }}"""
    table = np.roll(np.eye(len(SPOKEN), dtype=np.float32), 1, axis=1)
    save(
        target / "decoder_model_merged.onnx",
        decoder,
        table=table,
        axes=np.array([1, 2]),
        scale=np.full(1, 0.1, np.float32),
    )
    write_json(target, vocab={w: i for i, w in enumerate(SPOKEN)}, added_tokens={}, config={"num_mel_bins": 80})
