"""Some of the outputs, or the predicted one: the same numbers for fewer backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from classification import ESTIMATORS, PROBLEMS, categorical, inputs

TEST = inputs(6, 11)
STRUCTURES: dict[str, Any] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix-free": whence.Exact(road="matrix_free"),
    "core": whence.Core(size=12),
    "sketch": whence.Sketch(size=12),
    "ekfac": "ekfac",
    "ekfac, two bases": whence.EKFAC(meat="two_bases"),
    "kfac": "kfac",
    "diagonal": "diagonal",
}


@pytest.fixture(scope="module", params=list(STRUCTURES))
def tracer(request: pytest.FixtureRequest) -> whence.Tracer:
    return categorical(4).fit(structure=STRUCTURES[request.param])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10 * float(wanted.abs().max()))


@pytest.mark.parametrize("some", [[2], [3, 0], [0, 1, 2, 3], torch.tensor([1, 2]), (1, 1)])
def test_some_outputs_are_those_of_all(tracer: whence.Tracer, some: Any) -> None:
    every, found = tracer.predict(TEST, covariance=True), tracer.predict(TEST, outputs=some)
    assert_close(found.mean, every.mean[:, some])
    assert_close(found.probabilities, every.probabilities[:, some])
    for name in ESTIMATORS:
        assert_close(found.variance(name), every.variance(name)[:, some])
        assert_close(found.covariance(name), every.covariance(name)[:, some][:, :, some])
        assert_close(found.trace(name), every.variance(name)[:, some].sum(1))
    assert found.chosen is not None
    assert (found.chosen.index == torch.as_tensor(some)).all()


def test_the_predicted_class(tracer: whence.Tracer) -> None:
    every, found = tracer.predict(TEST, covariance=True), tracer.predict(TEST, outputs="predicted")
    at = every.mean.argmax(1, keepdim=True)
    assert_close(found.mean, every.mean.gather(1, at))
    assert_close(found.probabilities, every.probabilities.gather(1, at))
    for name in ESTIMATORS:
        assert_close(found.variance(name), every.variance(name).gather(1, at))
    assert_close(found.ratio, (every.hec3 / every.ho).gather(1, at).squeeze(1))


def test_batches_are_joined_and_a_loader_is_read_again(tracer: whence.Tracer) -> None:
    whole, parts = (tracer.predict(x, outputs="predicted") for x in (TEST, [TEST[:4], TEST[4:]]))
    assert_close(parts.hec3, whole.hec3)
    assert_close(parts.covariance("ho"), whole.covariance("ho"))
    assert_close(parts.mean, whole.mean)


def test_recentered_means_of_some_outputs() -> None:
    tracer = categorical(3).fit(recenter=True)
    assert_close(tracer.predict(TEST, outputs=[1]).mean, tracer.predict(TEST).mean[:, [1]])


def test_squared_error_and_yes_or_no() -> None:
    yes = PROBLEMS["three logits"].fit()
    assert_close(yes.predict(TEST, outputs=[2]).hec3, yes.predict(TEST).hec3[:, [2]])
    net = nn.Linear(3, 2, dtype=torch.float64)
    x = inputs()
    squared = whence.fit(net, [(x, x[:, :2])], ridge=0.1, progress=False)
    assert_close(squared.predict(TEST, outputs=[1]).ho, squared.predict(TEST).ho[:, [1]])
    for one in (yes, squared):
        with pytest.raises(whence.errors.InputError, match=r'one class for each example for outputs="predicted"'):
            one.predict(TEST, outputs="predicted")


def test_many_outputs_come_in_pieces() -> None:
    """More outputs than are computed together."""
    torch.manual_seed(0)
    net = nn.Linear(3, 70, dtype=torch.float64)
    x = inputs()
    y = torch.arange(len(x)) % 70
    tracer = whence.fit(net, [(x, y)], "categorical", "diagonal", ridge=0.3, hessian_columns="all", progress=False)
    found = tracer.predict(TEST, outputs=list(range(70)))
    assert_close(found.hec3, tracer.predict(TEST).hec3)
    with pytest.raises(whence.errors.InputError, match="expected at most 64 outputs"):
        found.covariance("hec3")


@pytest.mark.parametrize("wrong", ["best", [], ["a"], 1, 0, -3, 2.5, True, [True], {"a": 1}, torch.ones(2, 2)])
def test_outputs_that_cannot_be_chosen(wrong: Any) -> None:
    with pytest.raises(whence.errors.InputError, match="expected outputs to be"):
        categorical(3).fit().predict(TEST, outputs=wrong)


def test_outputs_that_are_not_there() -> None:
    with pytest.raises(whence.errors.InputError, match="between 0 and 2, got 3"):
        categorical(3).fit().predict(TEST, outputs=[0, 3])


def test_what_needs_all_outputs_says_so() -> None:
    tracer = categorical(3).fit()
    some = tracer.predict(TEST, outputs=[0])
    for ask in (lambda u: u.probability_covariance(), lambda u: u.margin, lambda u: u.margin_variance()):
        with pytest.raises(whence.errors.InputError, match=r'expected all outputs for .* outputs="all"'):
            ask(some)
    with pytest.raises(whence.errors.InputError, match="expected one of"):
        some.trace("hc3")


def test_tables() -> None:
    tracer = categorical(3).fit()
    some = tracer.predict(TEST, outputs=[2, 0]).to_frame()
    assert {"output_0", "output_1", "logit_1", "probability_0", "hec3", "hec3_1", "ratio"} <= set(some.columns)
    assert some["output_0"].tolist() == [2] * 6
    one = tracer.predict(TEST, outputs="predicted").to_frame()
    assert {"output", "logit", "probability", "hec3", "ratio"} <= set(one.columns)
    assert "6 predictions, 1 output;" in repr(tracer.predict(TEST, outputs="predicted"))
