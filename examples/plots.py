"""Every plot of `whence.plots`, on data that come with scikit-learn.

pip install 'whence[report,integrations]'
python examples/plots.py out/plots
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, make_moons

import whence
from whence import plots
from whence.sklearn import WhenceClassifier, WhenceRegressor

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "out/plots")
FOLDER.mkdir(parents=True, exist_ok=True)


def picture(name, size, draw):
    figure = Figure(figsize=size, layout="constrained")
    draw(figure.subplots())
    figure.savefig(FOLDER / f"plots-{name}.png", dpi=100, metadata={"Software": None})


def curve():
    """sin(x) / x: noisy labels on the left, few examples on the right."""
    draw = np.random.default_rng(1)
    x = np.r_[draw.uniform(-10, 0, 120), draw.uniform(0, 10, 20)][:, None]
    y = np.sinc(x[:, 0] / np.pi) + np.where(x[:, 0] < -5, 0.25, 0.05) * draw.standard_normal(len(x))
    tracer = WhenceRegressor((50,), ridge=0.1, random_state=0).fit(x, y).tracer_
    grid = torch.linspace(-13, 13, 300, dtype=torch.float64).unsqueeze(1)
    picture("bands", (5, 3.4), lambda ax: plots.bands(grid, tracer.predict(grid), (x, y), ax=ax))
    picture("leverage", (5, 3.4), lambda ax: plots.leverage_residual(tracer, ax=ax))
    data = [(torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1))]
    chosen = whence.fit(tracer.problem.network.model, data, ridge="loo", progress=False)
    picture("ridge", (5, 3.4), lambda ax: plots.ridge_path(chosen.ridge_path, ax=ax))


def moons():
    """Two classes, and where another training set could change the decision."""
    X, y = make_moons(200, noise=0.2, random_state=0)
    tracer = WhenceClassifier((20,), ridge=0.1, random_state=0).fit(X, y).tracer_
    picture("regions", (5, 3.8), lambda ax: plots.decision_regions(tracer, X, y, ax=ax))


def digits():
    """In the training data 3s have random labels, and there is no 9."""
    data, draw = load_digits(), np.random.default_rng(0)
    order = draw.permutation(len(data.target))
    X, y = data.data[order] / 16, data.target[order]
    labels = np.where(y == 3, draw.integers(0, 9, len(y)), y)[:500]
    kept = y[:500] != 9
    model = WhenceClassifier((20,), ridge=1.0, random_state=0, max_iter=300).fit(X[:500][kept], labels[kept])
    test, truth = X[500:1300], y[500:1300]
    u = model.uncertainty(test)
    wrong = model.predict(test) != truth
    kinds = {3: "3: random labels", 9: "9: never shown"}
    groups = [kinds.get(digit, "other digits") for digit in truth]
    tones = {kinds[3]: "noise", kinds[9]: "scarcity"}
    margin = {"margin of the logits": -u.margin}
    picture("ranks", (4.2, 4.4), lambda ax: plots.rank_scatter(u, groups, tones, ax=ax))
    picture("risk", (5, 3.4), lambda ax: plots.risk_coverage(u, wrong, by=("hec3", "ratio"), others=margin, ax=ax))


curve()
moons()
digits()
print(*sorted(path.name for path in FOLDER.glob("plots-*.png")), sep="\n")
