"""A fitted network: predictions with their variances, the training examples behind them, and what to do about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whence import report as reports
from whence.curvature import RidgePath
from whence.curvature.accumulate import working_precision
from whence.data.batches import Inputs, batch_size, check_finite, combine
from whence.data.targets import diagonal_blocks
from whence.display import Table, count
from whence.errors import InputError, ShapeError
from whence.influence import Attribution, Calibration, Explanation, WhatIf
from whence.influence.attribution import Positions, attribute, attribute_loss, attribute_positions
from whence.influence.explanation import explain
from whence.influence.fitted import (
    Fitted,
    check_count,
    check_level,
    check_same,
    check_ungrouped,
    check_variances,
    for_each_batch,
    join_batches,
    read_numbers,
    using_model,
)
from whence.influence.suggest import Suggestion, label_first
from whence.influence.training import label_suspicion, suspicion_over_copies, training_frame
from whence.influence.what_if import apply, prepare, read_change
from whence.io import save
from whence.jacobian.functionals import SelectedOutputs
from whence.results import MAX_OUTPUTS, ChosenOutputs, Uncertainty, join, without_padding
from whence.trust import Trust, assess

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Tracer(Fitted):
    """A trained network with its curvature and the weights of its training examples. Made by `whence.fit`.

    `predict` returns variances. The other methods trace them to training examples and say what to do.
    """

    @property
    def ridge(self) -> float:
        """Lambda, on the sum scale."""
        return self.bread.ridge

    @property
    def ridge_path(self) -> RidgePath | None:
        """The leave-one-out error for each ridge tried, if the ridge was chosen by it."""
        return self.bread.path

    def predict(
        self,
        x: Any,
        *,
        covariance: bool | None = None,
        outputs: Literal["all", "predicted"] | Sequence[int] | None = None,
    ) -> Uncertainty:
        """Predict with variances, for one batch or for all batches of a loader.

        Args:
            x: a batch as in training (a tensor, a tuple of positional inputs, a dict of keyword inputs), or a loader
                or list of batches. Targets that come with the inputs are ignored.
            covariance: compute covariances between outputs now, or only when they are used. By default now if that
                costs little. If computed later, the inputs are read again, and must not have changed.
            outputs: which outputs to use, since each costs a backward pass: "all"; "predicted", only that of the
                predicted class; or a list of positions. By default all, or the predicted class if the fit itself did
                not use all outputs.
        """
        choice = self._output_choice(outputs)
        at_once = bool(covariance) or not self.sandwich.variances_alone or (choice is None and self.problem.k == 1)

        def predict_batch(inputs: Inputs, where: str) -> Uncertainty:
            if choice is None:
                found = self._all_outputs(inputs, where, at_once)
            else:
                found = self._chosen_outputs(inputs, where, choice, at_once)
            check_variances(self.problem, {**found.variances, **found.covariances}, where, inputs)
            return without_padding(found, inputs) if isinstance(inputs, Mapping) else found

        parts = for_each_batch(self, x, predict_batch, plain=choice is not None)
        found = parts[0] if len(parts) == 1 else join(parts)

        def covariances() -> Mapping[str, Tensor]:
            again = self.predict(x, covariance=True, outputs=outputs)
            rounding = 10 * torch.finfo(working_precision(self.problem)).eps ** 0.5
            advice = ", or compute covariances at once, with covariance=True"
            check_same(found.mean, again.mean, self.problem.network.repeated_tolerance, advice)
            for name, variance in found.variances.items():
                check_same(variance, again.variance(name), rounding, advice)
            return again.covariances

        few = choice is None or found.mean.shape[-1] <= MAX_OUTPUTS
        later = not (at_once or isinstance(x, Iterator)) and few
        return replace(found, later=covariances if later else None)

    def _output_choice(self, outputs: Any) -> Any:
        """The outputs to predict; `None` for all of them if no functionals of the outputs are needed."""
        likelihood = self.problem.likelihood
        if self.problem.sketch is not None and outputs is None:
            return "predicted" if likelihood.has_classes and likelihood.couples_outputs else "all"
        every = outputs is None or (isinstance(outputs, str) and outputs == "all")
        return (None if self.all_outputs else "all") if every else outputs

    def _all_outputs(self, inputs: Inputs, where: str, full: bool) -> Uncertainty:
        """Covariances of all outputs of a batch, or only their variances."""
        try:
            outputs, found = self._variances(inputs, full)
        except (InputError, ShapeError) as error:
            raise type(error)(f"{error} This was {where}.") from error.__cause__
        return self._uncertainty(self._mean(outputs, inputs, where), found, full)

    def _uncertainty(self, mean: Tensor, found: dict[str, Tensor], full: bool, **chosen: Any) -> Uncertainty:
        likelihood = self.problem.likelihood
        return Uncertainty(mean, found if full else {}, {} if full else found, likelihood=likelihood, **chosen)

    def _shaped_outputs(self, inputs: Inputs, where: str) -> Tensor:
        """(m, ..., k) outputs with their positions."""
        problem = self.problem
        with torch.no_grad():
            shaped = problem.network.shaped(inputs, where).to(problem.dtype)
        if shaped.shape[-1] != problem.width or (shaped.ndim > 2) != problem.dense:
            positions = "positions, " if problem.dense else ""
            raise ShapeError(
                f"expected outputs of shape (n, {positions}{problem.width}) as in training, got {tuple(shaped.shape)} "
                f"in {where}."
            )
        return self._mean(shaped.flatten(1), inputs, where).reshape(shaped.shape)

    def _chosen_outputs(self, inputs: Inputs, where: str, choice: Any, covariance: bool) -> Uncertainty:
        """Variances of some outputs of a batch, at every position."""
        likelihood, outputs = self.problem.likelihood, self._shaped_outputs(inputs, where)
        *shape, k = outputs.shape
        flat, every = outputs.reshape(-1, k), isinstance(choice, str) and choice == "all"
        if isinstance(choice, str) and choice == "predicted":
            index = likelihood.predicted(flat).unsqueeze(1)
        else:
            listed = range(k) if every else read_numbers(choice, 'outputs to be "all", "predicted"', 0, k - 1)
            index = torch.tensor(list(listed), device=flat.device).expand(len(flat), -1)
        c = index.shape[1]
        full = covariance and c <= MAX_OUTPUTS
        found = self._variances_at(inputs, index.reshape(shape[0], -1, c), k, full)
        found = {name: value.reshape(*shape, *value.shape[2:]) for name, value in found.items()}
        index, chosen = index.reshape(*shape, c), None
        if not every:
            p = likelihood.probabilities(flat).reshape(outputs.shape) if likelihood.has_classes else None
            chosen = ChosenOutputs(index, None if p is None else p.gather(-1, index))
        return self._uncertainty(outputs.gather(-1, index), found, full, chosen=chosen)

    def _variances_at(self, inputs: Inputs, index: Tensor, k: int, full: bool) -> dict[str, Tensor]:
        """Covariances (m, t, c, c) of outputs (m, t, c) at t positions, or variances (m, t, c)."""
        _, t, c = index.shape
        places = (index + k * torch.arange(t, device=index.device).reshape(1, t, 1)).flatten(1)
        most = MAX_OUTPUTS // c * c if full else MAX_OUTPUTS  # covariances of whole positions
        parts = [self._variances(SelectedOutputs(inputs, some), full)[1] for some in places.split(most, dim=1)]
        if full:
            blocks = [{n: diagonal_blocks(one, one.shape[1] // c) for n, one in part.items()} for part in parts]
            return combine(blocks, partial(torch.cat, dim=1))
        return combine(parts, lambda values: torch.cat(values, dim=1).reshape(index.shape))

    def _variances(self, inputs: Inputs, full: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs (m, k), or functionals of them, and their covariances (m, k, k), or only their variances (m, k)."""
        if not full and self.sandwich.variances_alone:
            outputs, found = self.sandwich.variances(inputs)
            return outputs, self._all_estimators(found, None)
        predicted = self.sandwich.predict(inputs)
        found = self._all_estimators(predicted.covariances, predicted.shift)
        if not full:
            found = {name: value.diagonal(dim1=1, dim2=2) for name, value in found.items()}
        return predicted.outputs, found

    def _mean(self, outputs: Tensor, inputs: Inputs, where: str) -> Tensor:
        problem = self.problem
        check_finite(outputs, "outputs of the model", where)
        if not problem.dense and problem.sketch is None and outputs.shape[1] != problem.k:
            raise ShapeError(f"expected {problem.k} outputs as in training, got {outputs.shape[1]} in {where}.")
        if not self.loo.recenter:
            return outputs.clone()  # a model may return the same tensor again
        assert self.step.direction is not None
        return outputs + problem.jacobian().jvp(inputs, self.step.direction.unsqueeze(0))[0]

    def _all_estimators(self, found: dict[str, Tensor], shift: Tensor | None) -> dict[str, Tensor]:
        """Add the estimators that follow from others, for covariances or variances.

        The shift (m, k) is sum_i a_i u_i, which centres the jackknife; `None` if the jackknife is already there.
        """
        n = self.meats.deletions
        finished = {**found, "hec1": found["hec0"] * self.hc1_factor, "laplace": found["laplace"] * self.noise_scale}
        if shift is not None:
            centre = shift.unsqueeze(2) * shift.unsqueeze(1) / n
            finished["jackknife"] = (found["hec3"] - centre) * ((n - 1) / n)
        return finished

    def __repr__(self) -> str:
        p = self.problem
        noise = float(self.sigma.diagonal().mean().sqrt())
        return (
            f"{type(self).__name__}({count(p.n, 'training example')}, {count(p.width, 'output')}, "
            f"{count(p.selection.size, 'parameter')}; "
            f"{p.likelihood.name}, ridge {self.ridge:.4g}, noise {noise:.3g}, "
            f"degrees of freedom {self.degrees_of_freedom:.4g})"
        )

    def _table(self) -> Table:
        return self.diagnostics.table(repr(self))

    def attribute(
        self, x: Any, top: int = 10, *, matrix: bool = False, positions: Positions | None = None, loss: bool = False
    ) -> Attribution:
        """Find the training examples that carry the variance of each prediction.

        HeC3 and Ho are sums over training examples, so each term is that example's share. The cost is about one
        forward and k backward passes over the training set for every group of predictions that fits in memory, and at
        most about one forward pass per prediction.

        Args:
            x: as for `predict`.
            top: how many examples to list for each prediction.
            matrix: also keep the shares of all training examples, m x n for each estimator.
            positions: for a network with outputs at several positions, such as tokens. "each", or a list such as
                [0, -1], makes the predicted class at each of them a prediction of its own. They are ordered by input,
                and `where` holds the input and position of each. By default the positions of an input are taken
                together.
            loss: attribute the loss of each input, to first order, instead of its prediction. `x` then needs targets,
                as in training. A negative `pull` means that the example lowers this loss: for the answer of a language
                model, that it makes the answer more likely.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> found = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1).attribute(x[:3], top=2)
            >>> found.hec3.index.shape, found.hec3.share.shape
            (torch.Size([3, 2]), torch.Size([3, 2]))
        """
        check_count(top, "top")
        check_ungrouped(self)
        if loss and positions is not None:
            raise InputError("expected positions or loss=True, got both. Give targets of -100 to all other positions.")
        if loss:
            return attribute_loss(self, x, top, matrix)
        if positions is not None:
            return attribute_positions(self, x, top, matrix, positions)
        return join_batches(for_each_batch(self, x, lambda inputs, where: attribute(self, inputs, top, matrix)))

    def explain(
        self,
        x: Any,
        level: float = 0.95,
        top: int = 5,
        examples: Sequence[int] | Tensor | None = None,
        pool: Any = None,
    ) -> Explanation:
        """Say for each prediction whether to trust it, and if not, whether labels or data are the cause.

        Two numbers decide, noise and scarcity, which mean the same for every loss and structure; see `Explanation`. The
        first call costs a forward pass over the training examples that inputs are compared with: all of them, or 5,000,
        evenly spaced (2,000 for trees). Each call costs about one to four times `predict`.

        Args:
            x: as for `predict`.
            level: one minus the share of ordinary predictions that may be called noisy, or scarce, by chance.
            top: how many training examples to name for each prediction, among those that inputs are compared with.
            examples: (m,) for inputs that are training examples, their number; -1 for other inputs. They are then
                not compared with themselves, and their ambiguity is that of the fit without them.
            pool: inputs without labels, as for `predict`, of the kind that the model meets in use, at least 20; `x`
                itself if it is many such inputs. A class that was never shown may look like a known one. A pool tells
                them apart: such inputs are frequent there and rare in training. Each call costs a forward pass over the
                pool, and comparing up to 5,000 of it with those training examples.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> tracer = whence.fit(net, [(x, 2 * x + (99 * x).sin())], ridge=0.1, recenter=True)
            >>> tracer.explain(torch.tensor([[0.0], [30.0]], dtype=torch.float64)).verdicts
            ('confident', 'scarce data')
        """
        check_level(level)
        check_count(top, "top", least=0)
        check_ungrouped(self)
        own = None if examples is None else torch.as_tensor(examples, device=self.problem.device)
        if own is not None and not bool(((own >= -1) & (own < self.problem.n)).all()):
            raise InputError(f"expected numbers of training examples, -1 to {self.problem.n - 1}, in `examples`.")
        if pool is x and isinstance(x, Iterator):
            x = pool = list(x)  # it can be read only once
        calibration, seen = self._calibration, 0
        if pool is not None:
            near = calibration.neighbours
            vectors = for_each_batch(
                self, pool, lambda inputs, where: near.vectors(self, inputs), plain=True, what="of the pool"
            )
            calibration = calibration.beside_pool(torch.cat(vectors))

        def explain_batch(inputs: Inputs, where: str) -> Explanation:
            nonlocal seen
            here = slice(seen, seen + batch_size(inputs, where))
            if own is not None and len(own) < here.stop:
                raise ShapeError(f"expected `examples` for each of {here.stop} inputs or more, got {len(own)}.")
            found = explain(self, inputs, calibration, float(level), top, None if own is None else own[here])
            seen = here.stop
            return found

        found = join_batches(for_each_batch(self, x, explain_batch))
        if own is not None and len(own) != len(found):
            raise ShapeError(f"expected `examples` for each of {len(found)} inputs, got {len(own)}.")
        return found

    @cached_property
    def _calibration(self) -> Calibration:
        """Reference values for explanations; the first use takes two forward passes over training examples."""
        with using_model(self):
            return Calibration.of(self)

    def what_if(
        self,
        x: Any,
        *,
        remove: Sequence[int] = (),
        repeat: Sequence[int] = (),
        relabel: Mapping[int, Any] | None = None,
    ) -> WhatIf:
        """Compute how predictions and their variances would change with another training set, without retraining.

        Exact for the linearized model and squared error. For other losses the changed examples keep their true loss,
        and all others take one Newton step. Examples are given by their position in the training set.

        Args:
            x: as for `predict`.
            remove: examples to leave out.
            repeat: examples to count once more; list one twice to count it twice more.
            relabel: new targets, by example.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
            >>> tracer.what_if(x[:3], remove=[0, 5], relabel={7: [1.0]}).change.shape
            torch.Size([3, 1])
        """
        check_ungrouped(self)
        counts, targets = read_change(self, remove, repeat, relabel or {})
        with using_model(self):
            change = prepare(self, counts, targets)
        problem = self.problem

        def apply_to(inputs: Inputs, where: str) -> WhatIf:
            found = apply(self, inputs, change)
            if problem.sketch is not None or problem.dense:
                return found
            return replace(found, mean=self._shaped_outputs(inputs, where), likelihood=problem.likelihood)

        return join_batches(for_each_batch(self, x, apply_to))

    def suggest(
        self,
        budget: int = 100,
        pool: Any = None,
        *,
        augment: Callable[[Any], Any] | None = None,
        copies: int = 8,
    ) -> Suggestion:
        """Suggest what to do next: labels to check first, or inputs to label first.

        Args:
            budget: how many to suggest.
            pool: inputs without labels, as for `predict`. Those whose labels would reduce the total variance of the
                pool most are chosen one after the other, so that copies are not chosen twice. Without a pool, training
                examples are listed by how doubtful their labels are.
            augment: maps the inputs of a training batch to randomly changed ones, as in training. Labels to check are
                then judged by several copies of each input, which finds more wrong ones. For classes only.
            copies: how many copies.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
            >>> tracer.suggest(1, pool=torch.tensor([[0.0], [9.0], [1.0]], dtype=torch.float64)).index
            tensor([1])
        """
        check_count(budget, "budget", " Pass inputs to choose from by name: suggest(100, pool=x).")
        if pool is None:
            check_ungrouped(self)
            check_count(copies, "copies")
            found = label_suspicion(self) if augment is None else suspicion_over_copies(self, augment, copies)
            index = found.order[:budget]
            return Suggestion(index, found.score[index], found.score.new_zeros(0), "labels to check")
        if augment is not None:
            raise InputError("augment is for labels to check; inputs of a pool have none. Leave out pool or augment.")
        batches = for_each_batch(self, pool, lambda inputs, where: inputs)
        with using_model(self):
            return label_first(self, batches, budget)

    def trust(
        self, x: Any = None, sample: int = 16, seed: int = 0, *, tolerance: float = 0.02, seconds: float = 60.0
    ) -> Trust:
        """Check how far to trust this fit: structure, optimum, linearization, each with a plain sentence.

        For a sample of predictions, systems with the exact curvature are solved matrix-free; a solve costs some tens of
        times as much as the training gradients. Variances along one random mixture of each prediction's outputs are
        compared with those of the fit.

        Args:
            x: inputs to check, as for `predict`; by default training inputs.
            sample: how many of them to draw at random.
            seed: seed of the sample.
            tolerance: relative residual at which exact solves stop; the relative error of variances is then similar.
            seconds: time limit of the solves. If they stop early, the checks say so.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> tracer = whence.fit(net, [(x, 2 * x + (99 * x).sin())], ridge=0.1, recenter=True)
            >>> tracer.trust(sample=4)["linearization"].level
            'fine'
        """
        check_count(sample, "sample")
        return assess(self, x, sample, seed, tolerance, seconds)

    def training_frame(self, test: Any = None) -> pandas.DataFrame:
        """Return one row for each training example, to find which of them matter and which labels to doubt.

        Columns: `leverage` (trace of the hat block), `residual` and `loo_residual` (norms), `cook` (Cook's distance
        u^T Q u / (dof s^2): how far the fit moves without the example), `suspicion` (how badly the label fits the other
        examples: the size of the studentized residual, (e^T u / s^2)^1/2, for squared error; 1 - p of the label in the
        prediction without the example for classes) and `suspect_rank` (1 for the most doubtful label: by `suspicion`,
        or, for classes that the network has not memorised, by its own loss). Rows are in the order of the training
        data.

        `label` is the label itself, and `suggested` what the fit without the example predicts instead: the most
        probable class with its `suggested_probability`, or a number with the standard deviation `suggested_std` of an
        observation around it. Classes are numbered from 0; those of trees have their names. Several outputs have
        columns `label_0`, `label_1`, ... There are none for a custom loss, and for outputs at several positions.

        `test` adds `test_influence`, the root mean square over its predictions of |f(x) - f_(-i)(x)|, and `test_share`,
        the example's share of their HeC3.

        Args:
            test: inputs as for `predict`, on whose predictions the influence is measured.

        Examples:
            >>> import torch, whence
            >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
            >>> y = (2 * x).index_add(0, torch.tensor([7]), torch.ones(1, 1, dtype=torch.float64))  # one label is off
            >>> tracer = whence.fit(torch.nn.Linear(1, 1).double(), [(x, y)], ridge=0.1, recenter=True, progress=False)
            >>> first = tracer.training_frame().sort_values("suspect_rank").iloc[0]
            >>> print(first.name, round(first.label, 2), round(first.suggested, 2))
            7 0.47 -0.52
        """
        check_ungrouped(self)
        return training_frame(self, test)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit to one file, which `whence.load` reads. The name may have any ending, such as `.whence`.

        The file holds only numbers and words, in the safetensors format: no model, no training data, no code. It
        replaces an older file only once all of it is on disk. Your own likelihood is not saved: pass it to
        `whence.load` again. Your own structure cannot be saved.
        """
        save(self, Path(path))

    def report(
        self,
        path: str | Path,
        test: Any,
        *,
        names: Sequence[str] | None = None,
        images: Any = None,
        texts: Any = None,
        table: Any = None,
        **options: Any,
    ) -> Path:
        """Write an HTML file that says which predictions are uncertain, why, and what to do about it.

        It needs no network and no other file. `docs/report.md` shows its contents.

        Args:
            path: the file to write.
            test: inputs as for `predict`. With targets, as (inputs, targets) or a loader of such pairs, the report also
                marks right and wrong predictions and draws calibration and risk-coverage curves.
            names: names of the classes, or of the outputs.
            images: how to show inputs as pictures: (m, h, w) or (m, c, h, w) of the test inputs, a pair of such arrays
                for test and training inputs, or a function that makes them from a batch of inputs.
            texts: the same for texts, or for lists of (token, weight) pairs, whose words are marked.
            table: the same for rows of a table: a data frame, a dict of columns, or an array.
            **options: `ids` (a name for each prediction, or a pair of such lists for predictions and training
                examples), `title`, `about` (paragraphs below the answer), `sections` (your own parts, see
                `docs/report.md`), `trust` (the result of `Tracer.trust`), `level` (of the verdicts, 0.95), `examples`
                and `pool` (as for `explain`) and `traced` (how many predictions to trace to training examples, 500).

        Returns:
            The path of the file.

        Examples:
            >>> import tempfile, torch, whence
            >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
            >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
            >>> tracer = whence.fit(net, [(x, 2 * x + (99 * x).sin())], ridge=0.1, recenter=True, progress=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     tracer.report(f"{folder}/report.html", (2 * x, 4 * x), table={"size": 2 * x[:, 0]}).name
            'report.html'
        """
        return reports.write(self, path, test, names, (images, texts, table), **options)
