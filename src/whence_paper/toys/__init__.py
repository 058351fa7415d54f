"""The paper's illustrative experiments: sin(x)/x in one dimension, two spirals in two."""
