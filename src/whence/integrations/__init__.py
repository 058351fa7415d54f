"""`whence` inside other libraries' training loops.

Each module needs its library, and is imported by itself:

    from whence.integrations.lightning import WhenceCallback
    from whence.integrations.transformers import fit_trainer
    from whence.integrations import skorch as whence_skorch

The scikit-learn estimators are in `whence.sklearn`.
"""
