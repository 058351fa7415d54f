"""A Lightning run that ends with a tracer.

pip install 'whence[integrations]'
python examples/lightning_callback.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from whence.integrations.lightning import WhenceCallback


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2, weight_decay=1e-4)


pl.seed_everything(0, verbose=False)
x = torch.linspace(-3, 3, 200).unsqueeze(1)
y = x.sin() + torch.where(x > 0, 0.5, 0.05) * torch.randn_like(x)  # labels are noisier on the right

module = Regression()
callback = WhenceCallback(progress=False)  # the ridge is what the weight decay amounts to
trainer = pl.Trainer(
    max_epochs=60,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True))

print({name: round(value, 3) for name, value in callback.logged.items()})
module.eval()  # Lightning leaves it in training mode
print(callback.tracer.predict(torch.tensor([[-1.5], [1.5], [-6.0]])))  # quiet, noisy, far from all data
