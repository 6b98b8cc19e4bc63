# Copyright (c) 2026 The Megatron-FSDP v2 developers.
# SPDX-License-Identifier: Apache-2.0
"""The transformer of QwenImage, as diffusers has it, with fewer blocks and random weights. Knows of no runtime."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS, TEXT_WIDTH, HEAD_WIDTH = 64, 3584, 128
"""Of a patch of the latent image, of the text encoder, and of an attention head."""


class QwenImage(nn.Module):
    """Learns, from a noisy image, a text and the noise's share, what the noise was (flow matching)."""

    def __init__(self, blocks: int, heads: int) -> None:
        super().__init__()
        from diffusers import QwenImageTransformer2DModel

        self.transformer = QwenImageTransformer2DModel(
            in_channels=CHANNELS,
            num_layers=blocks,
            num_attention_heads=heads,
            attention_head_dim=HEAD_WIDTH,
            joint_attention_dim=TEXT_WIDTH,
        )

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return the mean squared error in fp32.

        Args:
            image: [batch, patches, CHANNELS]; patches of a square image.
            text: [batch, tokens, TEXT_WIDTH].
            time: [batch], between 0 and 1.
            target: as the image.
        """
        side = int(image.size(1) ** 0.5)
        (output,) = self.transformer(
            hidden_states=image,
            encoder_hidden_states=text,
            timestep=time,
            img_shapes=[[(1, side, side)]] * image.size(0),
            return_dict=False,
        )
        return F.mse_loss(output.float(), target.float())
