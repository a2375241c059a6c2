"""Accelerate and Lightning train a layer of ours as a plain loop does: the same losses, bit for bit."""

import flash_attention
import pytest
import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(flash_attention.attention(q, k, v, causal=True).flatten(2))


def setup():
    torch.manual_seed(5)
    layer, rows = Layer(), torch.randn(12, 9, 16)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1), rows


def loss_of(layer, rows):
    return (layer(rows) - rows.roll(1, 1)).square().mean()


def plain_losses():
    layer, optimizer, rows = setup()
    losses = []
    for batch in rows.split(4):
        loss = loss_of(layer, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_accelerate():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    layer, optimizer, rows = setup()
    layer, optimizer, batches = accelerator.prepare(layer, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
    losses = []
    for batch in batches:
        loss = loss_of(layer, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == plain_losses()


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    layer, optimizer, rows = setup()
    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def training_step(self, batch, number):
            loss = loss_of(self.layer, batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return optimizer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=4))
    assert losses == plain_losses()
