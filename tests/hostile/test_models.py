"""Models that are not ready, not deterministic, or return something else than one row an example."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import Breaking, Wrapped, batches, fit, inputs_and_targets, mlp


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Dropout(0.5), "1"),
        (nn.AlphaDropout(0.1), "1"),
        (nn.BatchNorm1d(3), "1"),
        (nn.Sequential(nn.Identity(), nn.Dropout1d(0.2)), r"1\.1"),
    ],
)
def test_training_mode(layer: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 2)).double().train()
    message = (
        rf"evaluation mode, got training mode with dropout or batch normalisation in: {name}\. Call model\.eval\(\)"
    )
    with pytest.raises(whence.NotDeterministicError, match=message):
        fit(model, batches())


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 3, num_layers=2, dropout=0.3),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.InstanceNorm1d(3, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_in_training_mode(layer: nn.Module) -> None:
    with pytest.raises(whence.NotDeterministicError, match=f"in: {type(layer).__name__}"):
        fit(layer.train(), batches())


def test_training_mode_without_consequences_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.LayerNorm(4), nn.Linear(4, 2)).double().train()
    x, _ = inputs_and_targets()
    assert fit(model, batches()).predict(x).hec3.shape == (8, 2)


def test_batch_norm_without_running_statistics() -> None:
    model = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)).double().eval()
    )
    with pytest.raises(
        whence.NotDeterministicError, match=r"batch normalisation without running statistics in: 1\. Use track"
    ):
        fit(model, batches())


def test_training_mode_set_between_fit_and_predict() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double().eval()
    tracer = fit(model, batches())
    model.train()
    with pytest.raises(whence.NotDeterministicError, match="got training mode with dropout"):
        tracer.predict(inputs_and_targets()[0])


class Noisy(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0.01 * torch.randn(len(x), 1, device=x.device)


class Remembering(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * self.calls


@pytest.mark.parametrize("kind", [Noisy, Remembering])
def test_outputs_that_change_between_calls(kind: type[nn.Module]) -> None:
    message = (
        r"same outputs from two calls on batch 0, got a difference of [\d.]+. The model draws random numbers or keeps"
    )
    with pytest.raises(whence.NotDeterministicError, match=message):
        fit(kind().eval(), batches())


def test_rounding_that_changes_between_calls_is_noted() -> None:
    """On a GPU some sums are taken in random order."""

    class Rounding(Wrapped):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x) * (1 + 1e-15 * (self.calls % 2))

    tracer = fit(Rounding(), batches())
    assert "two calls of the model on the same batch differ by" in str(tracer.diagnostics)
    assert "differ by" not in str(fit(mlp(), batches()).diagnostics)


class Centring(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        return outputs - 1e-3 * outputs.mean(0)


class AttentionAcross(nn.Module):
    """Examples first, but attention over the first axis: the classic slip of `batch_first`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def test_examples_that_mix() -> None:
    message = r"each example's outputs to be its own, got other outputs for example \d of batch 0 when it comes alone"
    with pytest.raises(whence.NotDeterministicError, match=message):
        fit(Centring(), batches())
    tokens = torch.randn(8, 5, 4, dtype=torch.float64)
    with pytest.raises(whence.NotDeterministicError, match="batch_first=False in attention"):
        fit(AttentionAcross().double().eval(), [(tokens, inputs_and_targets()[1])])


class Padded(nn.Module):
    """Classes of words or of texts, with padding: outside of training, torch writes zeros there and skips work."""

    def __init__(self, words: bool) -> None:
        super().__init__()
        self.words, self.table = words, nn.Embedding(9, 4, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.encoder(self.table(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden if self.words else hidden.mean(1))


@pytest.mark.parametrize("words", [False, True])
def test_padding_of_transformers_is_that_of_training(words: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 9, (12, 4))
    ids[::2, 2:] = 0
    labels = torch.randint(0, 3, (12, 4)).masked_fill(ids == 0, -100) if words else torch.arange(12) % 3
    model = Padded(words).double().eval()
    tracer = fit(model, [(ids, labels)], likelihood="categorical", structure="ekfac")
    trained = model.train()(ids).detach()
    model.eval()
    torch.testing.assert_close(tracer.predict(ids).mean.reshape(trained.shape), trained, rtol=1e-9, atol=1e-9)
    assert words or len(tracer.explain(ids)) == 12


RETURNS: dict[str, tuple[Any, str]] = {
    "tuple": (lambda out: (out, out), "a tensor, or something with `logits`, got tuple in batch 0. Wrap the model"),
    "dict": (lambda out: {"prediction": out}, "got dict in batch 0"),
    "none": (lambda out: None, "got NoneType in batch 0"),
    "object": (lambda out: SimpleNamespace(scores=out), "got SimpleNamespace in batch 0"),
    "three axes": (
        lambda out: out.unsqueeze(1),
        r"targets of shape \(3, 1\), one for each position, or \(3, 1, 2\), .* got \(3, 2\) in batch 0",
    ),
    "no axes": (lambda out: out.sum(), r"shape \(3, k\), one row for each of the 3 examples, got \(1,\) in batch 0"),
    "other rows": (lambda out: out.repeat(2, 1), r"got \(6, 2\) in batch 0. Wrap the model"),
    "decisions": (
        lambda out: out.argmax(1),
        "floating-point outputs, got torch.int64 in batch 0. Return what the loss",
    ),
    "complex": (lambda out: out.to(torch.complex128), "floating-point outputs, got torch.complex128 in batch 0"),
}


class Returning(Wrapped):
    def __init__(self, turn: Any) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: Tensor) -> Any:
        return self.turn(self.net(x))


@pytest.mark.parametrize("kind", RETURNS)
def test_models_that_return_something_else(kind: str) -> None:
    turn, message = RETURNS[kind]
    with pytest.raises((whence.ShapeError, whence.InputError), match=message):
        fit(Returning(turn), batches())


@pytest.mark.parametrize(
    "turn",
    [
        lambda out: {"logits": out, "loss": None},
        lambda out: OrderedDict(logits=out),
        lambda out: SimpleNamespace(logits=out),
    ],
    ids=["dict", "ordered", "object"],
)
def test_logits_are_found(turn: Any) -> None:
    x, _ = inputs_and_targets()
    torch.testing.assert_close(fit(Returning(turn), batches()).predict(x).hec3, fit(mlp(), batches()).predict(x).hec3)


def test_another_number_of_outputs_in_a_later_batch() -> None:
    class Widening(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            outputs = self.net(x)
            return outputs if len(x) != 2 else torch.cat([outputs, outputs], 1)

    with pytest.raises(
        whence.ShapeError, match=r"expected 2 outputs as in batch 0, got 4 outputs in batch 2\. Wrap the model"
    ):
        fit(Widening(), batches())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients(guard: Any) -> None:
    class Cut(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            with guard():
                return self.net(x)

    message = (
        r"outputs that depend on the selected parameters, got none of the 4 connected to them\. Look for torch\.no_grad"
    )
    with pytest.raises(whence.UncapturedParameterError, match=message):
        fit(Cut(), batches())


def test_selected_parameters_that_are_not_used_are_noted() -> None:
    model = Wrapped()
    model.spare = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    tracer = fit(model, batches())
    assert "the outputs of the first examples do not depend on spare" in str(tracer.diagnostics)


@pytest.mark.parametrize("model", [None, "net.pt", lambda x: x, nn.Linear], ids=["none", "path", "function", "class"])
def test_no_model(model: Any) -> None:
    with pytest.raises(whence.InputError, match=r"expected a torch\.nn\.Module, or fitted trees .*, got \w+"):
        fit(model, batches())


def test_weights_that_are_not_there() -> None:
    with pytest.raises(
        whence.InputError, match=r"initialised weights, got the lazy parameter weight.*Call the model once"
    ):
        fit(nn.LazyLinear(2).eval(), batches())
    with pytest.raises(whence.InputError, match="expected all weights on one device, got cpu, meta"):
        fit(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta")), batches())
    with torch.inference_mode():
        made = nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(whence.InputError, match=r"got weight made under torch\.inference_mode\(\)\. Build or load"):
        fit(made, batches())


def test_an_error_of_the_models_own_kind_comes_through() -> None:
    class OutOfPatienceError(Exception):
        pass

    with pytest.raises(OutOfPatienceError):
        fit(Breaking(3, OutOfPatienceError()), batches())


class Norm(Wrapped):
    """The square root has no slope at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + (self.net[2].bias * x.clamp_min(0.0)[:, :2]).square().sum(1, keepdim=True).sqrt()


@pytest.mark.parametrize("road", ["primal", "dual", "matrix_free"])
def test_gradients_that_are_not_finite(road: Any) -> None:
    x, y = inputs_and_targets()
    x[5, :2] = -1.0
    x[:5, 0], x[6:, 0] = 1.0, 1.0
    message = (
        r"finite gradients of the outputs in the weights, got NaN or infinity for training example 5\. Look for a sq"
    )
    with pytest.raises(whence.SingularCurvatureError, match=message):
        fit(Norm(), [(x[:4], y[:4]), (x[4:], y[4:])], structure=whence.Exact(road=road))


@pytest.mark.parametrize("structure", [whence.Exact("primal"), whence.Exact("dual"), "core", "ekfac"], ids=str)
def test_a_prediction_without_a_gradient_is_not_a_number_and_spoils_no_other(structure: Any) -> None:
    x, y = inputs_and_targets()
    x[:, 0] = 1.0
    tracer = fit(Norm(), [(x, y)], structure=structure)
    expected = tracer.predict(x)
    bad = x.clone()
    bad[5, :2] = -1.0
    found = tracer.predict(bad)
    assert torch.isnan(found.hec3[5]).all()
    assert torch.isnan(found.ratio[5])
    others = [0, 1, 2, 3, 4, 6, 7]
    torch.testing.assert_close(found.hec3[others], expected.hec3[others])
    some = tracer.predict(bad, outputs=[1]).hec3
    assert torch.isnan(some[5]).all()
    torch.testing.assert_close(some[others], expected.hec3[others, 1:])


@pytest.mark.parametrize("structure", [whence.Exact("primal"), whence.Exact("dual"), "core", "ekfac"], ids=str)
def test_tracing_a_prediction_without_a_gradient_says_so(structure: Any) -> None:
    x, y = inputs_and_targets()
    x[:, 0] = 1.0
    tracer = fit(Norm(), [(x, y)], structure=structure)
    x = x.clone()
    x[5, :2] = -1.0
    for trace in (tracer.attribute, tracer.explain):
        with pytest.raises(whence.InputError, match=r"for 1 of \d+ inputs of a batch, first for number 5"):
            trace(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.* is deprecated")
def test_a_module_compiled_by_jit() -> None:
    x, y = inputs_and_targets()
    model = torch.jit.trace(mlp(), x)
    with pytest.raises(whence.InputError, match=r"one compiled by torch\.jit.*Pass the module it was made from"):
        fit(model, [(x, y)])
