"""A net trained by skorch, and which of its predictions to doubt.

pip install 'whence[integrations]'
python examples/skorch_net.py
"""

import numpy as np
import torch
from sklearn.datasets import load_iris
from skorch import NeuralNetClassifier
from torch import nn

from whence.integrations import skorch as whence_skorch

X, y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)

torch.manual_seed(0)
net = NeuralNetClassifier(
    nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3)),
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    optimizer__weight_decay=1e-3,
    lr=0.02,
    max_epochs=60,
    verbose=0,
)
net.fit(X, y)

tracer = whence_skorch.fit(net, X, y, progress=False)
odd = np.array([X[0], X[70], [6.0, -6.0, 6.0, -6.0]], dtype=np.float32)  # an iris, one at the border, no iris
print(tracer.explain(whence_skorch.loader(net, odd)))
