"""Regression on a table: predictions with standard deviations, and what to do about the uncertain ones.

pip install 'whence[integrations]'
python examples/sklearn_table.py
"""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from whence.sklearn import WhenceRegressor

X, y = load_diabetes(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=0)

model = WhenceRegressor(hidden_layer_sizes=(10,), ridge=10.0, random_state=0).fit(X_train, y_train)
mean, std = model.predict(X_test, return_std=True)
print(f"R2 on the test set {model.score(X_test, y_test):.2f}")
print(f"disease progression of the first patient: {mean[0]:.0f}, known to +-{1.96 * std[0]:.0f} (95 %)\n")

found = model.explain(X_test)
print(found)

print("\nThe labels of these training patients fit the others least:")
print(model.tracer_.suggest(3))
