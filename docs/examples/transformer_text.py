"""AdamW: a small GPT on the bytes of a text, two processes, EDEN.

python docs/examples/transformer_text.py [epochs]
"""

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_gradcomp as lgc

CONTEXT, WIDTH = 32, 64


class GPT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        nn.init.normal_(self.tokens.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def training_step(self, text, batch_idx):
        hidden = self.blocks(self.tokens(text[:, :-1]) + self.places, mask=self.mask, is_causal=True)
        logits = hidden @ self.tokens.weight.T  # tied weights
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a text that every Python has
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    monitor = lgc.CommunicationMonitor()
    trainer = L.Trainer(
        strategy=lgc.CompressedDDPStrategy(lgc.EDEN()),  # all gradients in 4 bits, while backward computes
        accelerator="cpu", devices=2, max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 8, callbacks=[monitor],
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(GPT(), DataLoader(windows, 32, shuffle=True))
    if trainer.is_global_zero:
        last = monitor.summary()["last_step"]
        print(f"loss {trainer.callback_metrics['loss']:.2f}, ratio of the last step {last['ratio']:.0f}")
