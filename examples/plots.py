"""Every plot of `whence.plots`, on data that come with scikit-learn, and on California housing if you have it.

    pip install 'whence[report,integrations]'
    python examples/plots.py out/plots [cal_housing.csv.gz]

The last file has a header and the columns longitude, latitude, age, rooms, bedrooms, population, households, income and
value, one row a district.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from whence import plots
from whence.report import Group
from whence.sklearn import WhenceClassifier, WhenceRegressor

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "out/plots")
HOUSING = sys.argv[2] if len(sys.argv) > 2 else None
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
    kinds = {3: Group("3: random labels", "noise"), 9: Group("9: never shown", "scarcity")}
    groups = [kinds.get(digit, Group("other digits")) for digit in truth]
    margin = {"margin of the logits": -u.margin}
    picture("ranks", (4.2, 4.4), lambda ax: plots.rank_scatter(u, groups, ax=ax))
    picture("risk", (5, 3.4), lambda ax: plots.risk_coverage(u, wrong, by=("hec3", "ratio"), others=margin, ax=ax))
    most = u.ratio.argsort(descending=True)[:16]
    images = 1 - torch.from_numpy(test)[most].reshape(-1, 8, 8)
    names = [f"{ratio:.2f}" for ratio in u.ratio[most].tolist()]
    shown = [groups[place] for place in most.tolist()]
    picture("gallery", (6, 2.3), lambda ax: plots.gallery(images, names, shown, ax=ax))


def districts(path):
    """House prices in California: where labels are noisy, where districts are few."""
    rows = np.loadtxt(path, delimiter=",", skiprows=1)
    lon, lat, age, rooms, bedrooms, people, homes, income, value = rows.T
    logs = np.log(np.c_[rooms / homes, bedrooms / homes, people, people / homes])
    X, y = np.c_[income, age, logs, lat, lon], value / 1e5
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:4000], order[4000:7000]
    model = WhenceRegressor((40,), ridge=1.0, random_state=0, max_iter=200).fit(X[train], y[train])
    u = model.uncertainty(X[test])
    error = y[test] - u.mean[:, 0].numpy()
    print(f"mean absolute error {np.abs(error).mean():.2f} of 100,000 dollars")
    picture("map", (5.2, 5.4), lambda ax: plots.source_map(lon[test], lat[test], u, error, ax=ax))


curve()
digits()
if HOUSING:
    districts(HOUSING)
print(*sorted(path.name for path in FOLDER.glob("plots-*.png")), sep="\n")
