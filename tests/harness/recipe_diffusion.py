"""A Stable Diffusion pipeline with random weights, in the files that diffusers saves, for the recipe of diffusers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

WIDTH = 16
"""Width of the text encoder and of the token embeddings that the U-Net attends to."""
LEVELS = (32, 64)
"""Channels at each resolution of the U-Net and of the VAE."""


def diffusion_pipeline(folder: Path) -> None:
    """Write the folder ``pipeline``: text encoder, U-Net, VAE, tokenizer and scheduler.

    The default size of its pictures is 32 x 32 pixels. PyTorch, diffusers and transformers are imported here, because
    most environments of tests lack them.
    """
    torch, diffusers, transformers = map(importlib.import_module, ("torch", "diffusers", "transformers"))
    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    files = folder / "tokenizer"
    files.mkdir()
    (files / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (files / "merges.txt").write_text("#version: 0.2\n")
    text = transformers.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
        pad_token_id=len(words) - 1,
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=LEVELS,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=LEVELS,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    diffusers.StableDiffusionPipeline(
        vae=vae.eval(),
        unet=unet.eval(),
        text_encoder=transformers.CLIPTextModel(text).eval(),
        tokenizer=transformers.CLIPTokenizer(str(files / "vocab.json"), str(files / "merges.txt"), model_max_length=77),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "pipeline")
