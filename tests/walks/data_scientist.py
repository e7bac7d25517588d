"""A data scientist's first hour in a notebook: a table, a network, a training, what it has
learnt. The cells begin with `# %%`, as editors know them; allhands[data,report] is installed."""

# %% A table of 178 wines, 13 measurements each, of three growers.
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import TensorDataset, random_split

from allhands import SupervisedRunner, find_learning_rate

wine = load_wine()
x = torch.tensor(wine.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
data = TensorDataset(x, torch.tensor(wine.target))
train, valid = random_split(data, [140, 38], torch.Generator().manual_seed(1))

# %% A network, and which learning rate it wants.
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
job = {
    "model": model,
    "criterion": nn.CrossEntropyLoss(),
    "optimizer": optimizer,
    "datasets": {"batch_size": 16, "train": train, "valid": valid},
}
found = find_learning_rate(**job)
found.plot()

# %% Train, and watch the curves.
runner = SupervisedRunner(device="cpu")
history = runner.train(**job, metrics=["accuracy"], num_epochs=6, logdir="logs/wine", verbose=True)

# %% What was measured, as a table.
history  # noqa: B018

# %% The same as a picture.
history.plot()

# %% A word typed wrongly.
runner.train(**job, metrics=["acuracy"], num_epochs=1)

# %% Further, by two workers.
history = runner.train(**job, metrics=["accuracy"], num_epochs=3, distributed=True, workers=2)
history["valid"]["accuracy"][-1]

# %% How many wines does it take for another grower's?
rows = runner.predict(dataset=valid)
targets = torch.stack([target for _, target in valid])
int((rows.argmax(1) != targets).sum())
