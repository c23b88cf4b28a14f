"""Models of Hugging Face, tiny and with random weights: exported by PyTorch, and fused by ONNX Runtime's optimizer.

``nox -s exports`` installs what this needs and runs it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest

from fused_models import Feeds, assert_runs_whole, contributed, in_halves, optimized

torch: Any = pytest.importorskip("torch", reason="pip install -e .[exports] brings torch")
transformers: Any = pytest.importorskip("transformers", reason="pip install -e .[exports] brings transformers")
pytest.importorskip("sympy", reason="pip install -e .[test] brings sympy")

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDE, VOCABULARY, ROOM = 2, 64, 4, 2, 128, 100, 64
TOLERANCE, TOLERANCE_OF_HALVES = 5e-6, 5e-3
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Tokens = {0: "batch", 1: "sequence"}


@dataclass(frozen=True)
class Export:
    """A PyTorch model, the function that calls it, the dynamic axes and shapes of its named inputs, the model type for
    ONNX Runtime's optimizer, and the operators to which that has to fuse nodes.
    """

    model: Any
    call: Callable[..., Any]
    axes: dict[str, dict[int, str]]
    shapes: Mapping[str, tuple[int | str, ...]]
    kind: str
    fusions: frozenset[str]


def sizes(**more: Any) -> dict[str, Any]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    shared = dict(zip(names, (LAYERS, HIDDEN, HEADS, WIDE, VOCABULARY), strict=True))
    return shared | {"max_position_embeddings": ROOM} | more


def of_tokens(model: Any, call: Callable[..., Any], kind: str, *fusions: str, **more: tuple[int | str, ...]) -> Export:
    """Return an export with inputs ``input_ids`` and ``attention_mask``, and float inputs of the shapes in ``more``."""
    ids = ("batch", "sequence")
    shapes: dict[str, tuple[int | str, ...]] = {"input_ids": ids, "attention_mask": ids} | more
    axes = {name: {i: d for i, d in enumerate(shape) if isinstance(d, str)} for name, shape in shapes.items()}
    return Export(model, call, axes, shapes, kind, frozenset(fusions))


def causal(name: str, *fusions: str, kind: str = "gpt2", **more: Any) -> Export:
    """Return the causal language model of Hugging Face whose class names start with ``name``."""
    config = getattr(transformers, f"{name}Config")(**(sizes(**more) if name != "GPT2" else more))
    model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    plain(model)
    return of_tokens(
        model, lambda i, m: model(i, attention_mask=m, use_cache=False, return_dict=False)[0], kind, *fusions
    )


def plain(model: Any) -> Any:
    model.eval()
    model.set_attn_implementation("eager")
    return model


def bert() -> Export:
    model = plain(transformers.BertModel(transformers.BertConfig(**sizes())))
    fusions = ("SkipLayerNormalization", "BiasGelu")
    return of_tokens(model, lambda i, m: model(i, attention_mask=m, return_dict=False)[0], "bert", *fusions)


def t5(part: str) -> Export:
    config = transformers.T5Config(
        d_model=HIDDEN, d_kv=HIDDEN // HEADS, num_layers=LAYERS, num_heads=HEADS, d_ff=WIDE, vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )  # fmt: skip
    fusion = "SkipSimplifiedLayerNormalization"
    if part == "encoder":
        encoder = plain(transformers.T5EncoderModel(config))
        return of_tokens(encoder, lambda i, m: encoder(i, attention_mask=m, return_dict=False)[0], "t5", fusion)
    model = plain(transformers.T5ForConditionalGeneration(config))

    def decoded(ids: Any, mask: Any, hidden: Any) -> Any:
        states = (hidden,)
        return model(
            decoder_input_ids=ids, attention_mask=mask, encoder_outputs=states, use_cache=False, return_dict=False
        )[0]

    return of_tokens(model, decoded, "t5", fusion, hidden=("batch", "sequence", HIDDEN))


def whisper(part: str) -> Export:
    config = transformers.WhisperConfig(
        d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=WIDE, decoder_ffn_dim=WIDE, num_mel_bins=16,
        max_source_positions=20, max_target_positions=32, vocab_size=VOCABULARY, decoder_start_token_id=1, **ENDS,
    )  # fmt: skip
    model = plain(transformers.WhisperForConditionalGeneration(config))
    fusions = frozenset({"SkipLayerNormalization", "BiasGelu"})
    if part == "encoder":
        shape = {"features": ("batch", 16, 40)}
        axes = {"features": {0: "batch"}}
        return Export(model, lambda x: model.model.encoder(x, return_dict=False)[0], axes, shape, "bart", fusions)

    def decoded(ids: Any, hidden: Any) -> Any:
        decoder = model.model.decoder
        states = decoder(
            input_ids=ids, attention_mask=torch.ones_like(ids), encoder_hidden_states=hidden, use_cache=False,
            return_dict=False,
        )[0]  # fmt: skip
        return model.proj_out(states)

    axes = {"input_ids": Tokens, "hidden": {0: "batch"}}
    return Export(
        model, decoded, axes, {"input_ids": ("batch", "sequence"), "hidden": ("batch", 20, HIDDEN)}, "bart", fusions
    )


NORM = "SkipSimplifiedLayerNormalization"
EXPORTS: dict[str, Callable[[], Export]] = {
    "bert": bert,
    "gpt2": lambda: causal(
        "GPT2", "SkipLayerNormalization", "FastGelu",
        n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=ROOM, vocab_size=VOCABULARY,
    ),
    "t5 encoder": lambda: t5("encoder"),
    "t5 decoder": lambda: t5("decoder"),
    "whisper encoder": lambda: whisper("encoder"),
    "whisper decoder": lambda: whisper("decoder"),
    "llama": lambda: causal("Llama", NORM, num_key_value_heads=KV_HEADS),
    "phi": lambda: causal("Phi", "SkipLayerNormalization", "FastGelu"),
    "phi3": lambda: causal("Phi3", NORM, num_key_value_heads=KV_HEADS, **ENDS),
    "qwen2": lambda: causal("Qwen2", NORM, num_key_value_heads=KV_HEADS),
    "qwen3": lambda: causal("Qwen3", NORM, num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS, kind="qwen3"),
    "mixtral": lambda: causal(
        "Mixtral", NORM, num_key_value_heads=KV_HEADS, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip


def feeds_of(export: Export, batch: int, sequence: int) -> Feeds:
    """Return random feeds; the mask excludes the last third of the last sequence's tokens."""
    rng, feeds = np.random.default_rng(sequence), {}
    named = {"batch": batch, "sequence": sequence}
    for name, shape in export.shapes.items():
        dims = [named[d] if isinstance(d, str) else d for d in shape]
        if name == "attention_mask":
            feeds[name] = np.ones(dims, np.int64)
            feeds[name][-1, -(sequence // 3) :] = 0 if sequence > 2 else 1
        elif len(dims) == 2:
            feeds[name] = rng.integers(3, VOCABULARY, dims)
        else:
            feeds[name] = rng.standard_normal(dims).astype(np.float32)
    return feeds


def exported(export: Export) -> onnx.ModelProto:
    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = export.model

        def forward(self, *arguments: Any) -> Any:
            return export.call(*arguments)

    arguments = tuple(torch.from_numpy(x) for x in feeds_of(export, 2, 7).values())
    file = io.BytesIO()
    axes = export.axes | {"y": {0: "batch"} | ({1: "sequence"} if "input_ids" in export.axes else {})}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Module(), arguments, file, input_names=list(export.shapes), output_names=["y"], dynamic_axes=axes,
            opset_version=17, dynamo=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize("name", EXPORTS)
def test_a_fused_export_runs_whole(name: str) -> None:
    torch.manual_seed(0)
    export = EXPORTS[name]()
    model = exported(export)
    fused = optimized(model, export.kind, HEADS, HIDDEN)
    assert contributed(fused) >= export.fusions
    feeds = [feeds_of(export, *shape) for shape in ((2, 7), (1, 1), (3, 12))]
    if name == "mixtral":  # the export has each expert's number of tokens as a constant
        del feeds[1:]
    assert_runs_whole(fused, model, feeds, TOLERANCE)
    if name in ("bert", "mixtral"):
        assert_runs_whole(in_halves(fused), model, feeds[:1], TOLERANCE_OF_HALVES)
