"""One process, several cards: torch.nn.DataParallel splits each batch over the GPUs of this
machine.

Without GPUs it calls the model itself, so the script runs anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lenet import LeNet, accuracy, digits
from torch import nn
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
bare = LeNet().to(device)
model = nn.DataParallel(bare)

train, test = digits()
loader = DataLoader(train, batch_size=64, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(12):
    model.train()
    for images, targets in loader:
        optimizer.zero_grad()
        # The outputs of all cards come back to the first one, so this is the loss of the whole
        # batch.
        loss = F.nll_loss(model(images.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    if epoch % 4 == 3:
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}")

images = test.tensors[0].to(device)
with torch.no_grad():
    torch.testing.assert_close(model(images), bare(images), rtol=1e-4, atol=1e-4)
reached = accuracy(model, test, device)
print(
    f"{torch.cuda.device_count()} GPUs; accuracy {reached:.3f}; split and whole model give the "
    "same outputs"
)
assert reached > 0.95, reached
